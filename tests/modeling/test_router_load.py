"""What a router did, as counts (the pure part of the mixture-of-experts support)."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from conftest import CONFIGS, f64, make_model

from hf_strategies.modeling.moe import RouterLoad, balance_loss, experts_per_token, is_mixture_of_experts

LN2 = math.log(2.0)


def test_mixtures_are_told_from_dense_models() -> None:
    assert is_mixture_of_experts(make_model("mixtral"))
    assert not is_mixture_of_experts(make_model("llama"))
    assert not is_mixture_of_experts(make_model("gpt2"))


def test_experts_per_token() -> None:
    assert experts_per_token(CONFIGS["mixtral"]()) == 2
    for name in ("num_experts_per_tok", "num_experts_per_token", "top_k"):
        assert experts_per_token(SimpleNamespace(**{name: 3})) == 3
    assert experts_per_token(SimpleNamespace(num_experts_per_tok=None, top_k=4)) == 4
    with pytest.raises(ValueError, match=r"^SimpleNamespace does not say how many experts a token goes to$"):
        experts_per_token(SimpleNamespace(num_experts=8))


# Two layers of 4 experts, two tokens with 1 expert each.
# Layer 0: p = (1/2, 1/2, 0, 0) and (1/4, 1/4, 1/4, 1/4): entropies ln 2 and 2 ln 2; both go to expert 0.
# Layer 1: p = (0, 0, 1, 0) twice: entropy 0; one goes to expert 2, one to expert 3.
PROBS = [f64([[0.5, 0.5, 0.0, 0.0], [0.25] * 4]), f64([[0.0, 0.0, 1.0, 0.0]] * 2)]
CHOSEN = [torch.tensor([[0], [0]]), torch.tensor([[2], [3]])]


def test_counts_and_diagnostics_by_hand() -> None:
    load = RouterLoad.from_probs(PROBS, CHOSEN)
    assert load.assignments.tolist() == [[2, 0, 0, 0], [0, 0, 1, 1]]
    torch.testing.assert_close(load.entropy, f64([3 * LN2, 0.0]), atol=1e-15, rtol=0)
    assert load.tokens == 2
    assert load.tokens.dtype == load.entropy.dtype == load.assignments.dtype == torch.float64
    # ideal = 2 * 1 / 4 = 0.5: loads 4, 0, 0, 0 and 0, 0, 2, 2.
    assert load.values() == pytest.approx(
        {
            "moe/router_entropy": 0.75 * LN2,  # (1.5 ln 2 + 0) / 2 layers
            "moe/dead_expert_fraction": 5 / 8,
            "moe/load_imbalance_mean": ((3 + 1 + 1 + 1) / 4 + 1.0) / 2,
            "moe/load_imbalance_max": 3.0,  # (4 + 2) / 2
        },
        abs=1e-15,
    )


def test_every_layer_has_both() -> None:
    with pytest.raises(ValueError, match="shorter"):
        RouterLoad.from_probs(PROBS, CHOSEN[:1])


def test_perfect_balance() -> None:
    load = RouterLoad.from_probs([torch.full((4, 2), 0.5)], [torch.tensor([[0], [1], [1], [0]])])
    assert load.values() == pytest.approx(
        {
            "moe/router_entropy": LN2,
            "moe/dead_expert_fraction": 0.0,
            "moe/load_imbalance_mean": 0.0,
            "moe/load_imbalance_max": 1.0,
        }
    )


def test_parts_combine_to_the_whole() -> None:
    """Over micro-batches and processes the counts add, not the diagnostics: a dead expert of a part may be alive."""
    whole = RouterLoad.from_probs(PROBS, CHOSEN)
    parts = [RouterLoad.from_probs([p[i : i + 1] for p in PROBS], [c[i : i + 1] for c in CHOSEN]) for i in (0, 1)]
    both = parts[0].combine(parts[1])
    assert torch.equal(both.assignments, whole.assignments)
    torch.testing.assert_close(both.entropy, whole.entropy, atol=1e-15, rtol=0)
    assert both.tokens == whole.tokens
    assert parts[1].values()["moe/dead_expert_fraction"] == 6 / 8 > whole.values()["moe/dead_expert_fraction"]


@pytest.mark.parametrize("flat", [True, False])
def test_logits_of_real_tokens_only(flat: bool) -> None:
    """Pitfall E-77: padding is routed too, but does not count, whatever it holds."""
    # Rows of 3 positions, padded left and right; 3 experts, top 2. Real tokens: logits ln (4, 3, 1) and ln (1, 2, 1).
    real = [f64([4.0, 3.0, 1.0]).log(), f64([1.0, 2.0, 1.0]).log() + f64([1e-3, 0.0, 0.0])]
    garbage = torch.full((3,), float("nan"), dtype=torch.float64)
    logits = torch.stack([torch.stack([garbage, real[0], garbage]), torch.stack([real[1], garbage, garbage])])
    mask = torch.tensor([[0, 1, 0], [1, 0, 0]]).bool()
    given = logits.flatten(0, 1) if flat else logits
    load = RouterLoad.of((given, given), mask, SimpleNamespace(num_experts_per_tok=2))
    assert load.tokens == 2
    assert load.assignments.tolist() == [[2, 2, 0]] * 2  # experts 0, 1 | 1, 0
    p = torch.stack(real).softmax(-1)
    expected = float(-(p * p.log()).sum())
    torch.testing.assert_close(load.entropy, f64([expected, expected]), atol=1e-6, rtol=0)


def test_counting_needs_no_gradient() -> None:
    logits = torch.randn(2, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    load = RouterLoad.of((logits,), torch.ones(1, 2, dtype=torch.bool), SimpleNamespace(top_k=1))
    assert not load.entropy.requires_grad


def test_no_tokens_no_numbers() -> None:
    logits = torch.zeros(2, 4)
    load = RouterLoad.of((logits,), torch.zeros(1, 2, dtype=torch.bool), SimpleNamespace(top_k=1))
    assert load.values() == {}
    seen = RouterLoad.from_probs([torch.full((1, 4), 0.25)], [torch.tensor([[1]])])
    assert load.combine(seen).values() == seen.values()


def test_tokens_that_stand_for_several_count_several_times() -> None:
    """Weights 3, 0 and 1: as if the first token were there three times and the second not at all."""
    logits = torch.tensor([[2.0, 0.0, 1.0], [0.0, 5.0, 0.0], [0.0, 1.0, 3.0]])
    config = SimpleNamespace(num_experts_per_tok=2)
    weighted = RouterLoad.of((logits,), torch.tensor([3, 0, 1]), config)
    repeated = RouterLoad.of((logits[[0, 0, 0, 2]],), torch.ones(4), config)
    torch.testing.assert_close(weighted.assignments, repeated.assignments)
    torch.testing.assert_close(weighted.entropy, repeated.entropy)
    assert float(weighted.tokens) == float(repeated.tokens) == 4.0
    assert weighted.assignments.tolist() == [[3.0, 1.0, 4.0]]


def test_balance_loss_by_hand() -> None:
    """Two layers, two experts, top 1, weights 1 and 3; probabilities (3/4, 1/4), (1/2, 1/2) | (1/4, 3/4), (3/4, 1/4).

    Sent: expert 0 gets 1 + 3 + 0 + 3 of 8 (ties go to the first), expert 1 the other 1. Mean probability of expert 0:
    (0.75 + 3 * 0.5 + 0.25 + 3 * 0.75) / 8 = 0.59375. Loss 2 * (7/8 * 0.59375 + 1/8 * 0.40625) = 1.140625.
    """
    probs = torch.tensor([[[0.75, 0.25], [0.5, 0.5]], [[0.25, 0.75], [0.75, 0.25]]], dtype=torch.float64)
    layers = [layer.log().requires_grad_() for layer in probs]
    config, weights = SimpleNamespace(num_experts_per_tok=1), torch.tensor([1, 3])
    loss = balance_loss(tuple(layers), weights, config)
    assert float(loss) == pytest.approx(1.140625)
    # d loss / d mean_e = 2 share_e; through the softmax of token i: w_i / 8 * p (g - p . g) with g = 2 share.
    gradient = torch.autograd.grad(loss, layers)
    g = torch.tensor([1.75, 0.25], dtype=torch.float64)
    expected = torch.tensor([1.0, 3.0]).view(1, 2, 1) / 8 * probs * (g - (probs * g).sum(-1, keepdim=True))
    torch.testing.assert_close(torch.stack(gradient), expected)


def test_balance_loss_at_perfect_balance_is_top_k_and_padding_does_not_count() -> None:
    logits = torch.tensor([[9.0, 8.0, 0.0, 0.0], [0.0, 0.0, 9.0, 8.0], [9.0, 0.0, 0.0, 8.0]])
    even = torch.zeros(4, 4)
    config = SimpleNamespace(num_experts_per_tok=2)
    assert float(balance_loss((even,), torch.ones(4), config)) == pytest.approx(2.0)
    real = balance_loss((logits[:2],), torch.ones(2), config)
    assert float(balance_loss((logits,), torch.tensor([1, 1, 0]), config)) == pytest.approx(float(real))
    # One token alone, p = (3/4, 1/4), top 1: 2 * 1 * 3/4.
    one = torch.tensor([[math.log(3.0), 0.0]])
    assert float(balance_loss((one,), torch.ones(1), SimpleNamespace(top_k=1))) == pytest.approx(1.5)
    # Nothing real at all is 0, not NaN; layers may come as [N, S, experts].
    assert float(balance_loss((logits,), torch.zeros(3), config)) == 0.0
    assert float(balance_loss((logits[:2].view(1, 2, 4),), torch.ones(2), config)) == pytest.approx(float(real))
