"""Group advantages, token rewards and generalised advantages against written-out numbers."""

from __future__ import annotations

import math
import re

import pytest
import torch
from conftest import f64
from pure import GARBAGE, NAN, batch_of, booleans, close, number
from torch import Tensor

from hf_strategies import credit


def groups(*numbers: int) -> Tensor:
    return torch.tensor(numbers)


# ---- group advantages ----


def test_group_scale_by_hand() -> None:
    # Group 7: mean 2.5, squares 2.25 + .25 + .25 + 2.25 = 5; unbiased std sqrt(5/3), biased sqrt(5/4).
    # Group 3: mean 1, squares 1 + 1; std sqrt(2), biased 1. Numbers of groups need neither start at 0 nor be sorted.
    rewards, group = f64([1.0, 2.0, 3.0, 4.0, 0.0, 2.0]), groups(7, 7, 7, 7, 3, 3)
    deviation = f64([-1.5, -0.5, 0.5, 1.5, -1.0, 1.0])
    unbiased = f64([math.sqrt(5 / 3)] * 4 + [math.sqrt(2)] * 2)
    biased = f64([math.sqrt(5 / 4)] * 4 + [1.0] * 2)
    close(credit.group_advantages(rewards, group), deviation / (unbiased + 1e-4))
    close(credit.group_advantages(rewards, group, eps=0.5), deviation / (unbiased + 0.5))
    close(credit.group_advantages(rewards, group, unbiased=False, eps=1e-8), deviation / (biased + 1e-8))
    close(credit.group_advantages(rewards, group, "none"), deviation)


def test_batch_scale_by_hand() -> None:
    # All six: mean 2, squares 1 + 0 + 1 + 4 + 4 + 0 = 10: std sqrt(10/5), biased sqrt(10/6).
    rewards, group = f64([1.0, 2.0, 3.0, 4.0, 0.0, 2.0]), groups(0, 0, 0, 0, 1, 1)
    deviation = f64([-1.5, -0.5, 0.5, 1.5, -1.0, 1.0])
    close(credit.group_advantages(rewards, group, "batch"), deviation / (math.sqrt(2) + 1e-4))
    close(credit.group_advantages(rewards, group, "batch", unbiased=False, eps=0.0), deviation / math.sqrt(10 / 6))
    # Two rows: n - 1 is 1. Mean 2, squares 1 + 1.
    close(credit.group_advantages(f64([1.0, 3.0]), groups(0, 0), "batch", eps=0.0), f64([-1.0, 1.0]) / math.sqrt(2))


def test_batch_scale_can_be_given() -> None:
    """The rows here may be a part of those that were sampled."""
    rewards, group = f64([1.0, 3.0]), groups(0, 0)
    close(credit.group_advantages(rewards, group, "batch", batch_std=f64(3.0), eps=1.0), [-0.25, 0.25])
    close(credit.group_advantages(rewards, group, "batch", batch_std=f64([3.0, 1.0]), eps=1.0), [-0.25, 0.5])
    # Only the scale "batch" reads it.
    close(credit.group_advantages(rewards, group, "none", batch_std=f64(3.0)), [-1.0, 1.0])
    close(credit.group_advantages(rewards, group, batch_std=f64(3.0), eps=0.0), f64([-1.0, 1.0]) / math.sqrt(2))


@pytest.mark.parametrize("scale", credit.REWARD_SCALES)
def test_unscorable_rows_are_outside(scale: str) -> None:
    """Pitfall A-4: a NaN gets advantage 0 and changes nothing for the others, wherever it stands."""
    plain = credit.group_advantages(f64([1.0, 2.0, 4.0, 5.0, 5.5]), groups(0, 0, 0, 1, 1), scale)
    rewards = f64([NAN, 1.0, 2.0, NAN, 4.0, 5.0, 5.5, NAN, NAN])
    holes = credit.group_advantages(rewards, groups(0, 0, 0, 0, 0, 1, 1, 2, 2), scale)
    close(holes[[1, 2, 4, 5, 6]], plain)
    assert torch.equal(holes[[0, 3, 7, 8]], f64([0.0] * 4))


def test_blank_rows_are_outside() -> None:
    """Rows that fill a surplus micro-batch have group -1 and NaN."""
    advantages = credit.group_advantages(f64([1.0, 3.0, NAN]), groups(0, 0, -1), "none")
    assert torch.equal(advantages, f64([-1.0, 1.0, 0.0]))


