"""Importance weights for what another precision or engine sampled, by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from conftest import f64
from pure import NAN, batch_of, booleans, close, number

from hf_strategies import PolicyOutput, make_strategy
from hf_strategies import functional as f
from hf_strategies.strategies.sampler_correction import BOUNDS

# Row 0: w = 4, 0.25; row 1: w = 1, a token that does not train, 1.5. Products: 1 and 1.5.
MASK = [[1, 1, 0], [1, 0, 1]]
WEIGHTS = [[4.0, 0.25, NAN], [1.0, NAN, 1.5]]


def logprobs() -> tuple[torch.Tensor, torch.Tensor]:
    """Of the policy at rollout time, and of the sampler."""
    old = f64([[-1.0, -2.0, NAN], [-0.5, NAN, -3.0]])
    return old, old - f64(WEIGHTS).log()


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("off", [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]),
        ("token_truncate", [[2.0, 0.25, 1.0], [1.0, 1.0, 1.5]]),
        ("token_mask", [[4.0, 0.0, 1.0], [1.0, 1.0, 1.5]]),
        ("sequence_truncate", [[1.0, 1.0, 1.0], [1.5, 1.0, 1.5]]),
        ("sequence_mask", [[1.0, 1.0, 1.0], [1.5, 1.0, 1.5]]),
    ],
)
def test_weights_by_hand(how: str, expected: list[list[float]]) -> None:
    """A masked slot holds NaN and weighs 1."""
    old, sampling = logprobs()
    close(f.sampler_weights(old, sampling, booleans(MASK), how, *BOUNDS[how]), expected)


def test_bounds_of_whole_rows() -> None:
    """Row 1's product of 1.5 is above 1.2; a product below every bound stays."""
    old, sampling = logprobs()
    mask = booleans(MASK)
    close(f.sampler_weights(old, sampling, mask, "sequence_truncate", 9.0, 1.2), [[1.0] * 3, [1.2, 1.0, 1.2]])
    close(f.sampler_weights(old, sampling, mask, "sequence_mask", 9.0, 1.2), [[1.0] * 3, [0.0, 1.0, 0.0]])


