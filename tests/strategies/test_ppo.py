"""Proximal policy optimisation with a critic by hand."""

from __future__ import annotations

import math
import re

import pytest
import torch
from conftest import f64
from pure import INF, NAN, batch_of, booleans, close, declared, number
from torch import Tensor

from hf_strategies import Batch, PolicyOutput, make_strategy
from hf_strategies.stats import Metrics
from hf_strategies.strategies import PPO, PPOOptions

LN2 = math.log(2.0)


def scored() -> tuple[Batch, Tensor, Tensor]:
    """Row 0: ratios 1.5 (clipped at 1.2) with A = 2 and 0.9 with A = 1; row 1: 0.7 (clipped) and 1.3, A = -1."""
    mask = booleans([[1, 1, 0], [1, 0, 1]])
    old = f64([[-1.0, -2.0, NAN], [-0.5, NAN, -3.0]])
    logprobs = (old + f64([[1.5, 0.9, NAN], [0.7, 1e6, 1.3]]).log()).requires_grad_()
    values = f64([[1.0, 0.0, NAN], [2.0, INF, -1.0]]).requires_grad_()
    batch = batch_of(
        mask,
        old_logprobs=old,
        advantages=f64([[2.0, 1.0, NAN], [-1.0, INF, -1.0]]),
        returns=f64([[0.0, 2.0, NAN], [2.0, 1e6, 0.0]]),
    )
    return batch, logprobs, values


def test_loss_and_gradients_by_hand() -> None:
    batch, logprobs, values = scored()
    strategy = make_strategy("online_ppo", vf_coef=0.25)
    assert strategy.count_items(batch) == 4
    entropy = f64([[1.0, 2.0, NAN], [3.0, NAN, 6.0]])
    loss, metrics = strategy.loss(PolicyOutput(logprobs, entropy, values=values), batch, torch.tensor(4.0))
    policy_loss = (-2.4 - 0.9 + 0.8 + 1.3) / 4
    value_loss = (1.0 + 4.0 + 0.0 + 1.0) / 4  # (V - R)^2
    close(loss, policy_loss + 0.25 * value_loss)
    by_logprobs, by_values = torch.autograd.grad(loss, (logprobs, values))
    close(by_logprobs, [[0.0, -0.9 / 4, 0.0], [0.0, 0.0, 1.3 / 4]])  # -A r / 4 where not clipped
    close(by_values, [[0.125, -0.25, 0.0], [0.0, 0.0, -0.125]])  # 0.25 * 2 (V - R) / 4
    assert {name: number(m) for name, m in metrics.items()} == pytest.approx(
        {
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "clip_ratio/low_mean": 0.25,
            "clip_ratio/high_mean": 0.25,
            "clip_ratio/region_mean": 0.5,
            "clip_ratio/low_min": 0.25,
            "clip_ratio/high_max": 0.25,
            "entropy": 3.0,
        },
        abs=1e-14,
    )
    _, metrics = strategy.loss(PolicyOutput(logprobs, values=values), batch, torch.tensor(4.0))
    assert "entropy" not in metrics


def test_bounds_follow_epsilon() -> None:
    batch, logprobs, values = scored()
    strategy = make_strategy("online_ppo", epsilon=0.4, vf_coef=0.0)
    loss, metrics = strategy.loss(PolicyOutput(logprobs, values=values), batch, torch.tensor(4.0))
    close(loss, (-2.8 - 0.9 + 0.7 + 1.3) / 4)  # 1.5 is cut at 1.4; 0.7 is inside
    assert number(metrics["clip_ratio/high_mean"]) == 0.25
    assert number(metrics["clip_ratio/low_mean"]) == 0.0
    close(torch.autograd.grad(loss, values)[0], torch.zeros(2, 3))


def test_shares_add_up_over_micro_batches() -> None:
    batch, logprobs, values = scored()
    strategy = make_strategy("online_ppo")
    items = torch.tensor(4.0)

    def metrics_of(i: int) -> Metrics:
        part = batch.replace(**{name: value[i : i + 1] for name, value in batch.tensors().items()})
        return strategy.loss(PolicyOutput(logprobs[i : i + 1], values=values[i : i + 1]), part, items)[1]

    whole = strategy.loss(PolicyOutput(logprobs, values=values), batch, items)[1]
    parts = [metrics_of(0), metrics_of(1)]
    for name in ("policy_loss", "value_loss"):
        # Divided by the four tokens of the step and weighted with the two of each part.
        total = sum(float(part[name].total) for part in parts)  # type: ignore[union-attr]
        count = sum(float(part[name].count) for part in parts)  # type: ignore[union-attr]
        assert count == 4
        assert total / count == pytest.approx(number(whole[name]), abs=1e-14)


def rollout() -> Batch:
    """Three rows: two trained tokens and a trailing tool's token; an empty completion; one that cannot be scored."""
    return batch_of(
        booleans([[1, 1, 0], [0, 0, 0], [1, 1, 1]]),
        rewards=f64([3.0, 5.0, NAN]),
        old_logprobs=f64([[-1.0, -2.0, NAN], [NAN] * 3, [-1.0] * 3]),
        ref_logprobs=f64([[-1.5, -2.0 - LN2, 1e6], [NAN] * 3, [-9.0] * 3]),
        values=f64([[0.5, 1.0, INF], [NAN] * 3, [7.0] * 3]),
    )


