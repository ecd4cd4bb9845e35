"""Direct preference optimisation by hand."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from conftest import f64
from pure import INF, NAN, batch_of, booleans, close, declared, number
from torch import Tensor

from hf_strategies import Batch, PolicyOutput, make_strategy
from hf_strategies.strategies import DPO, DPOOptions
from hf_strategies.strategies.pairs import choose

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
            "logps/accuracies": 0.5,  # -3 is not above -3, -2 is
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
    # -1.5 above -3, where the sums tie; -2 below -1.
    assert number(metrics["logps/accuracies"]) == 0.5


def test_first_step_from_the_reference() -> None:
    """Pitfall C-56: ln 2, margins 0; equal rewards are no correct ranking."""
    batch, logprobs = pairs()
    batch = batch.replace(ref_logprobs=logprobs.detach())
    strategy = make_strategy("dpo")
    loss, metrics = strategy.loss(PolicyOutput(logprobs), batch, strategy.count_items(batch))
    close(loss, LN2)
    assert number(metrics["rewards/margins"]) == 0.0
    assert number(metrics["rewards/accuracies"]) == 0.0
    # The policy is asked without the reference: the chosen row is a tie in one pair, and likelier in the other.
    assert number(metrics["logps/accuracies"]) == 0.5


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
    assert declared(strategy) == {"needs_rewards", "needs_reference", "keep_groups", "correct", "mean_logit"}


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("beta", 0.0, "a number > 0.0"),
        ("beta", -0.1, "a number > 0.0"),
        ("beta", NAN, "a number > 0.0"),
        ("beta", [0.1, 0.2], "a number > 0.0"),
        ("reduction", "none", "'sum', 'mean'"),
        ("reduction", None, "'sum', 'mean'"),
        ("f_divergence_type", "kl", "'reverse_kl', 'forward_kl', 'js_divergence', 'alpha_divergence'"),
        ("f_alpha_divergence_coef", INF, "a number any finite number"),
        ("discopop_tau", 0.0, "a number > 0.0"),
        ("simpo_gamma", NAN, "a number any finite number"),
        ("pair_selection", "worst", "'best_worst', 'best_random', 'all_pairs'"),
        ("ld_alpha", 1.5, "a number >= 0.0 and <= 1.0"),
        ("label_smoothing", 0.5, "a number >= 0.0 and < 0.5"),
    ],
)
def test_bad_options(name: str, value: object, allowed: str) -> None:
    message = re.escape(f"{name}={value!r}: allowed") + "( is| are) " + re.escape(allowed)
    with pytest.raises(ValueError, match=f"^{message}$"):
        DPOOptions(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "sigmoyd"}, r"loss_type=\['sigmoyd'\]: allowed are one or more of 'sigmoid', 'sigmoid_norm'"),
        ({"loss_type": []}, r"loss_type=\[\]: allowed are one or more of"),
        (
            {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0]},
            r"loss_weights=\[1.0\]: allowed is one number for each of loss_type=\['sigmoid', 'sft'\]",
        ),
        (
            {"loss_type": "hinge", "label_smoothing": 0.1},
            "label_smoothing=0.1: loss_type 'hinge' has none; allowed is 0, or one of 'sigmoid', 'sigmoid_norm', ",
        ),
        ({"loss_type": "exo_pair"}, "label_smoothing=0.0: loss_type 'exo_pair' needs a number > 0.0"),
        (
            {"loss_type": ["sigmoid", "apo_zero"], "f_divergence_type": "forward_kl"},
            "f_divergence_type='forward_kl': loss_type 'apo_zero' knows reverse_kl alone; others are for 'sigmoid'",
        ),
        ({"loss_type": "aot", "use_weighting": True}, "use_weighting=True: loss_type 'aot' sorts its pairs"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        DPOOptions(**options)


def test_several_losses_are_added_up() -> None:
    """Margins 2 and -2, chosen averages -1.5 and -2: 0.5 * sigmoid + 2 * likelihood."""
    batch, logprobs = pairs()
    strategy = make_strategy("dpo", beta=0.5, loss_type=["sigmoid", "sft"], loss_weights=[0.5, 2.0])
    loss, _ = strategy.loss(PolicyOutput(logprobs), batch, strategy.count_items(batch))
    close(loss, (0.5 * (-math.log(sigmoid(2.0)) - math.log(sigmoid(-2.0))) + 2 * (1.5 + 2.0)) / 2)


def test_without_a_reference() -> None:
    """Rewards are those of the policy's log-probabilities; averages -1.5 and -3 | -2 and -1."""
    batch, logprobs = pairs()
    strategy = make_strategy("dpo", loss_type="simpo", beta=2.0, simpo_gamma=1.0)
    assert not strategy.needs_reference
    assert make_strategy("dpo", loss_type=["simpo", "sigmoid"]).needs_reference
    batch = batch.replace(ref_logprobs=None)
    loss, metrics = strategy.loss(PolicyOutput(logprobs), batch, strategy.count_items(batch))
    close(loss, (-math.log(sigmoid(2 * 1.5 - 1)) - math.log(sigmoid(2 * -1.0 - 1))) / 2)
    # Sums -3 and -2, -3 and -3.
    assert number(metrics["rewards/chosen"]) == pytest.approx(2.0 * (-3.0 - 2.0) / 2)
    assert number(metrics["rewards/margins"]) == pytest.approx(2.0 * (0.0 + 1.0) / 2)


