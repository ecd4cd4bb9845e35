"""Micro-batches cut by a budget of tokens: smaller passes, the same gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import NAMES, ONLINE, build, difference, logged, lora, needs, policy, run
from torch import Tensor

from hf_strategies import Batch, Row, SFTConfig
from hf_strategies.modeling.stream import Stream
from hf_strategies.modeling.two_phase import Prefix, Suffix
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
    pieces = pieces_of(batch, 20, keep_groups=False, prompts="per_piece")
    assert [rows_in(piece) for piece in pieces] == [[0, 1, 2], [3, 4, 5]]
    assert [Stream.of(piece).num_tokens for piece in pieces] == [16, 19]


def test_a_group_that_is_too_large_is_parted_unless_it_must_not_be() -> None:
    """Prompt 10 and four completions of 5: 30 tokens under a budget of 20 are 2 x 20."""
    batch = batch_of((10, [5, 5, 5, 5]))
    parted = pieces_of(batch, 20, keep_groups=False, prompts="per_piece")
    assert [rows_in(piece) for piece in parted] == [[0, 1], [2, 3]]
    assert [rows_in(piece) for piece in pieces_of(batch, 20, keep_groups=True, prompts="per_piece")] == [[0, 1, 2, 3]]
    # Without sharing every row brings its prompt: 15 each.
    alone = pieces_of(batch, 20, keep_groups=False, prompts="per_row")
    assert [rows_in(piece) for piece in alone] == [[0], [1], [2], [3]]


@pytest.mark.parametrize("budget", [1, 7, 20, 33, 64, 1000])
def test_nothing_is_lost_and_order_is_kept(budget: int) -> None:
    batch = batch_of((3, [4, 1, 6]), (1, [2]), (8, [3, 3]), (2, [9, 1]), (5, [1]))
    pieces = pieces_of(batch, budget, keep_groups=False, prompts="per_piece")
    assert sorted(row for piece in pieces for row in rows_in(piece)) == list(range(batch.num_rows))
    for piece in pieces:
        assert rows_in(piece) == sorted(rows_in(piece))
        assert piece.num_rows == 1 or Stream.of(piece).num_tokens <= budget


def test_pieces_are_balanced() -> None:
    """Twelve rows of 1 to 12 tokens in three pieces of 26 each."""
    batch = batch_of(*((1, [length]) for length in range(1, 13)))
    loads = [Stream.of(p).num_tokens for p in pieces_of(batch, 31, keep_groups=False, prompts="per_piece")]
    assert len(loads) == 3
    assert max(loads) - min(loads) <= 2


def test_every_process_runs_the_same_number_of_pieces() -> None:
    """The other process needs 3 and 1 pieces; blank ones train nothing."""
    batch = batch_of((2, [3]), (2, [3]))
    one, two = batch.select([0]), batch.select([1])
    levelled = level([[batch], [one, two]], lambda mine: [*mine, [3, 1]])
    assert [len(pieces) for pieces in levelled] == [3, 2]
    assert all(not piece.loss_mask.any() and int(piece.num_tokens) == 0 for piece in levelled[0][1:])


def test_prompts_that_are_computed_apart_cost_nothing() -> None:
    """Completions of 5, 5, 5 and 5 tokens under a budget of 10, whatever the prompt."""
    pieces = pieces_of(batch_of((100, [5, 5, 5, 5])), 10, keep_groups=False, prompts="apart")
    assert [rows_in(piece) for piece in pieces] == [[0, 1], [2, 3]]


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("name", NAMES)
def test_two_phases_give_the_same_gradients(name: str, kind: str, adapter: bool) -> None:
    """Prompts once, completions in pieces on top of their keys and values, with the same loss and log."""

    def train(**options: Any) -> tuple[dict[str, Tensor], Any]:
        trainer, capture = run(name, policy(kind, adapter), trainer=needs(name, kind), **options)
        return capture.steps[0], trainer

    expected, whole = train()
    for options in (
        {"low_memory": True},
        {"low_memory": True, "max_tokens_per_micro_batch": 12, "gradient_accumulation_steps": 1},
        {"low_memory": True, "gradient_checkpointing": True},
    ):
        got, trainer = train(**options)
        assert difference(got, expected) < 2e-5
        for key in ("loss", "entropy", "policy_loss", "dpo_loss", "reward", "num_tokens"):
            assert logged(trainer, key) == pytest.approx(logged(whole, key), abs=2e-6), key


def test_every_prompt_is_computed_once_and_no_more_than_a_row_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes with gradient: all prompts, then row after row."""
    seen: list[tuple[str, int]] = []
    for cls in (Prefix, Suffix):
        original = cls.of_batch.__func__  # type: ignore[attr-defined]

        def of_batch(owner: Any, *args: Any, original: Any = original) -> Any:
            stream = original(owner, *args)
            seen.append((owner.__name__, stream.num_tokens))
            return stream

        monkeypatch.setattr(cls, "of_batch", classmethod(of_batch))
    run("online_grpo", lora(policy("llama")), low_memory=True, beta=0.0)
    assert [name for name, _ in seen] == ["Prefix"] + ["Suffix"] * 8
    # The last prompt token and up to eight of the completion.
    assert max(size for name, size in seen if name == "Suffix") <= 9


def test_without_the_pull_gradients_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above can fail: what the completions owe the prompts is a large part."""
    _, expected = run("online_grpo", policy("llama"))
    monkeypatch.setattr(Prefix, "pull", lambda self: None)
    _, got = run("online_grpo", policy("llama"), low_memory=True)
    assert difference(got.steps[0], expected.steps[0]) > 1e-2


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("llama", {"attention_path": "padded"}, "attention_path='padded'"),
        ("mixtral", {}, "a mixture of experts"),
        (
            "llama",
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
            "reentrant activation checkpointing",
        ),
    ],
)
def test_what_two_phases_do_not_work_with(kind: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"low_memory=True does not work with {message}"):
        build("sft", policy(kind), low_memory=True, **options)


def test_bad_budget(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="max_tokens_per_micro_batch=0"):
        SFTConfig(output_dir=str(tmp_path), max_tokens_per_micro_batch=0, use_cpu=True)
