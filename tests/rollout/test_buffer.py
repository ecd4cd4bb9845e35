"""The buffer: which micro-batch serves which micro-step."""

from __future__ import annotations

import pytest
import torch

from hf_strategies import Batch, Row
from hf_strategies.rollout.buffer import RolloutBuffer


def batches(count: int, first: int = 0) -> list[Batch]:
    """Micro-batches that can be told apart by their completion ids; of unequal shapes."""
    return [
        Batch.from_rows(
            [
                Row([1] * (1 + i % 2), [first + i] * (1 + i), reward=0.5 * i, sampling_logprobs=[-1.0] * (1 + i)),
                Row([1, 2], [first + i], reward=None, group=1, sampling_logprobs=[-2.0], truncated=True),
            ],
            pad_token_id=7 + i,
        )
        for i in range(count)
    ]


def label(batch: Batch) -> int:
    return int(batch.completion_ids[0, 0])


@pytest.mark.parametrize(("steps", "uses"), [(1, 1), (1, 3), (3, 1), (3, 2), (2, 4)])
def test_what_serves_which_step(steps: int, uses: int) -> None:
    """Pitfall A-19: one rollout per ``steps * uses`` micro-steps, its parts in turn, each exactly ``uses`` times."""
    buffer = RolloutBuffer(steps, uses)
    assert buffer.window == steps * uses
    served, generations, asked = [], [], []
    for micro_step in range(3 * buffer.window):
        assert buffer.micro_step == micro_step
        generations.append(buffer.generation)
        if buffer.needs_rollout:
            asked.append(micro_step)
            buffer.fill(batches(steps, first=100 * (1 + buffer.generation)))
        served.append(label(buffer.next()))
    assert asked == [0, buffer.window, 2 * buffer.window]
    assert served == [100 * (1 + g) + i for g in range(3) for _ in range(uses) for i in range(steps)]
    assert generations == [g for g in range(3) for _ in range(buffer.window)]


def test_misuse() -> None:
    buffer = RolloutBuffer(2, 2)
    with pytest.raises(RuntimeError, match="the rollout buffer is empty"):
        buffer.next()
    for wrong in (1, 3):
        with pytest.raises(ValueError, match=f"a rollout makes 2 micro-batches, got {wrong}"):
            buffer.fill(batches(wrong))
    buffer.fill(batches(2))
    buffer.next()
    with pytest.raises(RuntimeError, match="still in use at micro-step 1"):
        buffer.fill(batches(2))
    for _ in range(3):
        buffer.next()
    # Used up: asking on must not serve it a third time.
    with pytest.raises(RuntimeError, match="empty"):
        buffer.next()
    assert buffer.micro_step == 4


@pytest.mark.parametrize("position", range(5))
def test_state_comes_back_at_every_position(position: int) -> None:
    """Pitfall F-89."""
    straight = RolloutBuffer(2, 2)
    straight.fill(batches(2))
    for _ in range(position):
        straight.next()
    numbers, tensors = straight.state()
    assert bool(tensors) == (position < 4), "a rollout that is used up is not kept"
    assert all(value.is_contiguous() for value in tensors.values())
    restored = RolloutBuffer(2, 2)
    restored.load_state(numbers, tensors)
    assert (restored.micro_step, restored.generation) == (straight.micro_step, straight.generation)
    for _ in range(position, 4):
        mine, theirs = restored.next(), straight.next()
        assert mine.pad_token_id == theirs.pad_token_id
        assert mine.tensors().keys() == theirs.tensors().keys()
        for name, value in theirs.tensors().items():
            assert value.dtype == mine.tensors()[name].dtype
            assert torch.equal(value.nan_to_num(-9.0), mine.tensors()[name].nan_to_num(-9.0)), name
    assert restored.needs_rollout


def test_more_than_ten_micro_batches_come_back_in_order() -> None:
    """Their names in the file are numbers: "1." is not the beginning of "10."."""
    straight, restored = RolloutBuffer(12, 1), RolloutBuffer(12, 1)
    straight.fill(batches(12))
    restored.load_state(*straight.state())
    assert [label(restored.next()) for _ in range(12)] == list(range(12))


def test_state_replaces_what_was_there() -> None:
    buffer = RolloutBuffer(2, 1)
    empty = buffer.state()
    buffer.fill(batches(2))
    buffer.load_state(*empty)
    with pytest.raises(RuntimeError, match="empty"):
        buffer.next()


def test_state_of_other_settings() -> None:
    numbers, tensors = RolloutBuffer(2, 2).state()
    with pytest.raises(ValueError, match=r"the checkpoint's rollouts serve 4 micro-steps, this run's 2 .*resume with"):
        RolloutBuffer(2, 1).load_state(numbers, tensors)
