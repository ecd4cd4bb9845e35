"""The head that keeps no logits, against the one that does."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from conftest import make_model
from torch import Tensor, nn

from hf_strategies.modeling import head as head_module
from hf_strategies.modeling.head import EXTRAS, LogitShape, fusible, score_hidden, score_logits, scoring

SHAPES = {
    "plain": LogitShape(),
    "temperature": LogitShape(1 / 0.7),
    "capped": LogitShape(1 / 0.7, softcap=1.5, inner_scale=0.5),
}


def setup(bias: bool, trained: bool, dtype: torch.dtype = torch.float64) -> tuple[nn.Linear, Tensor, Tensor]:
    """A head, hidden states of 5 tokens that want gradients, and their targets."""
    torch.manual_seed(0)
    head = nn.Linear(4, 7, bias=bias, dtype=dtype).requires_grad_(trained)
    return head, torch.randn(5, 4, dtype=dtype, requires_grad=True), torch.tensor([6, 0, 3, 3, 1])


def results(
    head: nn.Linear, hidden: Tensor, targets: Tensor, shape: LogitShape, plain: bool, wanted: tuple[str, ...]
) -> Any:
    """Scores, and gradients of a weighted sum of them."""
    if plain:
        logits = shape.apply(head(hidden))
        scores = score_logits(logits, targets, wanted)
    else:
        scores = score_hidden(head, hidden, targets, shape, wanted)
    loss = (scores.logprobs * torch.arange(1.0, 6.0)).sum()
    if scores.vocab_mean is not None:
        loss = loss + (scores.vocab_mean * torch.arange(5.0, 0.0, -1.0)).sum()
    wrt = [hidden, *(p for p in head.parameters() if p.requires_grad)]
    return scores, torch.autograd.grad(loss, wrt)


@pytest.mark.parametrize("chunk", [2, 256])
@pytest.mark.parametrize("vocab_mean", [False, True])
@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_equals_the_plain_head(
    shape: LogitShape, bias: bool, trained: bool, vocab_mean: bool, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gradients, of the weights too, in double precision; chunks that do not divide the tokens."""
    monkeypatch.setattr(head_module, "POSITIONS_PER_CHUNK", chunk)
    head, hidden, targets = setup(bias, trained)
    wanted = tuple(name for name in EXTRAS if vocab_mean or name != "vocab_mean")
    expected, expected_gradients = results(head, hidden, targets, shape, plain=True, wanted=wanted)
    got, got_gradients = results(head, hidden, targets, shape, plain=False, wanted=wanted)
    assert (got.vocab_mean is not None) is vocab_mean
    for name in ("logprobs", *EXTRAS):
        torch.testing.assert_close(getattr(got, name), getattr(expected, name), atol=1e-12, rtol=1e-12)
    for mine, theirs in zip(got_gradients, expected_gradients, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_gradcheck(shape: LogitShape) -> None:
    head, hidden, targets = setup(bias=True, trained=False)
    assert torch.autograd.gradcheck(lambda h: score_hidden(head, h, targets, shape).logprobs, (hidden,))


def test_by_hand() -> None:
    """W = [[0], [ln 3]], h = 1, y = 1: log p = ln 3/4, gradient W[1] - (1/4 * 0 + 3/4 ln 3) = ln 3 / 4."""
    head = nn.Linear(1, 2, bias=False, dtype=torch.float64).requires_grad_(False)
    head.weight.copy_(torch.tensor([[0.0], [3.0]]).clamp(min=1).log())
    hidden = torch.ones(1, 1, dtype=torch.float64, requires_grad=True)
    scores = score_hidden(head, hidden, torch.tensor([1]), LogitShape(), ("entropy",))
    scores.logprobs.sum().backward()
    assert float(scores.logprobs) == pytest.approx(-0.2876821, abs=1e-6)
    assert float(hidden.grad) == pytest.approx(0.2746531, abs=1e-6)
    # -(1/4 ln 1/4 + 3/4 ln 3/4)
    assert float(scores.entropy) == pytest.approx(0.5623351, abs=1e-6)


@pytest.mark.parametrize(
    "wanted", [EXTRAS, [name for name in EXTRAS if name != "vocab_mean"]], ids=["all", "detached"]
)
@pytest.mark.parametrize("plain", [False, True])
def test_extras_by_hand(plain: bool, wanted: list[str]) -> None:
    """Two distributions: (3/4, 1/4) scored at its likelier token, (1/2, 1/2) where a tie is as good as the best."""
    head = nn.Linear(1, 2, bias=False, dtype=torch.float64).requires_grad_(False)
    head.weight.copy_(torch.tensor([[1.0], [0.0]]))
    hidden = torch.tensor([[3.0], [3.0], [1.0]], dtype=torch.float64).log()
    targets = torch.tensor([0, 1, 1])
    scores = (
        score_logits(head(hidden), targets, wanted)
        if plain
        else score_hidden(head, hidden, targets, LogitShape(), wanted)
    )
    assert scores.correct.tolist() == [1.0, 0.0, 1.0]
    assert scores.greedy.tolist() == [0, 0, 0]
    # 9/16 + 1/16, 1/4 + 1/4
    assert scores.log_collision.exp().tolist() == pytest.approx([0.625, 0.625, 0.5])
    # Logits ln 3, 0 | 0, 0.
    assert scores.mean_logit.tolist() == pytest.approx([math.log(3) / 2, math.log(3) / 2, 0.0])
    if "vocab_mean" in wanted:
        assert scores.vocab_mean.exp().tolist() == pytest.approx([(3 / 16) ** 0.5, (3 / 16) ** 0.5, 0.5])


def test_no_direction_without_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scoring alone skips the second product."""
    head, hidden, targets = setup(bias=False, trained=False)
    kept: list[bool] = []
    original = head_module.SavedDirection.apply
    monkeypatch.setattr(
        head_module.SavedDirection, "apply", lambda *args: kept.append(args[-2]) or original(*args), raising=False
    )
    with torch.no_grad():
        score_hidden(head, hidden, targets, LogitShape())
    score_hidden(head, hidden.detach(), targets, LogitShape())
    score_hidden(head, hidden, targets, LogitShape())
    assert kept == [False, False, True]


@pytest.mark.parametrize("wanted", [("entropy", "correct"), ("entropy", "vocab_mean")])
@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_no_more_than_a_chunk_of_logits_is_saved(
    trained: bool, wanted: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits for the backward pass has the hidden states' width, not the vocabulary's."""
    monkeypatch.setattr(head_module, "POSITIONS_PER_CHUNK", 2)
    head, hidden, targets = setup(bias=False, trained=trained)
    sizes: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel() if tensor.data_ptr() != head.weight.data_ptr() else 0)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        score_hidden(head, hidden, targets, LogitShape(), wanted)
    assert max(sizes) <= 2 * 4 if not trained else max(sizes) <= 5 * 4