@pytest.mark.parametrize("scale", credit.REWARD_SCALES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.1, 0.3, 0.7, 0.9, 1 / 3, 1e6, -0.1])
def test_equal_rewards_give_exactly_nothing(value: float, dtype: torch.dtype, scale: str) -> None:
    """Pitfall A-2: in floating point the mean of equal numbers need not be that number."""
    for size in range(1, 17):
        rewards = torch.full((size,), value, dtype=dtype)
        # A second group keeps the std of the batch from being 0.
        both = torch.cat([rewards, torch.tensor([0.0, 1.0], dtype=dtype)])
        group = torch.cat([torch.zeros(size, dtype=torch.long), groups(1, 1)])
        advantages = credit.group_advantages(both, group, scale, eps=1e-8)
        assert torch.equal(advantages[:size], torch.zeros(size, dtype=torch.float64))
        assert (advantages[size:] != 0).all()


def test_groups_that_differ_only_from_each_other() -> None:
    """Pitfall A-2: rewards 5 and -5 by prompt: no signal within a prompt, so exactly none at all."""
    rewards, group = f64([5.0] * 4 + [-5.0] * 4), groups(0, 0, 0, 0, 1, 1, 1, 1)
    for scale in credit.REWARD_SCALES:
        assert torch.equal(credit.group_advantages(rewards, group, scale), torch.zeros(8, dtype=torch.float64))


def test_tiny_differences_survive() -> None:
    """Only equal rewards are equal: a group may differ by one part in 1e12."""
    advantages = credit.group_advantages(f64([1.0, 1.0 + 1e-12]), groups(0, 0), "none")
    assert advantages[0] < 0 < advantages[1]


def test_float32_rewards_are_reduced_in_float64() -> None:
    rewards = torch.tensor([1e4, 1e4 + 0.5, 1e4 + 1.0])
    advantages = credit.group_advantages(rewards, groups(0, 0, 0), "none")
    assert advantages.dtype == torch.float64
    close(advantages, [-0.5, 0.0, 0.5])
    # A float32 sum of 2^24 and three ones is still 2^24; the mean is 2^22 + 3/4.
    advantages = credit.group_advantages(torch.tensor([2.0**24, 1.0, 1.0, 1.0]), groups(0, 0, 0, 0), "none")
    close(advantages[1:], [0.25 - 2.0**22] * 3)


@pytest.mark.parametrize("scale", credit.REWARD_SCALES)
def test_order_of_rows_does_not_matter(scale: str) -> None:
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(9, generator=generator, dtype=torch.float64)
    group, order = groups(0, 0, 0, 4, 4, 4, 2, 2, 2), torch.randperm(9, generator=generator)
    advantages = credit.group_advantages(rewards, group, scale)
    close(credit.group_advantages(rewards[order], group[order], scale), advantages[order])


@pytest.mark.parametrize("scale", credit.REWARD_SCALES)
def test_no_rows_and_no_scorable_rows(scale: str) -> None:
    assert credit.group_advantages(f64([]), groups(), scale).shape == (0,)
    assert torch.equal(credit.group_advantages(f64([NAN, NAN]), groups(0, 0), scale), f64([0.0, 0.0]))


def test_scale_names() -> None:
    message = "scale='std': allowed are ('group', 'batch', 'none')"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        credit.group_advantages(f64([1.0]), groups(0), "std")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_constant_groups_by_hand(dtype: torch.dtype) -> None:
    rewards = f64([2.0, 2.0, 1.0, 2.0, 5.0, NAN, NAN, NAN, -3.0]).to(dtype)
    group = groups(4, 4, 1, 1, 0, 0, 9, 9, -1)
    assert credit.constant_groups(rewards, group).tolist() == [True, True, False, False, *[True] * 5]
    assert credit.constant_groups(rewards[:0], group[:0]).shape == (0,)
    below = f64([-2.0, NAN, -1.0])
    assert credit.constant_groups(below, groups(0, 0, 0)).tolist() == [False] * 3


# ---- token rewards ----


