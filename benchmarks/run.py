"""Runs cases on both sides alternately, each run in a process of its own, and makes tables from the raw results.

python -m benchmarks.run grpo                      # all rows of a table; rows that are done are not run again
python -m benchmarks.run grpo --only grpo-512-64-8 --pairs 1
python -m benchmarks.run --tables                  # the markdown tables, from the results that are there
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from tqdm import tqdm

from benchmarks.cases import TABLES, Case

RESULTS = Path("runs/benchmarks")
SIDES = ("trl", "ours")
PACKAGES = ("torch", "transformers", "peft", "trl")
MEASURES = {
    "train": "train phase",
    "step": "whole step",
    "generation": "sampling",
    "memory": "memory above the model",
    "tokens": "tokens per second",
}


def run_once(side: str, case: Case, log: Path) -> dict[str, Any]:
    """One process; a run that fails or is killed is a result too."""
    command = [sys.executable, "-m", "benchmarks.worker", side, json.dumps(case.fields())]
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    log.write_text(done.stdout + done.stderr)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        return {"side": side, "case": case.name, "failed": f"exit status {done.returncode}"}
    return json.loads(lines[-1].removeprefix("RESULT "))


def run_case(case: Case, pairs: int) -> None:
    """Alternating pairs until there are ``pairs`` of them."""
    folder = RESULTS / case.name
    folder.mkdir(parents=True, exist_ok=True)
    for pair in range(pairs):
        for side in SIDES:
            path = folder / f"{pair}-{side}.json"
            if not path.exists():
                result = run_once(side, case, path.with_suffix(".log"))
                path.write_text(json.dumps(result, indent=1))


def read(case: Case) -> dict[str, list[dict[str, Any]]]:
    """Results of a case by side, in the order of their pairs."""
    folder = RESULTS / case.name
    return {side: [json.loads(p.read_text()) for p in sorted(folder.glob(f"*-{side}.json"))] for side in SIDES}


def row(case: Case) -> dict[str, Any] | None:
    """Medians and ratios of a case; None while it has no complete pair."""
    results = read(case)
    if not all(results.values()):
        return None
    failed = {side: next((r["failed"] for r in runs if "failed" in r), None) for side, runs in results.items()}
    if any(failed.values()):
        return {"case": case.name, "failed": failed}
    pairs = list(zip(results["trl"], results["ours"], strict=False))
    keys = {"train": "train", "step": "step", "generation": "generation", "memory": "above_model_gb"}
    keys["tokens"] = "tokens_per_second"
    figures: dict[str, Any] = {"case": case.name, "pairs": len(pairs)}
    for name, key in keys.items():
        ratios = [trl[key] / ours[key] for trl, ours in pairs if ours[key]]
        if name == "tokens":  # the more the better
            ratios = [1 / ratio for ratio in ratios if ratio]
        figures[name] = {
            "trl": median(trl[key] for trl, _ in pairs),
            "ours": median(ours[key] for _, ours in pairs),
            "ratio": median(ratios) if ratios else None,
        }
    lengths = {trl["mean_length"] for trl, _ in pairs} | {ours["mean_length"] for _, ours in pairs}
    assert len(lengths) == 1, f"{case.name}: the two sides trained on different lengths: {lengths}"
    figures["sharing_factor"] = pairs[0][1]["sharing_factor"]
    return figures


def table(name: str) -> str:
    """Markdown of one table."""
    lines = [
        "| case | pairs | train phase | whole step | sampling | memory above the model | tokens | sharing | goals |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for case in TABLES[name]:
        figures = row(case)
        if figures is None:
            continue
        if "failed" in figures:
            lines.append(f"| {case.name} | | {figures['failed']} | | | | | | |")
            continue
        cells = []
        for key in MEASURES:
            f, unit = figures[key], {"memory": "GB", "tokens": "/s"}.get(key, "s")
            if case.kind != "sft" and key == "tokens":
                cells.append("")
                continue
            ratio = "" if f["ratio"] is None or not f["trl"] else f" (**{f['ratio']:.1f}x**)"
            cells.append(f"{f['trl']:.1f} / {f['ours']:.1f} {unit}{ratio}")
        goals = ", ".join(
            f"{MEASURES[key]} {goal:g}x {'reached' if figures[key]['ratio'] >= goal else 'missed'}"
            for key, goal in case.goals
        )
        sharing = figures["sharing_factor"]
        cells += [f"{sharing:.1f}" if sharing else "", goals]
        lines.append(f"| {case.name} | {figures['pairs']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(table_name: str | None = None) -> None:
    """Run what the command line names, or one table, then print what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    if table_name is None:
        parser.add_argument("tables", nargs="*", choices=[*TABLES, []], help="Tables to run.")
    else:
        parser.set_defaults(tables=[table_name])
    parser.add_argument("--only", action="append", help="Only these cases.")
    parser.add_argument("--pairs", type=int, help="Pairs of runs per case instead of the case's own.")
    parser.add_argument("--tables", dest="show", action="store_true", help="Print all tables, run nothing.")
    options = parser.parse_args()
    for name in () if options.show else options.tables or TABLES:
        cases = [case for case in TABLES[name] if not options.only or case.name in options.only]
        for case in tqdm(cases, desc=name):
            run_case(case, options.pairs or case.pairs)
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in PACKAGES)
    print(
        f"SmolLM2-135M-Instruct, LoRA r=16, float32, 2 threads; {versions}; TRL / ours, medians of alternating runs\n"
    )
    for name in TABLES if options.show or not options.tables else options.tables:
        print(f"### {name}\n\n{table(name)}\n")


if __name__ == "__main__":
    main()
