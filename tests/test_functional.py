"""Reductions, log-probabilities, divergences, surrogates and aggregation against written-out numbers."""

from __future__ import annotations

import math
import re

import pytest
import torch
import torch.nn.functional as F
from conftest import f64
from pure import GARBAGE, INF, NAN, booleans, close, number
from torch import Tensor

from hf_strategies import functional as f
from hf_strategies.stats import Extreme

LN2, LN3 = math.log(2.0), math.log(3.0)


def gradient(values: Tensor, output: Tensor) -> Tensor:
    return torch.autograd.grad(output.sum(), values)[0]


# ---- masked reductions ----


def test_masked_sum_and_mean_by_hand() -> None:
    values, mask = f64([[1.0, NAN, 4.0], [INF, 2.0, -INF]]), booleans([[1, 0, 1], [0, 1, 0]])
    close(f.masked_sum(values, mask), 7.0)  # 1 + 4 + 2
    close(f.masked_sum(values, mask, dim=-1), [5.0, 2.0])
    close(f.masked_sum(values, mask, dim=0), [1.0, 2.0, 4.0])
    close(f.masked_mean(values, mask), 7.0 / 3.0)
    close(f.masked_mean(values, mask, dim=-1), [2.5, 2.0])
    close(f.masked_mean(values, mask, dim=0), [1.0, 2.0, 4.0])


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
def test_masked_slots_have_no_value_and_no_gradient(garbage: float, reduction: str) -> None:
    """Pitfall A-7: masked slots are replaced, not multiplied: NaN * 0 is NaN. An empty row is 0."""
    values = f64([[3.0, garbage, 5.0], [garbage, garbage, garbage]]).requires_grad_()
    out = f.reduce_tokens(values, booleans([[1, 0, 1], [0, 0, 0]]), reduction)
    expected = {"sum": [8.0, 0.0], "mean": [4.0, 0.0], "none": [[3.0, 0.0, 5.0], [0.0, 0.0, 0.0]]}
    close(out, expected[reduction])
    each = 0.5 if reduction == "mean" else 1.0
    assert torch.equal(gradient(values, out), f64([[each, 0.0, each], [0.0, 0.0, 0.0]]))


@pytest.mark.parametrize("reduce", [f.masked_sum, f.masked_mean])
def test_nothing_left_is_a_zero_attached_to_the_graph(reduce: object) -> None:
    values = torch.full((2, 2), NAN, requires_grad=True)
    total = reduce(values, torch.zeros(2, 2, dtype=torch.bool))  # type: ignore[operator]
    assert total.item() == 0.0
    assert torch.equal(gradient(values, total), torch.zeros(2, 2))


def test_reduction_names() -> None:
    with pytest.raises(ValueError, match=r"^reduction='max': allowed are 'none', 'sum', 'mean'$"):
        f.reduce_tokens(torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool), "max")


# ---- log-probabilities ----


def test_token_logprobs_by_hand() -> None:
    # exp of the logits is 1, 2, 3: probabilities 1/6, 2/6, 3/6. Uniform logits of any height: 1/3 each.
    logits = f64([[[0.0, LN2, LN3], [7.0, 7.0, 7.0]]])
    close(f.token_logprobs(logits, torch.tensor([[0, 1]])), [[math.log(1 / 6), math.log(1 / 3)]])
    close(f.token_logprobs(logits, torch.tensor([[2, 2]])), [[math.log(1 / 2), math.log(1 / 3)]])


def test_token_logprobs_gradient() -> None:
    """d log p_y / d logit_v = [v == y] - p_v."""
    logits = f64([0.0, LN2, LN3]).requires_grad_()
    close(gradient(logits, f.token_logprobs(logits, torch.tensor(1))), [-1 / 6, 1 - 2 / 6, -3 / 6])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_half_precision_is_raised_before_the_softmax(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(3, 500, generator=generator, dtype=torch.float64)).to(dtype)
    ids = torch.tensor([5, 77, 499])
    half = dtype in (torch.float16, torch.bfloat16)
    logprobs, entropy = f.token_logprobs(logits, ids), f.entropy_from_logits(logits)
    assert logprobs.dtype == entropy.dtype == (torch.float32 if half else dtype)
    exact = logits.double().log_softmax(-1)
    atol = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(logprobs.double(), exact[range(3), ids], atol=atol, rtol=0)
    torch.testing.assert_close(entropy.double(), -(exact.exp() * exact).sum(-1), atol=atol, rtol=0)