def test_shaped_rewards_by_hand() -> None:
    """Pitfall B-44: the reward sits on the last trained token: not on padding, not on a tool's answer."""
    mask = booleans([[1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0], [0, 1, 1, 0]])
    rewards = f64([3.0, -1.0, 2.0, 4.0, 9.0, NAN])
    kl = f64([[1.0, 2.0, NAN, 1e6]] * 4 + [[NAN] * 4, [1.0, 2.0, 3.0, 4.0]])
    close(
        credit.shaped_rewards(rewards, None, mask, 0.1),
        [[0, 3, 0, 0], [0, 0, -1, 0], [0, 0, 0, 2], [4, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]],
    )
    # - 0.1 * KL on every trained token; a row without a reward keeps its penalty.
    kl[2] = f64([1.0, 2.0, 3.0, 4.0])
    kl[1, 2] = 5.0
    close(
        credit.shaped_rewards(rewards, kl, mask, 0.1),
        [
            [-0.1, 3.0 - 0.2, 0, 0],
            [-0.1, 0, -1.0 - 0.5, 0],
            [-0.1, -0.2, -0.3, 2.0 - 0.4],
            [4.0 - 0.1, 0, 0, 0],
            [0, 0, 0, 0],
            [0, -0.2, -0.3, 0],
        ],
    )


def test_shaped_rewards_keep_the_precision_of_the_rewards() -> None:
    shaped = credit.shaped_rewards(f64([1 / 3]), torch.tensor([[0.5]]), booleans([[1]]), 1.0)
    assert shaped.dtype == torch.float64
    close(shaped, [[1 / 3 - 0.5]])
    assert credit.shaped_rewards(torch.tensor([1.0]), f64([[0.5]]), booleans([[1]]), 1.0).dtype == torch.float32


# ---- generalised advantages ----


def recursion(rewards: list, values: list, gamma: float, lam: float) -> tuple[list[float], list[float]]:
    """delta_t = r_t + gamma V_t+1 - V_t, A_t = delta_t + gamma lambda A_t+1 over tokens that all train."""
    advantages = [0.0] * len(rewards)
    for t in reversed(range(len(rewards))):
        last = t == len(rewards) - 1
        delta = rewards[t] + gamma * (0.0 if last else values[t + 1]) - values[t]
        advantages[t] = delta + gamma * lam * (0.0 if last else advantages[t + 1])
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def test_gae_by_hand() -> None:
    # gamma 0.5, lambda 0.5; rewards 0 | 1 | 4, values 2 | 3 | 1; the token between the second and third is a tool's.
    # t = 3: delta = 4 - 1 = 3                          A = 3                    R = 4
    # t = 1: delta = 1 + 0.5 * 1 - 3 = -1.5             A = -1.5 + 0.25 * 3 = -0.75      R = 2.25
    # t = 0: delta = 0 + 0.5 * 3 - 2 = -0.5             A = -0.5 + 0.25 * -0.75 = -0.6875  R = 1.3125
    rewards, values = f64([[0.0, 1.0, NAN, 4.0, 1e6]]), f64([[2.0, 3.0, 1e6, 1.0, NAN]])
    advantages, returns = credit.generalized_advantages(rewards, values, booleans([[1, 1, 0, 1, 0]]), 0.5, 0.5)
    close(advantages, [[-0.6875, -0.75, 0.0, 3.0, 0.0]])
    close(returns, [[1.3125, 2.25, 0.0, 4.0, 0.0]])


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (0.99, 1.0), (0.7, 0.0), (0.0, 0.5)])
@pytest.mark.parametrize("garbage", GARBAGE)
def test_gae_skips_holes(gamma: float, lam: float, garbage: float) -> None:
    """Pitfall B-51: as if masked slots were not there, whatever they hold, in any number and place."""
    generator = torch.Generator().manual_seed(5)
    mask = torch.rand(12, 9, generator=generator) < 0.6
    mask[0], mask[1] = True, False
    rewards, values = torch.randn(2, 12, 9, generator=generator, dtype=torch.float64)
    expected = torch.zeros(2, 12, 9, dtype=torch.float64)
    for row in range(12):
        kept = mask[row]
        a, r = recursion(rewards[row][kept].tolist(), values[row][kept].tolist(), gamma, lam)
        expected[0, row, kept], expected[1, row, kept] = f64(a), f64(r)
    rewards, values = rewards.masked_fill(~mask, garbage), values.masked_fill(~mask, garbage)
    advantages, returns = credit.generalized_advantages(rewards, values, mask, gamma, lam)
    close(advantages, expected[0])
    close(returns, expected[1])


