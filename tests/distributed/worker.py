"""Run by torchrun, or alone: trains a few strategies and writes their updates to a folder."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent.parent))
from harness import ONLINE, build, logged, lora, policy, rows, weights


def train(name: str, world: int, sampled: bool) -> tuple[dict[str, torch.Tensor], list[float]]:
    model = policy("llama", False)
    if name == "online_grpo":
        model = lora(model)
    start = weights(model)
    rows_per_step = 8
    options: dict[str, object] = {
        "per_device_train_batch_size": rows_per_step // world // (1 if name in ONLINE else 2),
        "gradient_accumulation_steps": 1 if name in ONLINE else 2,
        "learning_rate": 0.1,
        "max_steps": 3,
        "seed": 3,
    }
    if name == "seq":
        options["max_length"] = 12
    count = 6 if name in ONLINE else 24
    trainer = build(name, model, rows(name, count), engine=None if sampled else "replay", **options)
    trainer.train()
    assert trainer.args.world_size == world
    wrapped = type(trainer.model_wrapped).__name__
    assert (wrapped == "DistributedDataParallel") == (world == 2), wrapped
    ended = weights(trainer.accelerator.unwrap_model(trainer.model))
    return {k: ended[k] - v for k, v in start.items()}, logged(trainer, "loss")


def main() -> None:
    folder, world = Path(sys.argv[1]), int(sys.argv[2])
    for name in sys.argv[3:]:
        strategy, _, how = name.partition(":")
        update, losses = train(strategy, world, how == "sampled")
        if not dist.is_initialized() or dist.get_rank() == 0:
            save_file(
                {**update, "losses": torch.tensor(losses)}, folder / f"{name.replace(':', '-')}-{world}.safetensors"
            )
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
