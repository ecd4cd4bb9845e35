"""Run by torchrun, or alone: trains each scenario and writes what came out to a folder, one file per process.

worker.py FOLDER WORLD SCENARIO...
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from safetensors.torch import save_file
from transformers import TrainerCallback

TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS), str(TESTS.parent)]
from harness import ONLINE, build, logged, lora, needs, policy, rows, weights  # noqa: E402

# Rows of one optimizer step over all processes.
ROWS = 8


class Completions(TrainerCallback):
    """Sampled ids of every training rollout."""

    def __init__(self) -> None:
        self.rollouts: list[list[list[int]]] = []

    def on_rollout(self, args: Any, state: Any, control: Any, rollout: Any = None, **kwargs: Any) -> None:
        batch = rollout.batch
        self.rollouts.append(
            [batch.completion_ids[i][batch.completion_mask[i]].tolist() for i in range(batch.num_rows)]
        )


def mostly_tied(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Equal rewards for most prompts: the processes keep different numbers of pairs, sometimes none."""
    return [float(sum(row) % 4 == 0) for row in completion_ids]


def scenario(name: str, world: int) -> dict[str, Any]:
    """What ``build`` gets: two processes hold half of the rows each, one process all of them.

    Args:
        name: a strategy's name, and after a colon what is special.
        world: number of processes.
    """
    strategy, _, special = name.partition(":")
    online = strategy in ONLINE
    options: dict[str, Any] = {
        "name": strategy,
        "per_device_train_batch_size": ROWS // world // (1 if online else 2),
        "gradient_accumulation_steps": 1 if online else 2,
        "learning_rate": 0.1,
        "max_steps": 3,
        "num_train_epochs": 3,
        "seed": 3,
        "data": rows(strategy, 16 if online else 24),
        "trainer": needs(strategy, "llama"),
    }
    if strategy == "seq":
        options["max_length"] = 12
    if online:
        options["num_generations"] = 2
    if special == "sampled":
        options |= {"engine": None, "temperature": 0.8}
    elif special == "adapter_off":
        options |= {"model": lora(policy("gpt2"), nonzero=False), "trainer": {}}
    elif special == "precompute":
        # Three batches of eight of all rows: one process has two of them to score, the other one.
        options |= {"precompute_ref_log_probs": True, "precompute_ref_batch_size": 8}
    elif special == "running_mean":
        options |= {"loss_type": "bco_pair", "bco_running_mean": True, "beta": 0.5}
    elif special == "sync":
        options |= {"model": lora(policy("llama")), "trainer": {}, "sync_ref_model": True, "ref_model_sync_steps": 1}
    elif special == "checkpointing":
        options |= {
            "model": lora(policy("llama"), nonzero=False),
            "trainer": {},
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": False},
        }
    elif special == "token_budget":
        # The processes need different numbers of pieces, and run the same.
        options |= {"max_tokens_per_micro_batch": 24, "per_device_train_batch_size": ROWS // world}
    elif special == "low_memory":
        options |= {"low_memory": True, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4 // world}
    elif special == "adapter_copy":
        options |= {"model": lora(policy("llama")), "trainer": {}}
    elif special == "reuse":
        # Old log-probs are pinned, and the last pass over a rollout is several steps old.
        options |= {"engine": None, "num_iterations": 2, "steps_per_generation": 2, "learning_rate": 0.02}
    elif special == "ties":
        options |= {
            "model": lora(policy("llama"), nonzero=False),
            "trainer": {},
            "steps_per_generation": 2,
            "reward_funcs": mostly_tied,
        }
    elif special == "batch_scale":
        options |= {"scale_rewards": "batch"}
    elif special == "stream":
        # Rows that are left out shift all that follow: the processes must agree on the position of each.
        options["data"] = Dataset.from_list(options["data"]).to_iterable_dataset()
        if strategy == "sft":
            options |= {"max_length": 9, "truncation_mode": "drop"}
    elif special == "experts":
        # The balance loss is that of a micro-batch: one process gets the same micro-batches, twice as many.
        options |= {
            "model": policy("mixtral"),
            "router_aux_loss_coef": 0.5,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 4 // world,
            "trainer": needs(strategy, "mixtral"),
        }
    return options


def unscaled(trainer: Any) -> None:
    """A deliberate bug: the loss is not multiplied by the number of processes, over which the engine averages."""
    right = trainer.compute_loss
    trainer.compute_loss = lambda *args, **kwargs: right(*args, **kwargs) / trainer.accelerator.num_processes


def counted_alone(trainer: Any) -> None:
    """A deliberate bug: every process divides by twice its own count instead of the count of all."""
    right = trainer.get_batch_samples

    def get_batch_samples(*args: Any) -> Any:
        inputs, _ = right(*args)
        pieces = [piece["batch"] for sample in inputs for piece in sample["pieces"]]
        mine = sum(trainer.strategy.count_items(piece) for piece in pieces)
        return inputs, mine * trainer.accelerator.num_processes

    trainer.get_batch_samples = get_batch_samples


def train(name: str, world: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Train a scenario.

    Returns:
        The update of every trained weight, and what was logged.
    """
    options = scenario(name, world)
    completions = Completions()
    trainer = build(**options, callbacks=[completions])
    if name.endswith(":unscaled"):
        unscaled(trainer)
    elif name.endswith(":counted_alone"):
        counted_alone(trainer)
    start = weights(trainer.model)
    trainer.train()
    assert trainer.args.world_size == world
    assert trainer.state.global_step == 3
    wrapper = type(trainer.model_wrapped).__name__
    assert (wrapper == "DistributedDataParallel") == (world == 2), wrapper
    ended = weights(trainer.accelerator.unwrap_model(trainer.model_wrapped))
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    facts = {"log": log, "completions": completions.rollouts, "wrapper": wrapper, "world": trainer.args.world_size}
    return {key: ended[key] - value for key, value in start.items()}, facts


def resume(name: str, world: int, folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Six steps, and three + a checkpoint + three, on the same processes.

    Returns:
        Distance of the two runs' weights, and what was logged.
    """
    options = scenario(name.removesuffix(":resume") + ":reuse", world)
    options |= {"max_steps": 6, "num_train_epochs": 6, "save_strategy": "steps", "save_steps": 3}
    options |= {"optim": "adamw_torch", "output_dir": str(folder / f"{name.replace(':', '-')}-{world}")}
    straight = build(**options)
    straight.train()
    resumed = build(**{**options, "output_dir": tempfile.mkdtemp()})
    resumed.train(resume_from_checkpoint=str(Path(options["output_dir"]) / "checkpoint-3"))
    assert resumed.state.global_step == straight.state.global_step == 6
    expected, got = weights(straight.model), weights(resumed.model)
    facts = {
        "log": [logged(straight, "loss")[3:], logged(resumed, "loss")[3:]],
        "rewards": [logged(straight, "reward")[-1:], logged(resumed, "reward")[-1:]],
        "world": resumed.args.world_size,
    }
    return {key: (got[key] - value).abs() for key, value in expected.items()}, facts


def main() -> None:
    folder, world = Path(sys.argv[1]), int(sys.argv[2])
    for name in sys.argv[3:]:
        update, facts = resume(name, world, folder) if name.endswith(":resume") else train(name, world)
        rank = dist.get_rank() if dist.is_initialized() else 0
        stem = f"{name.replace(':', '-')}-{world}-{rank}"
        save_file(update, folder / f"{stem}.safetensors")
        (folder / f"{stem}.json").write_text(json.dumps(facts))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