def test_gae_leaves_its_inputs_alone_and_keeps_the_precision_of_the_rewards() -> None:
    rewards, values = f64([[0.0, 1 / 3]]), torch.tensor([[0.5, 0.25]])
    advantages, returns = credit.generalized_advantages(rewards, values, booleans([[1, 1]]), 1.0, 1.0)
    assert advantages.dtype == returns.dtype == torch.float64
    close(returns, [[1 / 3, 1 / 3]])
    assert torch.equal(rewards, f64([[0.0, 1 / 3]]))
    assert torch.equal(values, torch.tensor([[0.5, 0.25]]))
    advantages, returns = credit.generalized_advantages(rewards.float(), values.double(), booleans([[1, 1]]), 1.0, 1.0)
    assert advantages.dtype == returns.dtype == torch.float32


def test_gae_of_one_column() -> None:
    advantages, returns = credit.generalized_advantages(
        f64([[2.0], [2.0]]), f64([[0.5], [0.5]]), booleans([[1], [0]]), 1.0, 1.0
    )
    close(advantages, [[1.5], [0.0]])
    close(returns, [[2.0], [0.0]])


def test_explained_variance_by_hand() -> None:
    # Returns 1, 3, 5: variance 8/3. Errors 0, 1, 2: variance 2/3. 1 - 1/4.
    returns, values = f64([[1.0, 3.0, NAN], [5.0, 1e6, NAN]]), f64([[1.0, 2.0, 1e6], [3.0, NAN, NAN]])
    mask = booleans([[1, 1, 0], [1, 0, 0]])
    close(credit.explained_variance(values, returns, mask), 0.75)
    close(credit.explained_variance(returns, returns, mask), 1.0)
    # Two tokens are enough: variance 1, errors 0 and 1 with variance 1/4.
    close(credit.explained_variance(values, returns, booleans([[1, 1, 0], [0, 0, 0]])), 0.75)
    # A critic that is off by a constant explains everything.
    close(credit.explained_variance(returns + 7.0, returns, mask), 1.0)
    half = credit.explained_variance(values.float(), returns.float(), mask)
    assert half.dtype == torch.float64


@pytest.mark.parametrize("mask", [[[0, 0, 0]], [[1, 0, 0]], [[1, 1, 0]]])
def test_explained_variance_of_returns_that_do_not_vary(mask: list) -> None:
    explained = credit.explained_variance(f64([[1.0, 2.0, 3.0]]), f64([[2.0, 2.0, 9.0]]), booleans(mask))
    assert explained.isnan()
    assert explained.dtype == torch.float64


# ---- what is logged of rewards ----


def test_reward_metrics_by_hand() -> None:
    """Pitfalls A-2, A-5: unscorable rows are in no mean, and groups without differences are counted."""
    # Groups of 0, 2: std sqrt(2); of 1, 1, 1: 0; of 4 beside NaN: 0; of NaN only: no group. A lone row has nothing to
    # vary, and a blank row (-1) is in no group.
    rewards = f64([0.0, 2.0, 1.0, 1.0, 1.0, 4.0, NAN, NAN, NAN, 7.0, NAN])
    batch = batch_of(booleans([[1]] * 11), [0, 0, 4, 4, 4, 3, 3, 2, 2, 9, -1], rewards=rewards)
    metrics = credit.reward_metrics(batch)
    assert {name: number(m) for name, m in metrics.items()} == pytest.approx(
        {"reward": 16 / 7, "reward_std": math.sqrt(2) / 3, "frac_reward_zero_std": 2 / 3}, abs=1e-15
    )
    assert [int(m.count) for m in metrics.values()] == [7, 3, 3]  # type: ignore[union-attr]
    assert all(m.total.is_floating_point() for m in metrics.values())  # type: ignore[union-attr]


@pytest.mark.parametrize("rewards", [[NAN, NAN, NAN], [1.0, NAN, 2.0]])
def test_reward_metrics_without_groups_to_compare(rewards: list[float]) -> None:
    """Nothing scorable, or lone rows only: no std, and a mean over what is there."""
    group = [0, 0, 1] if math.isnan(rewards[0]) else [0, 1, 2]
    metrics = credit.reward_metrics(batch_of(booleans([[1]] * 3), group, rewards=f64(rewards)))
    assert list(metrics) == ["reward"]
    assert metrics["reward"].count == sum(not math.isnan(r) for r in rewards)  # type: ignore[union-attr]