def test_credit_by_hand() -> None:
    """Pitfall B-44: the reward is on the last trained token; KL of the rollout's policy is taken off every token."""
    batch = rollout()
    out, metrics = make_strategy("online_ppo", kl_coef=0.1, gamma=0.5, gae_lambda=0.5).assign_credit(batch)
    # k1 = log p - log p_ref: 0.5 and ln 2. Token rewards -0.05 and 3 - 0.1 ln 2.
    r0, r1 = -0.05, 3.0 - 0.1 * LN2
    a1 = r1 - 1.0  # after the last trained token V is 0
    a0 = r0 + 0.5 * 1.0 - 0.5 + 0.25 * a1
    zero = [0.0] * 3
    assert out.advantages is not None
    assert out.returns is not None
    assert out.advantages.dtype == out.returns.dtype == torch.float32
    close(out.advantages, [[a0, a1, 0.0], zero, zero], atol=1e-6)
    close(out.returns, [[a0 + 0.5, a1 + 1.0, 0.0], zero, zero], atol=1e-6)
    assert out.loss_mask.long().tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 0]]
    assert batch.loss_mask.sum() == 5
    # Values 0.5 and 1; errors R - V are the advantages: 1 - var(A) / var(R).
    explained = 1 - (a0 - a1) ** 2 / (a0 + 0.5 - a1 - 1.0) ** 2
    k3 = [math.exp(-0.5) - 1 + 0.5, 0.5 - 1 + LN2]
    assert {name: number(m) for name, m in metrics.items()} == pytest.approx(
        {
            "reward": 4.0,  # of rows that can be scored
            "rows_dropped/empty_completion": 1 / 3,  # the empty row, not the unscorable one
            "kl": sum(k3) / 2,
            "explained_variance": explained,
        },
        abs=1e-7,
    )
    assert metrics["reward"].count == 2  # type: ignore[union-attr]


def test_credit_without_kl_needs_no_reference() -> None:
    batch = rollout().replace(ref_logprobs=None)
    strategy = make_strategy("online_ppo", kl_coef=0.0, gamma=1.0, gae_lambda=1.0)
    assert not strategy.needs_reference
    out, metrics = strategy.assign_credit(batch)
    close(out.returns, [[3.0, 3.0, 0.0], [0.0] * 3, [0.0] * 3])  # type: ignore[arg-type]
    close(out.advantages, [[2.5, 2.0, 0.0], [0.0] * 3, [0.0] * 3])  # type: ignore[arg-type]
    # Both returns are 3: there is no variance to explain.
    assert set(metrics) == {"reward", "rows_dropped/empty_completion"}


def test_an_unscorable_empty_row_is_not_counted_as_dropped_for_being_empty() -> None:
    batch = rollout().replace(rewards=f64([3.0, NAN, NAN]))
    _, metrics = make_strategy("online_ppo").assign_credit(batch)
    assert number(metrics["rows_dropped/empty_completion"]) == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_first_pass_after_the_rollout(dtype: torch.dtype) -> None:
    """Pitfall A-14: ratio 1 within the number format: the policy loss is minus the mean advantage."""
    batch, logprobs, values = scored()
    old = logprobs.detach().to(dtype)
    batch = batch.replace(old_logprobs=old, advantages=batch.advantages.to(dtype))  # type: ignore[union-attr]
    strategy = make_strategy("online_ppo", vf_coef=0.0)
    policy = PolicyOutput(old.clone().requires_grad_(), values=values.to(dtype))
    loss, metrics = strategy.loss(policy, batch, torch.tensor(4.0))
    close(loss, -(2.0 + 1.0 - 1.0 - 1.0) / 4)
    assert number(metrics["clip_ratio/region_mean"]) == 0.0


@pytest.mark.parametrize("field", ["old_logprobs", "values"])
def test_what_the_rollout_must_bring(field: str) -> None:
    with pytest.raises(ValueError, match=f"^PPO batches must provide {field} captured at rollout$"):
        make_strategy("online_ppo").assign_credit(rollout().replace(**{field: None}))


def test_what_it_declares() -> None:
    """Dropout is off: policy and old policy would disagree for no reason (pitfall A-15)."""
    strategy = make_strategy("online_ppo")
    assert isinstance(strategy, PPO)
    assert strategy.min_group_size == 1
    needs = {"needs_rewards", "needs_critic", "needs_old_logprobs", "needs_reference"}
    assert declared(strategy) == needs
    assert declared(make_strategy("online_ppo", kl_coef=0.0)) == needs - {"needs_reference"}


UNIT = "a number >= 0.0 and <= 1.0"


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("epsilon", -0.1, UNIT),
        ("epsilon", 1.1, UNIT),
        ("gamma", -0.1, UNIT),
        ("gamma", 1.01, UNIT),
        ("gae_lambda", -0.1, UNIT),
        ("gae_lambda", NAN, UNIT),
        ("gae_lambda", 2, UNIT),
        ("vf_coef", -0.5, "a number >= 0.0"),
        ("vf_coef", "0.5", "a number >= 0.0"),
        ("kl_coef", -0.01, "a number >= 0.0"),
        ("kl_coef", INF, "a number >= 0.0"),
    ],
)
def test_bad_options(name: str, value: object, allowed: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(f'{name}={value!r}: allowed is {allowed}')}$"):
        PPOOptions(**{name: value})  # type: ignore[arg-type]


def test_ends_of_the_ranges_are_allowed() -> None:
    for value in (0, 1):
        options = PPOOptions(epsilon=value, gamma=value, gae_lambda=value, vf_coef=value, kl_coef=value)
        assert {options.epsilon, options.gamma, options.gae_lambda, options.vf_coef, options.kl_coef} == {value}