def test_entropy_by_hand() -> None:
    """Pitfall B-47: entropy is >= 0, and tokens ruled out with -inf add nothing instead of NaN."""
    # p = 1/4, 3/4: H = 1/4 ln 4 + 3/4 ln 4/3 = ln 4 - 3/4 ln 3
    logits = f64([[0.0, LN3, -INF], [1.0, 1.0, 1.0], [5.0, -INF, -INF]])
    close(f.entropy_from_logits(logits), [2 * LN2 - 0.75 * LN3, LN3, 0.0])
    assert f.entropy_from_logits(logits).min() >= 0.0
    assert torch.equal(f.entropy_from_logits(logits[None, :, None]), f.entropy_from_logits(logits)[None, :, None])


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5, 0.999])
def test_label_smoothing_is_that_of_cross_entropy(smoothing: float) -> None:
    """Pitfall D-72."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 3, 7, generator=generator, dtype=torch.float64).requires_grad_()
    ids = torch.tensor([[0, 6, 3], [2, 2, 5]])
    expected = F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none", label_smoothing=smoothing)
    vocab_mean = logits.log_softmax(-1).mean(-1)
    actual = f.smoothed_nll(f.token_logprobs(logits, ids), vocab_mean, smoothing)
    close(actual.flatten(), expected.detach())
    close(gradient(logits, actual), gradient(logits, expected))


def test_label_smoothing_by_hand() -> None:
    # 0.9 * 1 + 0.1 * 3 = 1.2; without smoothing 1, and the mean over the vocabulary is not needed.
    close(f.smoothed_nll(f64([[-1.0]]), f64([[-3.0]]), 0.1), [[1.2]])
    close(f.smoothed_nll(f64([[-1.0]]), None, 0.0), [[1.0]])
    close(f.smoothed_nll(f64([[-1.0]]), f64([[NAN]]), 0.0), [[1.0]])
    with pytest.raises(ValueError, match=r"^label_smoothing > 0 needs vocab_mean$"):
        f.smoothed_nll(f64([[-1.0]]), None, 0.1)


# ---- ratios and divergences ----


def test_log_ratio_by_hand() -> None:
    """Inside +-20 the difference with gradient 1, outside the bound with gradient 0, masked 0."""
    new = f64([[-1.0, -1.0, -50.0, 0.0, 0.0]]).requires_grad_()
    old = f64([[-1.5, -0.5, 0.0, -20.5, 0.0]])
    out = f.log_ratio(new, old, booleans([[1, 1, 1, 1, 0]]))
    close(out, [[0.5, -0.5, -20.0, 20.0, 0.0]])
    assert torch.equal(gradient(new, out), f64([[1.0, 1.0, 0.0, 0.0, 0.0]]))
    # exp of the bound is a float32 number with room above it
    assert (out.float().exp() ** 2).isfinite().all()


@pytest.mark.parametrize("garbage", GARBAGE)
def test_log_ratio_ignores_masked_slots_of_either_side(garbage: float) -> None:
    mask = booleans([[1, 0, 0]])
    new, old = f64([[-1.0, garbage, garbage]]).requires_grad_(), f64([[-2.0, -1.0, garbage]])
    ratio = f.log_ratio(new, old, mask).exp()
    close(ratio, [[math.e, 1.0, 1.0]])
    # A loss that reads masked slots of the ratio still has no gradient there.
    assert torch.equal(gradient(new, ratio)[0, 1:], f64([0.0, 0.0]))


@pytest.mark.parametrize(
    ("estimator", "values", "slopes"),
    [
        # d = log p_ref - log p; p_ref/p = 2 and 1/2. k1 = -d, k2 = d^2/2, k3 = exp(d) - 1 - d.
        # d/d log p: k1: 1; k2: -d; k3: 1 - exp(d), since d falls by what log p grows.
        ("k1", [-LN2, LN2], [1.0, 1.0]),
        ("k2", [LN2**2 / 2, LN2**2 / 2], [-LN2, LN2]),
        ("k3", [1.0 - LN2, LN2 - 0.5], [-1.0, 0.5]),
    ],
)
@pytest.mark.parametrize("garbage", GARBAGE)
def test_kl_estimators_by_hand(estimator: str, values: list, slopes: list, garbage: float) -> None:
    """Pitfall A-26: values, 0 where policy and reference agree, and the gradient against the analytic one."""
    logprobs = f64([[-2.0, -2.0, -1.0, garbage]]).requires_grad_()
    reference = f64([[-2.0 + LN2, -2.0 - LN2, -1.0, garbage]])
    kl = f.kl_divergence(logprobs, reference, booleans([[1, 1, 1, 0]]), estimator)
    close(kl, [[*values, 0.0, 0.0]])
    slope = gradient(logprobs, kl)
    close(slope[0, :2], slopes)
    assert slope[0, 3] == 0.0


def test_k3_is_never_negative_and_keeps_small_numbers() -> None:
    """Pitfall B-46: also in float32, where exp(d) - 1 - d of a small d is noise of both signs."""
    generator = torch.Generator().manual_seed(2)
    scale = 10 ** torch.empty(20_000).uniform_(-8, 1, generator=generator)
    d = scale * torch.randn(20_000, generator=generator)
    k3 = f.kl_divergence(torch.zeros_like(d), d, torch.ones_like(d, dtype=torch.bool), "k3")
    assert k3.min() >= 0.0
    exact = torch.expm1(d.double().clamp(-20, 20)) - d.double().clamp(-20, 20)
    # expm1 and d each round at 2^-24 of |d|: the difference is that good, absolutely, for a step of any size.
    assert ((k3 - exact).abs() <= 2e-7 * d.abs() + 1e-6 * exact).all()


def test_k3_of_a_policy_over_three_tokens_is_the_divergence() -> None:
    """Pitfall A-26: sum_v p_v k3_v = KL(p || q) exactly, since sum_v p_v (q_v / p_v - 1) = 0."""
    p, q = f64([[0.2, 0.3, 0.5]]), f64([[0.4, 0.4, 0.2]])
    k3 = f.kl_divergence(p.log(), q.log(), booleans([[1, 1, 1]]), "k3")
    close((p * k3).sum(), float((p * (p / q).log()).sum()))


def test_estimator_names() -> None:
    one = torch.zeros(1, 1)
    with pytest.raises(ValueError, match=r"^estimator='k4': allowed are 'k1', 'k2', 'k3'$"):
        f.kl_divergence(one, one, one.bool(), "k4")


# ---- the clipped surrogate ----

# eps 0.25, eps_high 0.5: the bounds 0.75 and 1.5 are exact in binary. Columns: ratio, A, loss, d loss / d ratio.
SURROGATE = [
    (2.0, 2.0, -3.0, 0.0),  # above the bound and better: -min(4, 1.5 * 2), clipped
    (1.25, 2.0, -2.5, -2.0),  # inside: -1.25 * 2
    (0.5, 2.0, -1.0, -2.0),  # below the bound but worse: -min(0.5 * 2, 0.75 * 2), not clipped
    (0.5, -2.0, 1.5, 0.0),  # below the bound and better: -min(-1, -1.5), clipped
    (0.8, -2.0, 1.6, 2.0),  # inside
    (2.0, -2.0, 4.0, 2.0),  # above the bound but worse: -min(-4, -3), not clipped
    (1.0, 0.0, 0.0, 0.0),
]


@pytest.mark.parametrize(("ratio", "advantage", "loss", "slope"), SURROGATE)
def test_clipped_surrogate_by_hand(ratio: float, advantage: float, loss: float, slope: float) -> None:
    r = f64([[ratio]]).requires_grad_()
    out = f.clipped_surrogate(r, f64([[advantage]]), 0.25, 0.5)
    close(out, [[loss]])
    close(gradient(r, out), [[slope]])


def test_clip_metrics_by_hand() -> None:
    """Counted are tokens whose gradient the clip removed: strictly beyond a bound, on the side that is better."""
    #             low    at bound  A = 0  worse  high   at bound  A = 0  worse  masked
    ratio = f64([[0.5, 0.75, 0.5, 0.5, 2.0, 1.5, 2.0, 2.0, NAN]])
    advantages = f64([[-1.0, -1.0, 0.0, 1.0, 1.0, 1.0, 0.0, -1.0, -1.0]])
    mask = booleans([[1] * 8 + [0]])
    metrics = f.clip_metrics(ratio, advantages, mask, 0.25, 0.5)
    assert {name: number(metric) for name, metric in metrics.items()} == {
        "clip_ratio/low_mean": 1 / 8,
        "clip_ratio/high_mean": 1 / 8,
        "clip_ratio/region_mean": 2 / 8,
        "clip_ratio/low_min": 1 / 8,
        "clip_ratio/high_max": 1 / 8,
    }
    assert {name: m.kind for name, m in metrics.items() if isinstance(m, Extreme)} == {
        "clip_ratio/low_min": "min",
        "clip_ratio/high_max": "max",
    }


def test_clip_metrics_tell_low_from_high() -> None:
    ratio, advantages = f64([[0.5, 0.5, 2.0]]), f64([[-1.0, -1.0, 1.0]])
    metrics = f.clip_metrics(ratio, advantages, booleans([[1, 1, 1]]), 0.25, 0.5)
    assert [number(m) for m in metrics.values()] == pytest.approx([2 / 3, 1 / 3, 1.0, 2 / 3, 1 / 3], abs=1e-15)
    one = f.clip_metrics(ratio, advantages, booleans([[1, 0, 0]]), 0.25, 0.5)
    assert [number(m) for m in one.values()] == [1.0, 0.0, 1.0, 1.0, 0.0]
    other = f.clip_metrics(ratio, advantages, booleans([[0, 0, 1]]), 0.25, 0.5)
    assert [number(m) for m in other.values()] == [0.0, 1.0, 1.0, 0.0, 1.0]


def test_clip_metrics_of_nothing() -> None:
    metrics = f.clip_metrics(f64([[NAN]]), f64([[NAN]]), booleans([[0]]), 0.2, 0.2)
    assert all(m.value == 0.0 if isinstance(m, Extreme) else (m.total, m.count) == (0, 0) for m in metrics.values())


# ---- aggregation ----

# Two rows of 1 and 3 trained tokens and an empty one; token losses 6 | 1 2 3.
LOSSES = [[6.0, NAN, NAN], [1.0, 2.0, 3.0], [NAN, INF, 1e6]]
MASK = [[1, 0, 0], [1, 1, 1], [0, 0, 0]]


@pytest.mark.parametrize(
    ("how", "items", "loss", "slopes"),
    [
        ("dapo", 4.0, 3.0, [1 / 4, 1 / 4]),  # (6 + 1 + 2 + 3) / 4 tokens
        ("grpo", 2.0, 4.0, [1 / 2, 1 / 6]),  # (6 + (1 + 2 + 3) / 3) / 2 rows that train
        ("dr_grpo", 10.0, 1.2, [1 / 10, 1 / 10]),  # 12 / (2 rows * 5)
        ("bnpo", 1.0, 3.0, [1 / 4, 1 / 4]),  # the token mean of this micro-batch
    ],
)
def test_aggregations_by_hand(how: str, items: float, loss: float, slopes: list[float]) -> None:
    mask, values = booleans(MASK), f64(LOSSES).requires_grad_()
    count = f.count_items(mask, how, 5)
    assert count.dtype == torch.float64
    assert count.shape == ()
    assert count.item() == items
    out = f.aggregate(values, mask, count, how)
    close(out, loss)
    expected = booleans(MASK).double() * f64([[slopes[0]], [slopes[1]], [0.0]])
    close(gradient(values, out), expected)


@pytest.mark.parametrize("how", f.AGGREGATIONS)
def test_aggregation_of_nothing_is_attached(how: str) -> None:
    """Pitfall A-7: no 0/0; the backward pass runs, as other processes wait for it."""
    mask, values = booleans([[0, 0]]), torch.full((1, 2), NAN, requires_grad=True)
    assert f.count_items(mask, how, 5).item() == 0.0
    out = f.aggregate(values, mask, torch.tensor(3.0, dtype=torch.float64), how)
    assert out.dtype == torch.float32
    assert out.item() == 0.0
    assert torch.equal(gradient(values, out), torch.zeros(1, 2))


@pytest.mark.parametrize("how", [how for how in f.AGGREGATIONS if how != "bnpo"])
def test_aggregation_does_not_depend_on_the_split(how: str) -> None:
    """Pitfalls A-20, A-21, D-71: lengths 2 and 8, in one micro-batch, in two, and cut in the middle of nothing."""
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(5, 8, generator=generator, dtype=torch.float64)
    mask = torch.arange(8) < torch.tensor([[2], [8], [0], [5], [1]])
    whole = f.count_items(mask, how, 16)
    expected = f.aggregate(values, mask, whole, how)
    for cuts in ([1, 4], [2, 3], [1, 1, 1, 1, 1], [3, 2], [4, 1]):
        parts = list(zip(values.split(cuts), mask.split(cuts), strict=True))
        assert sum(f.count_items(m, how, 16) for _, m in parts) == whole
        close(torch.stack([f.aggregate(v, m, whole, how) for v, m in parts]).sum(), expected)


def test_mean_of_means_is_not_the_mean() -> None:
    """Pitfall D-71: 2 tokens at 4.0 and 8 at 1.0 are 1.6, not 2.5, which is what bnpo promises."""
    pieces = [(torch.full((1, 2), 4.0), 2), (torch.full((1, 8), 1.0), 8)]
    for how, expected in (("dapo", 1.6), ("bnpo", 2.5)):
        masks = [torch.ones(1, n, dtype=torch.bool) for _, n in pieces]
        items = torch.stack([f.count_items(m, how, 1) for m in masks]).sum()
        shares = [f.aggregate(v, m, items, how) for (v, _), m in zip(pieces, masks, strict=True)]
        assert torch.stack(shares).sum().item() == pytest.approx(expected, abs=1e-6)


def test_aggregation_names() -> None:
    message = "aggregation 'mean': allowed are ('dapo', 'grpo', 'dr_grpo', 'bnpo')"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        f.count_items(torch.ones(1, 1, dtype=torch.bool), "mean", 1)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        f.aggregate(torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool), torch.tensor(1.0), "mean")