def test_half_precision_is_raised() -> None:
    """Logits of a bfloat16 head are turned into log-probabilities in float32."""
    head, hidden, targets = setup(bias=False, trained=False, dtype=torch.bfloat16)
    scores = score_hidden(head, hidden, targets, LogitShape(), ("entropy",))
    assert scores.logprobs.dtype == torch.float32
    expected = (hidden @ head.weight.t()).float().log_softmax(dim=-1).gather(1, targets.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(scores.logprobs, expected, atol=1e-6, rtol=1e-6)
    scores.logprobs.sum().backward()
    assert hidden.grad.dtype == torch.bfloat16


def test_only_a_plain_linear_layer_is_fused() -> None:
    class Scaled(nn.Linear):
        pass

    assert fusible(nn.Linear(2, 3))
    assert not fusible(Scaled(2, 3))
    assert not fusible(nn.Identity())
    assert not fusible(None)


def test_model_is_put_back() -> None:
    """Whatever happens inside, the head is the model's own again afterwards."""
    model = make_model("llama")
    ids = torch.tensor([[5, 6, 7]])
    before = model(ids).logits

    def refuse(hidden: Tensor) -> Any:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"), scoring(model, refuse):
        model(ids)
    after = model(ids)
    torch.testing.assert_close(after.logits, before, atol=0, rtol=0)
    assert "forward" not in model.lm_head.__dict__