def test_tokens_beyond_the_shorter_completion() -> None:
    """LD-DPO: lengths 2, 1 | 1, 3; the second token of row 0 and the second and third of row 3 count a quarter."""
    batch, logprobs = pairs()
    strategy = make_strategy("dpo", beta=0.5, ld_alpha=0.25)
    loss, _ = strategy.loss(PolicyOutput(logprobs), batch, strategy.count_items(batch))
    # Log-ratios 1 + 0.25, -2 | -1, 1 + 0.5.
    m, w = 0.5 * 3.25, 0.5 * -2.5
    close(loss, (-math.log(sigmoid(m)) - math.log(sigmoid(w))) / 2)
    a, b = 0.25 * sigmoid(-m), 0.25 * sigmoid(-w)
    close(
        torch.autograd.grad(loss, logprobs)[0],
        [[-a, -a / 4, 0.0, 0.0], [a, 0.0, 0.0, 0.0], [-b, 0.0, 0.0, 0.0], [b, b / 4, 0.0, b / 4]],
    )
    for whole in (None, 1.0):
        plain = make_strategy("dpo", beta=0.5, ld_alpha=whole)
        close(
            plain.loss(PolicyOutput(logprobs), batch, torch.tensor(2.0))[0],
            (-math.log(sigmoid(2.0)) - math.log(sigmoid(-2.0))) / 2,
        )


def test_weighted_by_how_likely_the_policy_writes_it() -> None:
    """WPO: exp of the mean of log p - log sum p^2 of both rows; the weight has no gradient."""
    batch, logprobs = pairs()
    strategy = make_strategy("dpo", beta=0.5, use_weighting=True)
    # Of row 0: mean(-2 + 2.5, -1 + 1.5) = 0.5; of row 1: -3 + 2 = -1 | -2 + 2 = 0; mean(-1, -1, -1) + 1.5 = 0.5.
    collision = f64([[-2.5, -1.5, NAN, NAN], [-2.0, NAN, NAN, NAN], [-2.0, NAN, NAN, NAN], [-1.5, -1.5, NAN, -1.5]])
    policy = PolicyOutput(logprobs, log_collision=collision)
    loss, _ = strategy.loss(policy, batch, strategy.count_items(batch))
    first, second = math.exp(0.5 - 1.0), math.exp(0.0 + 0.5)
    close(loss, (-first * math.log(sigmoid(2.0)) - second * math.log(sigmoid(-2.0))) / 2)
    a, b = first * 0.25 * sigmoid(-2.0), second * 0.25 * sigmoid(2.0)
    close(
        torch.autograd.grad(loss, logprobs)[0],
        [[-a, -a, 0.0, 0.0], [a, 0.0, 0.0, 0.0], [-b, 0.0, 0.0, 0.0], [b, b, 0.0, b]],
    )


@pytest.mark.parametrize(
    ("rewards", "chosen"),
    [
        ([1.0, 0.0], [(0, 1)]),
        ([0.0, 2.0, 1.0], [(1, 0), (1, 2), (2, 0)]),
        ([1.0, 0.0, 1.0], [(0, 1), (2, 1)]),
        ([1.0, 1.0], []),
        ([1.0], []),
        ([], []),
    ],
)
def test_all_pairs(rewards: list[float], chosen: list[tuple[int, int]]) -> None:
    assert choose(rewards, "all_pairs") == chosen


