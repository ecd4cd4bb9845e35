"""The order in which prompts are rolled out: complete, repeated as often as used, on any number of processes."""

from __future__ import annotations

from typing import Any

import pytest
from accelerate.data_loader import BatchSamplerShard
from harness import build, rows
from torch.utils.data import BatchSampler

from hf_strategies.trainers.sampler import RolloutSampler, prompt_positions

# prompts, prompts per process, processes, uses
SHAPES = [(12, 4, 1, 1), (12, 4, 1, 3), (10, 4, 1, 2), (12, 3, 2, 2), (11, 2, 3, 1), (8, 8, 1, 2)]


@pytest.mark.parametrize(("prompts", "each", "processes", "uses"), SHAPES)
def test_every_prompt_is_served(prompts: int, each: int, processes: int, uses: int) -> None:
    """Pitfall A-22 and the dropped remainder: every prompt in every epoch, repeated for each use of its rollout."""
    sampler = RolloutSampler(prompts, each, processes, uses, seed=3)
    served, chunk = list(sampler), each * processes
    assert len(served) == len(sampler) == -(-prompts // chunk) * chunk * uses
    assert set(served) == set(range(prompts))
    rollouts = [served[start : start + chunk] for start in range(0, len(served), chunk)]
    for first in range(0, len(rollouts), uses):
        assert all(rollout == rollouts[first] for rollout in rollouts[first : first + uses])
        assert len(set(rollouts[first])) == chunk, "a prompt twice in one rollout"
    fresh = [prompt for rollout in rollouts[::uses] for prompt in rollout]
    assert sorted(fresh[:prompts]) == list(range(prompts))
    # What fills the last rollout up is what the epoch began with.
    assert fresh[prompts:] == fresh[: len(fresh) - prompts]


def test_order_is_a_function_of_seed_and_epoch() -> None:
    def order(seed: int = 0, epoch: int = 0) -> list[int]:
        sampler = RolloutSampler(20, 5, 1, 1, seed=seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert order() == order()
    assert order() != list(range(20))
    orders = [tuple(order(seed, epoch)) for seed in range(4) for epoch in range(4)]
    assert len(set(orders)) == 16
    sampler = RolloutSampler(20, 5, 1, 1, seed=0)
    assert list(sampler) == list(sampler), "iterating twice is the same epoch"


@pytest.mark.parametrize("processes", [2, 3])
def test_processes_share_a_rollout(processes: int) -> None:
    """Pitfall A-22: cut into batches and dealt out as the loader does it, the processes get disjoint prompts of the
    rollout that one process alone would make."""
    each, uses = 2, 2
    alone = list(RolloutSampler(12, each * processes, 1, uses, seed=1))
    shards = [
        list(
            BatchSamplerShard(
                BatchSampler(RolloutSampler(12, each, processes, uses, seed=1), each, drop_last=False),
                num_processes=processes,
                process_index=process,
            )
        )
        for process in range(processes)
    ]
    assert {len(batches) for batches in shards} == {12 // (each * processes) * uses}
    for micro_step, batches in enumerate(zip(*shards, strict=True)):
        together = [prompt for batch in batches for prompt in batch]
        assert together == alone[micro_step * each * processes : (micro_step + 1) * each * processes]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((4, 0, 1, 4), [0, 1, 2, 3]),
        ((4, 0, 1, 2), [0, 1, 2, 3]),
        ((4, 0, 2, 4), [0, 1, 2, 3]),
        ((4, 1, 2, 4), [4, 5, 6, 7]),
        ((4, 0, 2, 2), [0, 1, 4, 5]),
        ((4, 1, 2, 2), [2, 3, 6, 7]),
        ((2, 2, 3, 1), [2, 5]),
    ],
)
def test_places_by_hand(arguments: tuple[int, ...], expected: list[int]) -> None:
    assert prompt_positions(*arguments) == expected


# ---- through the trainer ----


def rolled_out(**options: Any) -> tuple[Any, list[list[str]]]:
    """Trainer, and the prompts of every rollout in order."""
    seen: list[list[str]] = []

    def reward(prompts: list[str], completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        groups = list(zip(*[iter(prompts)] * 2, strict=True))
        assert all(len(set(group)) == 1 for group in groups), "completions of a prompt are neighbours"
        seen.append([group[0] for group in groups])
        return [float(len(ids)) for ids in completion_ids]

    trainer = build(
        "online_grpo",
        data=rows("online_grpo", 6),
        reward_funcs=reward,
        num_generations=2,
        per_device_train_batch_size=4,
        **options,
    )
    trainer.train()
    return trainer, seen


def test_epochs_of_training() -> None:
    """Every prompt in every epoch, in another order; as many steps as there are uses."""
    trainer, seen = rolled_out(num_train_epochs=3, num_iterations=2)
    assert trainer.state.global_step == 3 * 3 * 2
    epochs = [[prompt for rollout in seen[start : start + 3] for prompt in rollout] for start in (0, 3, 6)]
    everything = sorted(row["prompt"] for row in rows("online_grpo", 6))
    assert [sorted(epoch) for epoch in epochs] == [everything] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_seeds_of_the_order() -> None:
    """``data_seed`` decides, ``seed`` where there is none."""
    first = rolled_out()[1]
    assert rolled_out()[1] == first
    assert rolled_out(seed=7)[1] != first
    assert (
        rolled_out(seed=7, data_seed=42)[1] == rolled_out(seed=8, data_seed=42)[1] == first
    )  # 42 is the default seed


def test_last_rollout_is_filled_up() -> None:
    """6 prompts in rollouts of 4."""
    trainer, seen = rolled_out(gradient_accumulation_steps=2)
    assert [len(rollout) for rollout in seen] == [4, 4]
    assert seen[1][2:] == seen[0][:2]
    assert trainer.state.global_step == 2


@pytest.mark.parametrize("accumulation", [1, 4])
def test_rollouts_smaller_or_larger_than_a_step(accumulation: int) -> None:
    _, seen = rolled_out(gradient_accumulation_steps=accumulation, steps_per_generation=1)
    assert [len(rollout) for rollout in seen] == [2, 2, 2]
    assert len({prompt for rollout in seen for prompt in rollout}) == 6
