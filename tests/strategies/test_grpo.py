"""Group-relative policy optimisation by hand."""

from __future__ import annotations

import math
import re

import pytest
import torch
from conftest import f64
from pure import INF, NAN, batch_of, booleans, close, declared, number
from torch import Tensor

from hf_strategies import Batch, PolicyOutput, Row, make_strategy
from hf_strategies.strategies import GRPO, GRPOOptions

LN2 = math.log(2.0)

# Row 0, A = 2: ratios 1.5 (clipped at 1.2) and 0.9; row 1, A = -1: 0.7 (clipped at 0.8), a tool's token, 1.3.
MASK = [[1, 1, 0], [1, 0, 1]]
RATIO = [[1.5, 0.9, NAN], [0.7, 1e6, 1.3]]
ADVANTAGE = [[2.0, 2.0, NAN], [-1.0, INF, -1.0]]
# Token losses -2.4, -1.8 | 0.8, 1.3.
POLICY_LOSS = (-2.4 - 1.8 + 0.8 + 1.3) / 4
# d loss / d log p = -A r / 4 where not clipped.
SLOPES = [[0.0, -2.0 * 0.9 / 4, 0.0], [0.0, 0.0, 1.3 / 4]]


def scored() -> tuple[Batch, Tensor]:
    """Batch with credit, and the policy's log-probabilities."""
    old = f64([[-1.0, -2.0, NAN], [-0.5, NAN, -3.0]])
    batch = batch_of(booleans(MASK), [0, 0], old_logprobs=old, advantages=f64(ADVANTAGE))
    return batch, (old + f64(RATIO).log()).requires_grad_()


def test_loss_and_gradient_by_hand() -> None:
    batch, logprobs = scored()
    strategy = make_strategy("grpo")
    items = strategy.count_items(batch)
    entropy = f64([[1.0, 2.0, NAN], [3.0, NAN, 6.0]])
    loss, metrics = strategy.loss(PolicyOutput(logprobs, entropy=entropy), batch, items)
    close(loss, POLICY_LOSS)
    close(torch.autograd.grad(loss, logprobs)[0], SLOPES)
    assert {name: number(m) for name, m in metrics.items()} == pytest.approx(
        {
            "policy_loss": POLICY_LOSS,
            "clip_ratio/low_mean": 0.25,
            "clip_ratio/high_mean": 0.25,
            "clip_ratio/region_mean": 0.5,
            "clip_ratio/low_min": 0.25,
            "clip_ratio/high_max": 0.25,
            "entropy": 3.0,
        },
        abs=1e-15,
    )


def test_kl_term_by_hand() -> None:
    """Pitfall A-3: the KL term moves tokens whose policy gradient the clip removed, or that have no advantage."""
    batch, logprobs = scored()
    # p_ref / p = 2, 1/2, 1, 1: k3 = 2 - 1 - ln 2, 1/2 - 1 + ln 2, 0, 0; slopes 1 - 2, 1 - 1/2, 0, 0.
    ref = logprobs.detach() + f64([[LN2, -LN2, NAN], [0.0, NAN, 0.0]])
    batch = batch.replace(ref_logprobs=ref)
    strategy = make_strategy("grpo", beta=0.5)
    loss, metrics = strategy.loss(PolicyOutput(logprobs), batch, strategy.count_items(batch))
    kl = ((1 - LN2) + (LN2 - 0.5)) / 4
    close(loss, POLICY_LOSS + 0.5 * kl)
    close(
        torch.autograd.grad(loss, logprobs)[0],
        [[0.5 * -1.0 / 4, SLOPES[0][1] + 0.5 * 0.5 / 4, 0.0], [0.0, 0.0, SLOPES[1][2]]],
    )
    # Logged apart: the policy's part without KL, and KL without its weight.
    assert number(metrics["policy_loss"]) == pytest.approx(POLICY_LOSS, abs=1e-15)
    assert number(metrics["kl"]) == pytest.approx(kl, abs=1e-15)
    assert "entropy" not in metrics


def test_upper_bound_of_its_own() -> None:
    batch, logprobs = scored()
    strategy = make_strategy("grpo", epsilon_high=0.6)
    loss, metrics = strategy.loss(PolicyOutput(logprobs), batch, torch.tensor(4.0))
    close(loss, (-3.0 - 1.8 + 0.8 + 1.3) / 4)  # 1.5 is inside now
    assert number(metrics["clip_ratio/high_mean"]) == 0.0
    assert number(metrics["clip_ratio/low_mean"]) == 0.25
    # and a bound of 0 is not an unset one: the ratio above 1 is cut at 1.
    loss, _ = make_strategy("grpo", epsilon_high=0.0).loss(PolicyOutput(logprobs), batch, torch.tensor(4.0))
    close(loss, (-2.0 - 1.8 + 0.8 + 1.3) / 4)


