"""What is measured, and what each case must reach."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        name: unique; selects the row on the command line.
        kind: grpo, dpo, sft or rollout.
        prompt: tokens of each prompt.
        completion: tokens of each completion; the longest where they are ragged.
        group: completions per prompt; 1 for sft, 2 for dpo.
        prompts: prompts (pairs, documents) per optimizer step, each a micro-batch.
        beta: KL weight of grpo.
        ragged: mean length of completions / longest; the rest is padding for whoever pads.
        tied: share of groups whose rewards are all equal.
        checkpointing: recompute activations in the backward pass, on both sides.
        packed: TRL packs (sft).
        rollout_dtype: precision in which we sample; TRL has no such option.
        goals: measure -> ratio to reach.
        pairs: alternating pairs of runs.
    """

    name: str
    kind: str
    prompt: int
    completion: int
    group: int = 8
    prompts: int = 1
    beta: float = 0.0
    ragged: float = 1.0
    tied: float = 0.0
    checkpointing: bool = False
    packed: bool = False
    rollout_dtype: str | None = None
    goals: tuple[tuple[str, float], ...] = ()
    pairs: int = 3

    def fields(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


GRPO = (
    Case("grpo-512-64-8", "grpo", 512, 64, goals=(("train", 6.0), ("step", 5.0), ("memory", 3.0))),
    Case("grpo-512-64-8-checkpointed", "grpo", 512, 64, checkpointing=True, goals=(("memory", 5.0),)),
    Case("grpo-512-64-8-bf16-rollouts", "grpo", 512, 64, rollout_dtype="bfloat16", goals=(("step", 6.0),)),
    Case("grpo-1024-64-8", "grpo", 1024, 64, goals=(("train", 8.0), ("step", 6.0))),
    Case("grpo-262-64-8x2-kl", "grpo", 262, 64, prompts=2, beta=0.04, goals=(("step", 5.0),)),
    Case("grpo-128-128-8", "grpo", 128, 128, goals=(("step", 2.0),)),
    Case("grpo-64-256-8", "grpo", 64, 256, goals=(("step", 1.5),)),
    Case("grpo-512-64-8-ragged", "grpo", 512, 64, prompts=3, ragged=0.5, tied=1 / 3, goals=(("train", 8.0),)),
)
DPO = (Case("dpo-512-64", "dpo", 512, 64, group=2, prompts=2, goals=(("step", 2.5), ("memory", 2.0)), pairs=5),)
SFT = (
    Case("sft-ragged", "sft", 20, 380, group=1, prompts=16, ragged=0.2, goals=(("tokens", 2.0),), pairs=5),
    Case(
        "sft-packed", "sft", 20, 380, group=1, prompts=16, ragged=0.2, packed=True, goals=(("tokens", 1.1),), pairs=5
    ),
)
ROLLOUT = (
    Case("rollout-512-64-8", "rollout", 512, 64),
    Case("rollout-262-64-8x2", "rollout", 262, 64, prompts=2),
    Case("rollout-64-256-8", "rollout", 64, 256),
)
SCALING = tuple(
    replace(GRPO[0], name=f"scaling-P{prompt}-G{group}", prompt=prompt, group=group, goals=(), pairs=1)
    for prompt in (64, 256, 1024)
    for group in (2, 4, 8, 16)
)
TABLES = {"grpo": GRPO, "dpo": DPO, "sft": SFT, "rollout": ROLLOUT, "scaling": SCALING}
