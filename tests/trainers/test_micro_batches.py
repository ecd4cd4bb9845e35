"""Micro-batches cut by a budget of tokens: smaller passes, the same gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import NAMES, ONLINE, difference, logged, lora, needs, policy, run
from torch import Tensor

from hf_strategies import Batch, Row, SFTConfig
from hf_strategies.modeling.stream import Stream
from hf_strategies.trainers.micro_batches import level, pieces_of


def batch_of(*groups: tuple[int, list[int]]) -> Batch:
    """Groups of (prompt length, completion lengths); a row's first completion token is its number."""
    rows, number = [], 0
    for group, (prompt, completions) in enumerate(groups):
        for length in completions:
            rows.append(Row([1] * prompt, [100 + number] * length, group=group))
            number += 1
    return Batch.from_rows(rows)


def rows_in(piece: Batch) -> list[int]:
    return [int(ids[0]) - 100 for ids in piece.completion_ids]


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
@pytest.mark.parametrize("path", ["stream", "padded"])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_do_not_depend_on_the_budget(name: str, path: str, kind: str) -> None:
    """One micro-batch in one pass and in many; what is logged is the same too."""

    def train(budget: int | None) -> tuple[dict[str, Tensor], Any]:
        trainer, capture = run(
            name,
            lora(policy(kind)),
            trainer=needs(name, kind),
            attention_path=path,
            max_tokens_per_micro_batch=budget,
        )
        return capture.steps[0], trainer

    expected, whole = train(None)
    for budget in (30, 1):
        got, trainer = train(budget)
        assert difference(got, expected) < 1e-5
        for key in ("loss", "entropy", "policy_loss", "dpo_loss", "reward", "num_tokens"):
            assert logged(trainer, key) == pytest.approx(logged(whole, key), abs=2e-6), key


@pytest.mark.parametrize("name", ONLINE)
def test_no_pass_is_larger_than_the_budget(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In training; a group of a pair is a whole."""
    sizes: list[int] = []
    original = Stream.of.__func__  # type: ignore[attr-defined]

    def of(cls: Any, batch: Batch, **options: Any) -> Stream:
        stream = original(cls, batch, **options)
        if torch.is_grad_enabled():
            sizes.append(stream.num_tokens)
        return stream

    monkeypatch.setattr(Stream, "of", classmethod(of))
    run(name, lora(policy("llama")), max_tokens_per_micro_batch=25)
    assert len(sizes) > 1
    assert max(sizes) <= 25


def test_groups_stay_together_where_they_fit() -> None:
    """Costs 10 + 3 * 2 = 16, 4 + 5 = 9, 6 + 2 + 2 = 10: two pieces of at most 20."""
    batch = batch_of((10, [2, 2, 2]), (4, [5]), (6, [2, 2]))
    pieces = pieces_of(batch, 20, keep_groups=False, shared_prompts=True)
    assert [rows_in(piece) for piece in pieces] == [[0, 1, 2], [3, 4, 5]]
    assert [Stream.of(piece).num_tokens for piece in pieces] == [16, 19]


def test_a_group_that_is_too_large_is_parted_unless_it_must_not_be() -> None:
    """Prompt 10 and four completions of 5: 30 tokens under a budget of 20 are 2 x 20."""
    batch = batch_of((10, [5, 5, 5, 5]))
    parted = pieces_of(batch, 20, keep_groups=False, shared_prompts=True)
    assert [rows_in(piece) for piece in parted] == [[0, 1], [2, 3]]
    assert [rows_in(piece) for piece in pieces_of(batch, 20, keep_groups=True, shared_prompts=True)] == [[0, 1, 2, 3]]
    # Without sharing every row brings its prompt: 15 each.
    alone = pieces_of(batch, 20, keep_groups=False, shared_prompts=False)
    assert [rows_in(piece) for piece in alone] == [[0], [1], [2], [3]]


@pytest.mark.parametrize("budget", [1, 7, 20, 33, 64, 1000])
def test_nothing_is_lost_and_order_is_kept(budget: int) -> None:
    batch = batch_of((3, [4, 1, 6]), (1, [2]), (8, [3, 3]), (2, [9, 1]), (5, [1]))
    pieces = pieces_of(batch, budget, keep_groups=False, shared_prompts=True)
    assert sorted(row for piece in pieces for row in rows_in(piece)) == list(range(batch.num_rows))
    for piece in pieces:
        assert rows_in(piece) == sorted(rows_in(piece))
        assert piece.num_rows == 1 or Stream.of(piece).num_tokens <= budget


def test_pieces_are_balanced() -> None:
    """Twelve rows of 1 to 12 tokens in three pieces of 26 each."""
    batch = batch_of(*((1, [length]) for length in range(1, 13)))
    loads = [Stream.of(p).num_tokens for p in pieces_of(batch, 31, keep_groups=False, shared_prompts=True)]
    assert len(loads) == 3
    assert max(loads) - min(loads) <= 2


def test_every_process_runs_the_same_number_of_pieces() -> None:
    """The other process needs 3 and 1 pieces; blank ones train nothing."""
    batch = batch_of((2, [3]), (2, [3]))
    one, two = batch.select([0]), batch.select([1])
    levelled = level([[batch], [one, two]], lambda mine: [*mine, [3, 1]])
    assert [len(pieces) for pieces in levelled] == [3, 2]
    assert all(not piece.loss_mask.any() and int(piece.num_tokens) == 0 for piece in levelled[0][1:])


def test_bad_budget(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="max_tokens_per_micro_batch=0"):
        SFTConfig(output_dir=str(tmp_path), max_tokens_per_micro_batch=0, use_cpu=True)
