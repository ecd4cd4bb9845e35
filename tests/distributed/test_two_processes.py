"""Two gloo processes under DDP train what one process trains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import NAMES, total_difference
from safetensors.torch import load_file
from torch import Tensor

WORKER = Path(__file__).parent / "worker.py"
REPLAYED = [
    *NAMES,
    "dpo:adapter_off",
    "dpo:adapter_copy",
    # Pitfall A-35: layers that run again in the backward pass, under DDP.
    "dpo:precompute",
    "dpo:sync",
    "dpo:running_mean",
    "dpo:checkpointing",
    "online_grpo:checkpointing",
    "sft:token_budget",
    "dpo:token_budget",
    "online_grpo:token_budget",
    "sft:low_memory",
    "online_grpo:low_memory",
    "grpo:adapter_off",
    "online_grpo:adapter_off",
    "online_ppo:adapter_copy",
    "online_dpo:ties",
    "grpo:batch_scale",
    "online_grpo:batch_scale",
    "sft:experts",
    "sft:stream",
    "seq:stream",
]
SAMPLED = ["online_grpo:sampled", "online_grpo:reuse", "online_ppo:reuse", "online_dpo:sampled"]
BUGS = ["sft:unscaled", "online_grpo:unscaled", "sft:counted_alone", "online_grpo:counted_alone"]
RESUMED = ["online_grpo:resume", "online_ppo:resume"]
TOLERANCE = 1e-5
pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of every scenario by one process and by two."""
    path = tmp_path_factory.mktemp("two")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    caches = (str(path / "cache1"), str(path / "cache2"))  # what one has computed, two must compute themselves
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    for start, world, cache in (([sys.executable], 1, caches[0]), (torchrun, 2, caches[1])):
        environment["HF_STRATEGIES_CACHE"] = cache
        names = REPLAYED + SAMPLED + ([*BUGS, *RESUMED] if world == 2 else [])
        command = [*start, str(WORKER), str(path), str(world), *names]
        done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment)
        # Some gloo processes abort at exit after all work: the result files decide, the exit code alone does not.
        written = [file_of(path, name, world, rank) for name in names for rank in range(world)]
        missing = [file.name for file in written if not file.with_suffix(".json").exists()]
        said = f"exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
        assert not missing, f"{missing}: {said}"
        assert done.returncode == 0 or "terminate called" in done.stderr, said
    return path


def file_of(folder: Path, name: str, world: int, rank: int = 0) -> Path:
    return folder / f"{name.replace(':', '-')}-{world}-{rank}.safetensors"


def result(folder: Path, name: str, world: int, rank: int = 0) -> tuple[dict[str, Tensor], dict[str, Any]]:
    file = file_of(folder, name, world, rank)
    return load_file(file), json.loads(file.with_suffix(".json").read_text())


@pytest.mark.parametrize("name", REPLAYED + SAMPLED)
def test_two_processes_equal_one(folder: Path, name: str) -> None:
    """Pitfalls D-71, G-1: same updates and losses of three steps, lengths unequal over the processes."""
    (one, facts_of_one), (two, facts) = (result(folder, name, world) for world in (1, 2))
    other, other_facts = result(folder, name, 2, rank=1)
    assert (facts_of_one["world"], facts["world"], other_facts["world"]) == (1, 2, 2)
    assert facts["wrapper"] == other_facts["wrapper"] == "DistributedDataParallel"
    assert all(torch.equal(value, other[key]) for key, value in two.items())
    assert total_difference(two, one) < TOLERANCE
    ours, theirs = ([entry["loss"] for entry in f["log"]] for f in (facts, facts_of_one))
    assert len(ours) == 3
    assert ours == pytest.approx(theirs, rel=TOLERANCE, abs=1e-6)


@pytest.mark.parametrize("name", REPLAYED + SAMPLED)
def test_metrics_are_reduced_over_the_processes(folder: Path, name: str) -> None:
    """Pitfalls A-40, B-47: what is logged is a mean over all rows, not over the processes' means."""
    (_, facts_of_one), (_, facts) = (result(folder, name, world) for world in (1, 2))
    # Speeds differ; a standard deviation and an explained variance are those of a process's rows, and averaged.
    # The extremes, and what padding would have cost, are those of micro-batches, which two processes cut in half.
    own = ("per_second", "/std", "explained_variance", "clip_ratio/low_min", "clip_ratio/high_max", "sharing_factor")
    compared = set()
    for ours, theirs in zip(facts["log"], facts_of_one["log"], strict=True):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            # Which of two equal log-probabilities is larger is a matter of rounding.
            tossed = key == "rewards/accuracies" and theirs["rewards/margins"] == pytest.approx(0.0, abs=1e-6)
            if not key.endswith(own) and not tossed:
                assert ours[key] == pytest.approx(value, rel=1e-4, abs=1e-5), key
                compared.add(key)
    assert {"loss", "grad_norm", "num_tokens"} < compared
    assert ("rows_dropped/too_long" in compared) == (name == "sft:stream")


@pytest.mark.parametrize("name", SAMPLED)
def test_two_processes_sample_what_one_samples(folder: Path, name: str) -> None:
    """Pitfall A-25: noise is a function of the prompt's position over all processes, not of the process."""
    _, one = result(folder, name, 1)
    _, first = result(folder, name, 2, rank=0)
    _, second = result(folder, name, 2, rank=1)
    # Of a rollout for several steps the processes take turns: four completions of each are the eight of one step.
    joined = [
        [ids for start in range(0, len(mine), 4) for ids in mine[start : start + 4] + other[start : start + 4]]
        for mine, other in zip(first["completions"], second["completions"], strict=True)
    ]
    assert joined == one["completions"]
    assert first["completions"] != second["completions"]
    assert len({tuple(ids) for rollout in joined for ids in rollout}) > sum(map(len, joined)) / 2


@pytest.mark.parametrize("name", BUGS)
def test_a_deliberate_bug_is_seen(folder: Path, name: str) -> None:
    """Negative control: the comparison above fails when the loss is not scaled, or counted per process."""
    one, _ = result(folder, name.partition(":")[0], 1)
    two, facts = result(folder, name, 2)
    assert facts["world"] == 2
    assert total_difference(two, one) > (0.3 if name.endswith("unscaled") else 1e-3)


@pytest.mark.parametrize("name", RESUMED)
def test_resume_on_two_processes(folder: Path, name: str) -> None:
    """Pitfall F-89: the checkpoint lies within a rollout's uses; every process finds its own half again."""
    checkpoint = folder / f"{name.replace(':', '-')}-2" / "checkpoint-3"
    assert sorted(p.name for p in checkpoint.glob("rollouts-*.json")) == ["rollouts-0.json", "rollouts-1.json"]
    for rank in (0, 1):
        distance, facts = result(folder, name, 2, rank)
        assert facts["world"] == 2
        assert all(torch.count_nonzero(value) == 0 for value in distance.values())
        straight, resumed = facts["log"]
        assert straight == resumed
        assert len(straight) == 3
        assert facts["rewards"][0] == facts["rewards"][1]