def test_bounds_are_inside() -> None:
    """A weight of 1 lies in [1, 1]; above and below do not."""
    old = f64([[0.0, 0.0, 0.0]])
    sampling = f64([[0.0, -0.1, 0.1]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    close(f.sampler_weights(old, sampling, mask, "token_mask", 1.0, 1.0), [[1.0, 0.0, 0.0]])
    close(f.sampler_weights(old[:, :1], sampling[:, :1], mask[:, :1], "sequence_mask", 2.0, 1.0), [[1.0]])


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_products_stay_finite(sign: float) -> None:
    """Three tokens of log-ratio 15: the product's logarithm is cut at 20, as a token's is."""
    sampling = torch.full((1, 3), -15.0 * sign, dtype=torch.float64)
    weights = f.sampler_weights(
        torch.zeros_like(sampling), sampling, torch.ones(1, 3, dtype=torch.bool), "sequence_truncate", 0.0, math.inf
    )
    close(weights, [[math.exp(20.0 * sign)] * 3])


def test_unknown_way() -> None:
    old, sampling = logprobs()
    with pytest.raises(ValueError, match="sampler correction 'none': allowed are"):
        f.sampler_weights(old, sampling, booleans(MASK), "none", 0.0, 1.0)


def test_weights_multiply_the_policy_term_alone() -> None:
    """A = 2 and -1 at ratio 1: token losses -2 w and w; the KL term is not weighted.

    w: 2 (cut), 0.25 | 1, 1.5; policy (-4 - 0.5 + 1 + 1.5) / 4 = -0.5, kl per token k3(ln 2) = 2 - 1 - ln 2.
    """
    old, sampling = logprobs()
    batch = batch_of(booleans(MASK), [0, 0], advantages=f64([[2.0, 2.0, NAN], [-1.0, NAN, -1.0]])).replace(
        sampling_logprobs=sampling, ref_logprobs=old + math.log(2.0)
    )
    strategy = make_strategy("grpo", sampler_correction="token_truncate", beta=0.5)
    policy = old.clone().requires_grad_()
    loss, metrics = strategy.loss(PolicyOutput(policy), batch, torch.tensor(4.0))
    close(loss, -0.5 + 0.5 * (1 - math.log(2.0)))
    # d/d log p: -A w / 4, and 0.5 (1 - 2) / 4 of the KL term.
    close(
        torch.autograd.grad(loss, policy)[0],
        [[-2 * 2.0 / 4 - 0.125, -2 * 0.25 / 4 - 0.125, 0.0], [1 / 4 - 0.125, 0.0, 1.5 / 4 - 0.125]],
    )
    assert number(metrics["sampling/importance_sampling_ratio/mean"]) == pytest.approx((2 + 0.25 + 1 + 1.5) / 4)
    apart = [math.log(4), math.log(4), 0.0, math.log(1.5)]
    assert number(metrics["sampling/sampling_logp_difference/mean"]) == pytest.approx(sum(apart) / 4)
    assert number(metrics["sampling/sampling_logp_difference/max"]) == pytest.approx(math.log(4))


def test_ppo_weights_the_policy_and_not_the_critic() -> None:
    old, sampling = logprobs()
    batch = batch_of(booleans(MASK), [0, 0], advantages=f64([[2.0, 2.0, NAN], [-1.0, NAN, -1.0]])).replace(
        sampling_logprobs=sampling, old_logprobs=old, returns=f64([[1.0, 1.0, NAN], [1.0, NAN, 1.0]])
    )
    strategy = make_strategy("online_ppo", sampler_correction="token_truncate")
    values = torch.zeros_like(old)
    _, metrics = strategy.loss(PolicyOutput(old.clone(), values=values), batch, torch.tensor(4.0))
    assert number(metrics["policy_loss"]) == pytest.approx(-0.5)
    assert number(metrics["value_loss"]) == pytest.approx(1.0)
    assert number(metrics["sampling/importance_sampling_ratio/mean"]) == pytest.approx((2 + 0.25 + 1 + 1.5) / 4)


def test_skipped_rows_are_in_no_mean() -> None:
    """Row 0 was not computed: what its log-probabilities hold is nothing."""
    old, sampling = logprobs()
    batch = batch_of(booleans(MASK), [0, 0], advantages=f64([[0.0, 0.0, NAN], [-1.0, NAN, -1.0]])).replace(
        sampling_logprobs=sampling
    )
    policy = PolicyOutput(old, computed=torch.tensor([False, True]))
    options = make_strategy("grpo", sampler_correction="token_truncate").options
    _, metrics = options.sampler_weights(policy, old, batch, batch.loss_mask)  # type: ignore[attr-defined]
    assert number(metrics["sampling/importance_sampling_ratio/mean"]) == pytest.approx((1 + 1.5) / 2)
    assert number(metrics["sampling/sampling_logp_difference/max"]) == pytest.approx(math.log(1.5))


def test_nothing_recorded_nothing_corrected() -> None:
    old, _ = logprobs()
    batch = batch_of(booleans(MASK), [0, 0], advantages=f64([[2.0, 2.0, NAN], [-1.0, NAN, -1.0]]))
    loss, metrics = make_strategy("grpo", sampler_correction="token_truncate").loss(
        PolicyOutput(old), batch, torch.tensor(4.0)
    )
    close(loss, (-4 + 2) / 4)
    assert not [name for name in metrics if name.startswith("sampling/")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampler_correction": "tis"}, "sampler_correction='tis'"),
        ({"sampler_correction_max": 0.0}, "sampler_correction_max=0.0"),
        ({"sampler_correction_min": -1.0}, "sampler_correction_min=-1.0"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_strategy("grpo", **options)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"sampler_correction": "auto"}, [[1.0] * 3] * 2),
        ({"sampler_correction": "off"}, [[1.0] * 3] * 2),
        ({"sampler_correction": "token_mask"}, [[4.0, 0.0, 1.0], [1.0, 1.0, 1.5]]),
        ({"sampler_correction": "token_mask", "sampler_correction_min": 0.2}, [[4.0, 0.25, 1.0], [1.0, 1.0, 1.5]]),
        ({"sampler_correction": "token_mask", "sampler_correction_max": 1.2}, [[0.0, 0.0, 1.0], [1.0, 1.0, 0.0]]),
        ({"sampler_correction": "token_truncate", "sampler_correction_max": 0.5}, [[0.5, 0.25, 0.5], [0.5, 0.5, 0.5]]),
        ({"sampler_correction": "token_truncate", "sampler_correction_max": 3.0}, [[3.0, 0.25, 1.0], [1.0, 1.0, 1.5]]),
    ],
)
def test_bounds_of_options(options: dict[str, Any], expected: list[list[float]]) -> None:
    """The methods' own bounds, or those that are given; a mean weight is reported where there are weights."""
    old, sampling = logprobs()
    batch = batch_of(booleans(MASK), [0, 0]).replace(sampling_logprobs=sampling)
    chosen: Any = make_strategy("grpo", **options).options
    weights, metrics = chosen.sampler_weights(PolicyOutput(old), old, batch, batch.loss_mask)
    close(weights, expected)
    weighted = options["sampler_correction"] not in ("auto", "off")
    assert ("sampling/importance_sampling_ratio/mean" in metrics) == weighted
    assert metrics["sampling/sampling_logp_difference/max"].kind == "max"


def test_a_skipped_row_among_three() -> None:
    """Which rows were computed is said per row, whatever the number of tokens."""
    old = torch.zeros(3, 2, dtype=torch.float64)
    sampling = f64([[0.5, 0.5], [9.0, 9.0], [0.1, 0.1]])
    mask = torch.ones(3, 2, dtype=torch.bool)
    batch = batch_of(mask, [0, 0, 0]).replace(sampling_logprobs=sampling)
    policy = PolicyOutput(old, computed=torch.tensor([True, False, True]))
    options: Any = make_strategy("grpo", sampler_correction="token_truncate").options
    _, metrics = options.sampler_weights(policy, old, batch, mask)
    assert number(metrics["sampling/sampling_logp_difference/mean"]) == pytest.approx(0.3)
