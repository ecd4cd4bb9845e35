"""Direct preference optimisation by hand."""

from __future__ import annotations

import math
import re

import pytest
import torch
from conftest import f64
from pure import INF, NAN, batch_of, booleans, close, declared, number
from torch import Tensor

from hf_strategies import Batch, PolicyOutput, make_strategy
from hf_strategies.strategies import DPO, DPOOptions

LN2, LN3 = math.log(2.0), math.log(3.0)


def pairs() -> tuple[Batch, Tensor]:
    """Two pairs, chosen first, of 2 and 1 | 1 and 3 tokens; a tool's token in the last row."""
    mask = booleans([[1, 1, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 1]])
    # log pi - log pi_ref per row: 1 + 1 = 2, -2 | -1, 3 * 1 = 3.
    ref = f64([[-3.0, -2.0, NAN, INF], [-1.0, NAN, NAN, NAN], [-1.0, NAN, 1e6, NAN], [-2.0, -2.0, NAN, -2.0]])
    ratio = f64([[1.0, 1.0, 1e6, 1e6], [-2.0, 5.0, 5.0, 5.0], [-1.0, 5.0, 5.0, 5.0], [1.0, 1.0, 9.0, 1.0]])
    batch = batch_of(mask, [0, 0, 1, 1], rewards=f64([1.0, 0.0, 1.0, 0.0]), ref_logprobs=ref)
    return batch, (ref + ratio).requires_grad_()


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_loss_gradient_and_metrics_by_hand() -> None:
    batch, logprobs = pairs()
    strategy = make_strategy("dpo", beta=0.5)
    assert strategy.count_items(batch) == 2
    loss, metrics = strategy.loss(PolicyOutput(logprobs), batch, strategy.count_items(batch))
    # Margins 0.5 * (2 - -2) = 2 and 0.5 * (-1 - 3) = -2; the loss is the mean of -log s(2) and -log s(-2).
    expected = (-math.log(sigmoid(2.0)) - math.log(sigmoid(-2.0))) / 2
    close(loss, expected)
    # A chosen token: -beta * s(-margin) / 2 pairs, a rejected one the opposite, whatever the length of its row.
    a, b = 0.25 * sigmoid(-2.0), 0.25 * sigmoid(2.0)
    close(
        torch.autograd.grad(loss, logprobs)[0],
        [[-a, -a, 0.0, 0.0], [a, 0.0, 0.0, 0.0], [-b, 0.0, 0.0, 0.0], [b, b, 0.0, b]],
    )
    assert {name: number(m) for name, m in metrics.items()} == pytest.approx(
        {
            "dpo_loss": expected,
            "rewards/chosen": 0.25,  # (0.5 * 2 + 0.5 * -1) / 2
            "rewards/rejected": 0.25,  # (0.5 * -2 + 0.5 * 3) / 2
            "rewards/margins": 0.0,
            "rewards/accuracies": 0.5,
            "logps/chosen": -1.5 - 1.0 + 0.0,  # (-2 - 1) for row 0, -2 for row 2: (-3 + -2) / 2
            "logps/rejected": (-3.0 - 3.0) / 2,
        },
        abs=1e-14,
    )


def test_length_normalised_by_hand() -> None:
    """Pitfall C-58: means over tokens. log pi - log pi_ref: 2 / 2 = 1, -2 | -1, 3 / 3 = 1."""
    batch, logprobs = pairs()
    strategy = make_strategy("dpo", beta=0.5, reduction="mean")
    loss, metrics = strategy.loss(PolicyOutput(logprobs), batch, strategy.count_items(batch))
    # Margins 0.5 * 3 and 0.5 * -2.
    close(loss, (-math.log(sigmoid(1.5)) - math.log(sigmoid(-1.0))) / 2)
    a, b = 0.25 * sigmoid(-1.5), 0.25 * sigmoid(1.0)
    close(
        torch.autograd.grad(loss, logprobs)[0],
        [[-a / 2, -a / 2, 0.0, 0.0], [a, 0.0, 0.0, 0.0], [-b, 0.0, 0.0, 0.0], [b / 3, b / 3, 0.0, b / 3]],
    )
    assert number(metrics["logps/rejected"]) == pytest.approx((-3.0 - 1.0) / 2, abs=1e-14)


def test_first_step_from_the_reference() -> None:
    """Pitfall C-56: ln 2, margins 0; equal rewards are no correct ranking."""
    batch, logprobs = pairs()
    batch = batch.replace(ref_logprobs=logprobs.detach())
    strategy = make_strategy("dpo")
    loss, metrics = strategy.loss(PolicyOutput(logprobs), batch, strategy.count_items(batch))
    close(loss, LN2)
    assert number(metrics["rewards/margins"]) == 0.0
    assert number(metrics["rewards/accuracies"]) == 0.0


def test_blank_rows_make_no_pair() -> None:
    """A surplus micro-batch holds one row of group -1, and may be stacked with pairs."""
    batch, logprobs = pairs()
    strategy = make_strategy("dpo", beta=0.5)
    mixed = Batch.cat([batch, batch.blank(), batch.select([0]).blank()])
    assert strategy.count_items(mixed) == 2
    width = mixed.completion_ids.shape[1]
    more = torch.cat([logprobs[:, :width], torch.full((2, width), NAN, dtype=torch.float64)])
    loss, _ = strategy.loss(PolicyOutput(more), mixed, torch.tensor(2.0))
    alone, _ = strategy.loss(PolicyOutput(logprobs), batch, torch.tensor(2.0))
    close(loss, alone.item())


