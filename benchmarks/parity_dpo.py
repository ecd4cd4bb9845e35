"""The losses of 20 steps of TRL's DPOTrainer and of ours: same tiny random model, pairs, seed and options.

    python -m benchmarks.parity_dpo    # some minutes; the table, and an error where the sides differ

Each loss is run with all weights trained, and with a LoRA adapter that starts from trained weights (random ones), so
that the reference is in turn a second model and a frozen copy of the adapter. Where ours is meant to compute something
else, that is run too, and must differ.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, logging

from benchmarks.data import Texts
from benchmarks.run import SIDES

STEPS = 20
TOLERANCE = 1e-4
MICRO_BATCH, ACCUMULATION = 2, 2
LOSSES: dict[str, dict[str, Any]] = {
    "sigmoid": {},
    "ipo": {},
    "hinge": {},
    "robust": {"label_smoothing": 0.1},
}
# Of the log: what both sides report under the same name.
METRICS = ("rewards/margins", "rewards/accuracies", "logps/chosen", "logps/rejected")
# What differs on purpose: name -> options, pairs of the dataset, reason.
FIXES: dict[str, tuple[dict[str, Any], int, str]] = {
    "label_smoothing of sigmoid": (
        {"loss_type": ["sigmoid"], "label_smoothing": 0.1},
        STEPS * MICRO_BATCH * ACCUMULATION,
        "conservative DPO; TRL ignores the option there",
    ),
    "short micro-batches": (
        {"loss_type": ["sigmoid"]},
        STEPS * MICRO_BATCH * ACCUMULATION // 4 - 1,
        "four epochs of 19 pairs: the last micro-batch of each has one pair. Here pairs weigh the same; in TRL "
        "micro-batches do, and that pair weighs double",
    ),
}


def make_models(folder: Path) -> None:
    """A tiny random model, and an adapter on it that is no longer the identity."""
    from hf_strategies.modeling.embedded import embedded_model_path

    tokenizer = AutoTokenizer.from_pretrained(str(embedded_model_path()))
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    adapter = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(model, adapter).save_pretrained(str(folder / "adapter"))


def pairs(tokenizer: Any, count: int) -> Dataset:
    """Pairs of ragged texts; in every fourth one answer begins with the other."""
    texts = Texts(tokenizer)
    rows = []
    for i in range(count):
        chosen, rejected = texts(2 + 5 * i % 17), texts(3 + 7 * i % 13)
        if i % 4 == 0:
            rejected = chosen + rejected
        rows.append({"prompt": texts(4 + 11 * i % 23), "chosen": chosen, "rejected": rejected})
    return Dataset.from_list(rows)


def train(side: str, folder: Path, options: dict[str, Any], count: int, adapter: bool) -> list[dict[str, float]]:
    """The log of every step."""
    library = importlib.import_module("trl" if side == "trl" else "hf_strategies")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapter:
        model = PeftModel.from_pretrained(model, str(folder / "adapter"), is_trainable=True)
    args = library.DPOConfig(
        output_dir=tempfile.mkdtemp(dir=folder),
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=ACCUMULATION,
        max_steps=STEPS,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        max_length=128,
        logging_steps=1,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=3,
        **options,
    )
    trainer = library.DPOTrainer(
        model=model, args=args, train_dataset=pairs(tokenizer, count), processing_class=tokenizer
    )
    trainer.train()
    return [
        {name: entry[name] for name in ("loss", *METRICS)} for entry in trainer.state.log_history if "loss" in entry
    ]


def run(side: str, folder: Path) -> dict[str, list[dict[str, float]]]:
    """Logs of all cases of one side."""
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    count = STEPS * MICRO_BATCH * ACCUMULATION
    logs = {}
    for name, options in LOSSES.items():
        for adapter in (False, True):
            case = f"{name}, {'trained adapter' if adapter else 'all weights'}"
            logs[case] = train(side, folder, {"loss_type": [name]} | options, count, adapter)
    for name, (options, pairs_of_case, _) in FIXES.items():
        logs[name] = train(side, folder, options, pairs_of_case, adapter=False)
    return logs


def run_apart(side: str, folder: Path) -> dict[str, list[dict[str, float]]]:
    """The same in a process of its own: TRL changes classes that both sides use."""
    command = [sys.executable, "-m", "benchmarks.parity_dpo", "--side", side, "--folder", str(folder)]
    environment = {**os.environ, "TRL_EXPERIMENTAL_SILENCE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise RuntimeError(f"{side} ended with exit status {done.returncode}:\n{done.stderr[-4000:]}")
    return json.loads(lines[-1].removeprefix("RESULT "))


def compare(trl: list[dict[str, float]], ours: list[dict[str, float]]) -> dict[str, float]:
    """Largest difference of each number over the steps."""
    assert len(trl) == len(ours) == STEPS, f"{len(trl)} and {len(ours)} steps logged, {STEPS} expected"
    return {name: max(abs(a[name] - b[name]) for a, b in zip(trl, ours, strict=True)) for name in trl[0]}


def report(trl: dict[str, list[dict[str, float]]], ours: dict[str, list[dict[str, float]]]) -> list[str]:
    """Print the table; names of the cases that are not as they should be."""
    packages = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("trl", "transformers", "peft"))
    print(f"{packages}; {STEPS} steps of {MICRO_BATCH} x {ACCUMULATION} pairs; largest difference of a step\n")
    columns = ("loss", *METRICS)
    print(f"| case | first and last loss | {' | '.join(columns)} |")
    print("|---" * (2 + len(columns)) + "|")
    wrong = []
    for case, log in trl.items():
        differences = compare(log, ours[case])
        losses = [step["loss"] for step in log]
        cells = " | ".join(f"{differences[name]:.1e}" for name in columns)
        print(f"| {case} | {losses[0]:.4f}, {losses[-1]:.4f} | {cells} |")
        # Two sides that do not train agree as well.
        if max(losses) - min(losses) < 100 * TOLERANCE or (differences["loss"] <= TOLERANCE) == (case in FIXES):
            wrong.append(case)
    print("\nDifferences that are meant:")
    for name, (_, _, reason) in FIXES.items():
        print(f"- {name}: {reason}.")
    return wrong


def main() -> None:
    """Run both sides and compare them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", choices=SIDES, help="Run this side here and print its logs.")
    parser.add_argument("--folder", type=Path, help="Where the models are, for --side.")
    options = parser.parse_args()
    if options.side:
        print("RESULT " + json.dumps(run(options.side, options.folder)))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_models(folder)
        wrong = report(*(run_apart(side, folder) for side in SIDES))
    if wrong:
        sys.exit(f"not as expected (losses within {TOLERANCE}; further apart where that is meant): {wrong}")


if __name__ == "__main__":
    main()