@pytest.mark.parametrize(
    ("loss_type", "items", "expected"),
    [
        ("dapo", 4, POLICY_LOSS),
        ("grpo", 2, ((-2.4 - 1.8) / 2 + (0.8 + 1.3) / 2) / 2),
        ("dr_grpo", 2 * 10, (-2.4 - 1.8 + 0.8 + 1.3) / 20),
        ("bnpo", 1, POLICY_LOSS),
    ],
)
def test_loss_types_by_hand(loss_type: str, items: int, expected: float) -> None:
    batch, logprobs = scored()
    strategy = make_strategy("grpo", loss_type=loss_type, max_completion_length=10)
    assert strategy.count_items(batch) == items
    loss, _ = strategy.loss(PolicyOutput(logprobs), batch, strategy.count_items(batch))
    close(loss, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_first_pass_is_reinforce(dtype: torch.dtype) -> None:
    """Pitfalls A-1, A-14: ratio 1 and no clipping; the loss of centred advantages is 0, its gradient -A / tokens."""
    logprobs = torch.tensor([[-0.3, -7.7], [-1.1, -0.2]], dtype=dtype, requires_grad=True)
    advantages = torch.tensor([[0.5, 0.5], [-0.5, -0.5]], dtype=dtype)
    for old in (None, logprobs.detach().clone()):
        batch = batch_of(booleans([[1, 1], [1, 1]]), [0, 0], advantages=advantages, old_logprobs=old)
        loss, metrics = make_strategy("grpo").loss(PolicyOutput(logprobs), batch, torch.tensor(4.0))
        assert loss.item() == 0.0
        assert torch.equal(torch.autograd.grad(loss, logprobs)[0], -advantages / 4)
        assert number(metrics["clip_ratio/region_mean"]) == 0.0


def test_credit_by_hand() -> None:
    """Pitfall A-4: a row that cannot be scored leaves loss, denominator and its group's statistics."""
    # Group 0: 1, 3 -> -1, 1 over sqrt(2). Group 1: NaN beside 5: nothing.
    batch = batch_of(booleans([[1, 1, 0], [1, 0, 1], [1, 1, 1], [1, 1, 1]]), [0, 0, 1, 1])
    batch = batch.replace(rewards=f64([1.0, 3.0, NAN, 5.0]))
    strategy = make_strategy("grpo")
    out, metrics = strategy.assign_credit(batch)
    a = 1 / (math.sqrt(2) + 1e-4)
    assert out.advantages is not None
    assert out.advantages.dtype == torch.float32
    close(out.advantages, [[-a] * 3, [a] * 3, [0.0] * 3, [0.0] * 3], atol=1e-7)
    assert out.loss_mask.long().tolist() == [[1, 1, 0], [1, 0, 1], [0, 0, 0], [1, 1, 1]]
    assert strategy.count_items(out) == 7
    assert batch.loss_mask.sum() == 10  # the batch that came in is as it was
    # reward (1 + 3 + 5) / 3; group 0 has std sqrt(2), group 1 of one scorable row 0, so one of two has none.
    assert {name: number(m) for name, m in metrics.items()} == pytest.approx(
        {"reward": 3.0, "reward_std": math.sqrt(2) / 2, "frac_reward_zero_std": 0.5}, abs=1e-15
    )
    # No row shares memory with another: an in-place change of one token stays there.
    out.advantages[0, 0] = 7.0
    assert out.advantages[0, 1] == pytest.approx(-a, abs=1e-6)


def test_scaling_options_reach_the_credit() -> None:
    batch = batch_of(booleans([[1], [1]]), [0, 0], rewards=f64([1.0, 3.0]), reward_std=f64([4.0, 4.0]))
    for scale, std in (("group", math.sqrt(2) + 1e-4), ("batch", 4.0001), ("none", 1.0), (True, math.sqrt(2) + 1e-4)):
        out, _ = make_strategy("grpo", scale_rewards=scale).assign_credit(batch)
        close(out.advantages, [[-1 / std], [1 / std]], atol=1e-7)  # type: ignore[arg-type]
    out, _ = make_strategy("grpo", scale_rewards="batch").assign_credit(batch.replace(reward_std=None))
    close(out.advantages, [[-1 / (math.sqrt(2) + 1e-4)], [1 / (math.sqrt(2) + 1e-4)]], atol=1e-7)  # type: ignore[arg-type]


def test_groups_without_signal() -> None:
    """Pitfalls A-2, A-3: advantages and gradient exactly 0 with beta 0, and the metric says it; KL alone moves."""
    rewards = f64([5.0] * 4 + [-5.0] * 4)
    mask = booleans([[1, 1]] * 8)
    batch = batch_of(mask, [0] * 4 + [1] * 4, rewards=rewards, ref_logprobs=torch.full((8, 2), -2.0))
    strategy = make_strategy("grpo")
    batch, metrics = strategy.assign_credit(batch)
    assert torch.equal(batch.advantages, torch.zeros(8, 2))  # type: ignore[arg-type]
    assert number(metrics["frac_reward_zero_std"]) == 1.0
    assert number(metrics["reward_std"]) == 0.0
    logprobs = torch.full((8, 2), -1.0, requires_grad=True)
    for beta, moved in ((0.0, False), (0.5, True)):
        loss, _ = make_strategy("grpo", beta=beta).loss(PolicyOutput(logprobs), batch, torch.tensor(16.0))
        assert bool((torch.autograd.grad(loss, logprobs)[0] != 0).all()) == moved


def test_what_it_declares() -> None:
    strategy = make_strategy("grpo")
    assert isinstance(strategy, GRPO)
    assert strategy.min_group_size == 2
    assert declared(strategy) == {"needs_rewards"}
    assert declared(make_strategy("grpo", beta=1e-9)) == {"needs_rewards", "needs_reference"}
    assert declared(make_strategy("grpo", scale_rewards="batch")) == {"needs_rewards", "needs_reward_std"}


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("beta", -0.1, "a number >= 0.0"),
        ("beta", NAN, "a number >= 0.0"),
        ("beta", INF, "a number >= 0.0"),
        ("beta", [0.1], "a number >= 0.0"),
        ("epsilon", -0.1, "a number >= 0.0 and <= 1.0"),
        ("epsilon", 1.1, "a number >= 0.0 and <= 1.0"),
        ("epsilon", None, "a number >= 0.0 and <= 1.0"),
        ("epsilon_high", -1.0, "a number >= 0.0"),
        ("epsilon_high", "0.28", "a number >= 0.0"),
        ("loss_type", "cispo", "'dapo', 'grpo', 'dr_grpo', 'bnpo'"),
        ("loss_type", None, "'dapo', 'grpo', 'dr_grpo', 'bnpo'"),
        ("scale_rewards", "std", "'group', 'batch', 'none'"),
        ("scale_rewards", None, "'group', 'batch', 'none'"),
        ("scale_rewards", 2, "'group', 'batch', 'none'"),
        ("scale_rewards", ["group"], "'group', 'batch', 'none'"),
        ("max_completion_length", 0, "a whole number >= 1"),
        ("max_completion_length", 1.5, "a whole number >= 1"),
        ("max_completion_length", True, "a whole number >= 1"),
    ],
)
def test_bad_options(name: str, value: object, allowed: str) -> None:
    message = re.escape(f"{name}={value!r}: allowed") + "( is| are) " + re.escape(allowed)
    with pytest.raises(ValueError, match=f"^{message}$"):
        GRPOOptions(**{name: value})  # type: ignore[arg-type]