def test_rows_of_all_pairs() -> None:
    """Rows come as often as they are in a pair; unscorable ones and those that train nothing in none."""
    mask = [[1, 1], [1, 0], [1, 1], [0, 0]]
    selected, metrics = make_strategy("online_dpo", pair_selection="all_pairs").select(
        group_of([2.0, 1.0, NAN, 0.0], mask)
    )
    assert first_ids(selected) == [0, 1]
    assert number(metrics["rows_dropped/empty_side"]) == 2.0
    selected, _ = make_strategy("online_dpo", pair_selection="all_pairs").select(group_of([2.0, 1.0, 0.0]))
    assert first_ids(selected) == [0, 1, 0, 2, 1, 2]
    assert selected.group.tolist() == [0] * 6


def test_best_and_a_random_one() -> None:
    """The partner is any of the worse ones, decided by what the group says and by nothing else."""
    assert [choose([1.0, 3.0, 2.0, 3.0], "best_random", draw) for draw in (0, 1, 2)] == [[(1, 0)], [(1, 2)], [(1, 0)]]
    strategy = make_strategy("online_dpo", pair_selection="best_random")
    partners = set()
    for first in range(1, 40):
        batch = group_of([1.0, 0.0, 0.5])
        ids = batch.completion_ids + first * 100
        selected, _ = strategy.select(batch.replace(completion_ids=ids))
        moved = Batch.cat([batch.blank(), batch.replace(completion_ids=ids)])
        assert torch.equal(strategy.select(moved)[0].completion_ids, selected.completion_ids)
        best, partner = [(i - first * 100 - 1) // 2 for i in selected.completion_ids[:, 0].tolist()]
        assert best == 0
        partners.add(partner)
    assert partners == {1, 2}


def test_token_metrics_by_hand() -> None:
    """Over trained tokens, those of the chosen rows and of the rejected ones; a tool's token counts in neither."""
    batch, logprobs = pairs()
    strategy = make_strategy("dpo")
    logits = f64([[1.0, 2.0, NAN, NAN], [5.0, NAN, NAN, NAN], [6.0, NAN, NAN, NAN], [1.0, 2.0, 99.0, 6.0]])
    correct = f64([[1.0, 0.0, NAN, NAN], [1.0, NAN, NAN, NAN], [1.0, NAN, NAN, NAN], [1.0, 1.0, 1.0, 1.0]])
    policy = PolicyOutput(logprobs, mean_logit=logits, correct=correct)
    _, metrics = strategy.loss(policy, batch, strategy.count_items(batch))
    assert number(metrics["logits/chosen"]) == 3.0  # 1, 2, 6
    assert number(metrics["logits/rejected"]) == 3.5  # 5, 1, 2, 6
    assert number(metrics["mean_token_accuracy"]) == pytest.approx(2 / 3)  # of the chosen


def test_uses_of_rows() -> None:
    """Rewards 1, 3, 2 | 5, 5 | 0, NaN, 4, and what people read of it."""
    rewards = f64([1.0, 3.0, 2.0, 5.0, 5.0, 0.0, NAN, 4.0])
    batch = batch_of(booleans([[1]] * 8), [0, 0, 0, 1, 1, 2, 2, 2], rewards=rewards)
    assert make_strategy("online_dpo").uses(batch) == ["rejected", "chosen", "", "", "", "rejected", "", "chosen"]
    assert make_strategy("online_dpo", pair_selection="all_pairs").uses(batch) == [
        "rejected x2",
        "chosen x2",
        "chosen, rejected",
        "",
        "",
        "rejected",
        "",
        "chosen",
    ]
    assert make_strategy("online_grpo").uses(batch) == []
    # What is not trained is not named.
    masked = batch.replace(loss_mask=batch.loss_mask & (torch.arange(8) != 1).unsqueeze(1))
    assert make_strategy("online_dpo").uses(masked) == ["", "", "", "", "", "rejected", "", "chosen"]


@pytest.mark.parametrize(
    "options",
    [
        {"simpo_gamma": 1.0},
        {"discopop_tau": 0.1, "loss_type": "simpo"},
        {"f_alpha_divergence_coef": 0.3},
        {"f_divergence_type": "js_divergence", "loss_type": "simpo"},
    ],
    ids=str,
)
def test_options_that_no_loss_has(options: dict[str, Any]) -> None:
    name, value = next(iter(options.items()))
    with pytest.raises(ValueError, match=f"{name}={value!r}"):
        make_strategy("dpo", **options)


def test_running_mean_needs_its_loss() -> None:
    with pytest.raises(ValueError, match="only loss_type 'bco_pair' has a shift"):
        make_strategy("dpo", bco_running_mean=True)