def group_of(rewards: list[float], mask: list[list[int]] | None = None, group: list[int] | None = None) -> Batch:
    n = len(rewards)
    return batch_of(booleans(mask or [[1, 1]] * n), group or [0] * n, rewards=f64(rewards))


def first_ids(batch: Batch) -> list[int]:
    """Which rows: row i starts with id 2 i + 1."""
    return [(i - 1) // 2 for i in batch.completion_ids[:, 0].tolist()]


@pytest.mark.parametrize(
    ("rewards", "chosen"),
    [
        ([1.0, 0.0], [0, 1]),
        ([0.0, 1.0], [1, 0]),
        ([0.3, 0.9, 0.1, 0.5], [1, 2]),
        ([0.5, 0.9, 0.1, 0.9, 0.1], [1, 2]),  # the first of equals
        ([NAN, -2.0, NAN, -3.0], [1, 3]),  # unscorable rows are not the worst
        ([NAN, -3.0, NAN, -2.0], [3, 1]),
    ],
)
def test_best_and_worst_make_the_pair(rewards: list[float], chosen: list[int]) -> None:
    """Pitfall B-53."""
    selected, metrics = make_strategy("online_dpo").select(group_of(rewards))
    assert first_ids(selected) == chosen
    assert selected.rewards.tolist() == [rewards[i] for i in chosen]  # type: ignore[union-attr]
    assert {name: number(m) for name, m in metrics.items()} == {"frac_pairs_tied": 0.0, "rows_dropped/empty_side": 0.0}


def test_groups_that_make_no_pair() -> None:
    """Pitfalls B-53, C-55: ties, one scorable row, none, an empty side: dropped and counted; the rest goes on."""
    rewards = [1.0, 1.0, NAN, 2.0, NAN, NAN, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0]
    mask = [[1, 1]] * 12
    mask[6], mask[11] = [0, 0], [0, 0]  # an empty best row in groups 3 and 5
    mask[10] = [0, 1]
    batch = group_of(rewards, mask, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5])
    selected, metrics = make_strategy("dpo").select(batch)
    assert first_ids(selected) == [9, 8]
    assert selected.group.tolist() == [4, 4]
    assert metrics["frac_pairs_tied"].total == 3.0  # type: ignore[union-attr]
    assert metrics["rows_dropped/empty_side"].total == 2.0  # type: ignore[union-attr]
    assert metrics["frac_pairs_tied"].count == metrics["rows_dropped/empty_side"].count == 6  # type: ignore[union-attr]


def test_an_empty_worst_row_makes_no_pair() -> None:
    selected, metrics = make_strategy("dpo").select(group_of([1.0, 0.0], [[1, 1], [0, 0]]))
    assert selected.group.tolist() == [-1]
    assert number(metrics["rows_dropped/empty_side"]) == 1.0


def test_a_rollout_without_any_pair() -> None:
    """Something must run on every process: one row that trains nothing."""
    batch = group_of([1.0, 1.0, 1.0, 1.0], group=[0, 0, 1, 1])
    strategy = make_strategy("dpo")
    selected, metrics = strategy.select(batch)
    assert selected.num_rows == 1
    assert strategy.count_items(selected) == 0
    assert number(metrics["frac_pairs_tied"]) == 1.0
    # Blank rows among groups are no group, before and behind.
    mixed = Batch.cat([batch.blank(), group_of([0.0, 1.0]), batch.blank()])
    selected, metrics = strategy.select(mixed)
    assert selected.rewards.tolist() == [1.0, 0.0]  # type: ignore[union-attr]
    assert metrics["frac_pairs_tied"].count == 1  # type: ignore[union-attr]


def test_padding_of_dropped_rows_goes_with_them() -> None:
    selected, _ = make_strategy("dpo").select(group_of([0.5, 1.0, 0.0], [[1, 1, 1], [1, 1, 0], [1, 0, 0]]))
    assert selected.completion_ids.tolist() == [[4, 5], [7, 0]]


def test_what_it_declares() -> None:
    strategy = make_strategy("dpo")
    assert isinstance(strategy, DPO)
    assert strategy.min_group_size == 2
    assert declared(strategy) == {"needs_rewards", "needs_reference", "keep_groups"}


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("beta", 0.0, "a number > 0.0"),
        ("beta", -0.1, "a number > 0.0"),
        ("beta", NAN, "a number > 0.0"),
        ("beta", [0.1, 0.2], "a number > 0.0"),
        ("reduction", "none", "'sum', 'mean'"),
        ("reduction", None, "'sum', 'mean'"),
    ],
)
def test_bad_options(name: str, value: object, allowed: str) -> None:
    message = re.escape(f"{name}={value!r}: allowed") + "( is| are) " + re.escape(allowed)
    with pytest.raises(ValueError, match=f"^{message}$"):
        DPOOptions(**{name: value})  # type: ignore[arg-type]