def test_ends_of_the_ranges_are_allowed() -> None:
    options = GRPOOptions(beta=0, epsilon=1, epsilon_high=0.0, max_completion_length=1)
    assert (options.beta, options.epsilon, options.epsilon_high, options.max_completion_length) == (0, 1, 0.0, 1)
    assert GRPOOptions(epsilon=0.0).epsilon == 0.0
    assert [GRPOOptions(scale_rewards=s).scale_rewards for s in (True, False, "batch")] == ["group", "none", "batch"]  # type: ignore[arg-type]


def test_idle_rows_by_hand() -> None:
    """Rows without advantage, or none at a token that trains; never under a KL term, never without credit."""
    rows = [Row([7], [8, 9], loss_mask=mask, group=0) for mask in ([True, True], [True, False], [True, True])]
    advantages = torch.tensor([[0.0, 0.0], [0.0, 1.0], [0.5, 0.0]])
    plain = Batch.from_rows(rows)
    batch = plain.replace(advantages=advantages)
    assert GRPO(GRPOOptions()).idle_rows(batch).tolist() == [True, True, False]
    for strategy, rows_of in ((GRPO(GRPOOptions(beta=0.1)), batch), (GRPO(GRPOOptions()), plain)):
        idle = strategy.idle_rows(rows_of)
        assert idle.dtype == torch.bool
        assert idle.tolist() == [False, False, False]


def test_skipped_rows_have_no_entropy() -> None:
    """Mean over the first row alone: (1 + 3) / 2."""
    strategy = GRPO(GRPOOptions())
    mask = torch.tensor([[True, True], [True, True]])
    entropy = torch.tensor([[1.0, 3.0], [9.0, 9.0]])
    policy = PolicyOutput(torch.zeros(2, 2), entropy=entropy, computed=torch.tensor([True, False]))
    assert number(strategy.entropy_metric(policy, mask)["entropy"]) == 2.0
    policy.computed = None
    assert number(strategy.entropy_metric(policy, mask)["entropy"]) == 5.5
