"""Supervised fine-tuning by hand."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import f64
from pure import NAN, batch_of, booleans, close, declared, number

from hf_strategies import PolicyOutput, make_strategy
from hf_strategies import functional as f
from hf_strategies.strategies import SFT, SFTOptions


def test_loss_and_gradient_by_hand() -> None:
    # Trained: 1, 2 | 4 of two rows; (1 + 2 + 4) / 3 tokens. The second row's first token is seen only.
    logprobs = f64([[-1.0, -2.0, NAN], [1e6, -4.0, NAN]]).requires_grad_()
    batch = batch_of(booleans([[1, 1, 0], [0, 1, 0]]))
    strategy = make_strategy("sft")
    assert strategy.count_items(batch) == 3
    entropy = f64([[0.5, 1.5, NAN], [NAN, 4.0, NAN]])
    correct = f64([[1.0, 0.0, 1.0], [1.0, 1.0, 1.0]])
    policy = PolicyOutput(logprobs, entropy=entropy, correct=correct)
    loss, metrics = strategy.loss(policy, batch, strategy.count_items(batch))
    close(loss, 7 / 3)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert torch.equal(gradient, f64([[-1 / 3, -1 / 3, 0.0], [0.0, -1 / 3, 0.0]]))
    # Two of the three trained tokens are the likeliest.
    assert {name: number(m) for name, m in metrics.items()} == pytest.approx(
        {"task_loss": 7 / 3, "entropy": 2.0, "mean_token_accuracy": 2 / 3}
    )


def test_dynamic_fine_tuning_by_hand() -> None:
    """Probabilities 1/2 and 1/8, of two trained tokens: (ln 2 / 2 + 3 ln 2 / 8) / 2; the weights have no gradient.

    Without the stopped gradient it would be -p (1 + log p), of another sign at p = 1/2.
    """
    ln2 = math.log(2)
    logprobs = f64([[-ln2, -3 * ln2, NAN]]).requires_grad_()
    batch = batch_of(booleans([[1, 1, 0]]))
    strategy = make_strategy("sft", loss_type="dft")
    loss, metrics = strategy.loss(PolicyOutput(logprobs), batch, strategy.count_items(batch))
    close(loss, (1 / 2 + 3 / 8) * ln2 / 2)
    assert number(metrics["task_loss"]) == pytest.approx(7 / 16 * ln2)
    close(torch.autograd.grad(loss, logprobs)[0], f64([[-1 / 4, -1 / 16, 0.0]]))


def test_dynamic_fine_tuning_pushes_logits_by_the_probability() -> None:
    """d/dz of -sg(p) log p is p (softmax - onehot), at p = 1/2 half of nll's gradient (arXiv 2508.05629)."""
    logits = torch.tensor([[[0.0, 0.0, -math.inf], [0.0, 0.0, math.log(2)]]], dtype=torch.float64).requires_grad_()
    ids, batch = torch.tensor([[0, 1]]), batch_of(booleans([[1, 1]]))
    policy = PolicyOutput(f.token_logprobs(logits, ids))
    loss, _ = make_strategy("sft", loss_type="dft").loss(policy, batch, torch.tensor(1.0))
    (gradient,) = torch.autograd.grad(loss, logits)
    close(gradient, f64([[[-1 / 4, 1 / 4, 0.0], [1 / 16, -3 / 16, 1 / 8]]]))


@pytest.mark.parametrize("name", ["sft", "seq"])
def test_loss_types(name: str) -> None:
    with pytest.raises(ValueError, match=r"^loss_type='ntl': allowed are 'nll', 'dft'$"):
        make_strategy(name, loss_type="ntl")
    with pytest.raises(ValueError, match=r"^label_smoothing=0.1 with loss_type='dft': allowed is 0"):
        make_strategy(name, loss_type="dft", label_smoothing=0.1)


def test_only_what_is_known_is_logged() -> None:
    batch = batch_of(booleans([[1]]))
    _, metrics = make_strategy("sft").loss(PolicyOutput(f64([[-1.0]])), batch, torch.tensor(1.0))
    assert list(metrics) == ["task_loss"]


def test_the_step_is_the_divisor() -> None:
    """Pitfall D-71: divided by the count that is given, not by this micro-batch's."""
    loss, metrics = make_strategy("sft").loss(
        PolicyOutput(f64([[-3.0]])), batch_of(booleans([[1]])), torch.tensor(12.0)
    )
    close(loss, 0.25)
    # Logged is the mean of this part: 3, with the weight of its one token.
    assert metrics["task_loss"].total == 3.0  # type: ignore[union-attr]
    assert metrics["task_loss"].count == 1  # type: ignore[union-attr]


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
def test_loss_is_that_of_cross_entropy_over_logits(smoothing: float) -> None:
    """Pitfall D-72: value and gradient of the logits, with ignored positions, under label smoothing."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 4, 11, generator=generator, dtype=torch.float64).requires_grad_()
    ids = torch.randint(0, 11, (3, 4), generator=generator)
    mask = booleans([[1, 1, 0, 1], [0, 0, 1, 0], [0, 0, 0, 0]])
    expected = F.cross_entropy(logits.flatten(0, 1), ids.masked_fill(~mask, -100).flatten(), label_smoothing=smoothing)
    strategy = make_strategy("sft", label_smoothing=smoothing)
    vocab_mean = logits.log_softmax(-1).mean(-1) if "vocab_mean" in strategy.reads else None
    batch = batch_of(mask)
    policy = PolicyOutput(f.token_logprobs(logits, ids), vocab_mean=vocab_mean)
    loss, _ = strategy.loss(policy, batch, strategy.count_items(batch))
    close(loss, expected.item())
    close(torch.autograd.grad(loss, logits)[0], torch.autograd.grad(expected, logits)[0])


def test_what_it_declares() -> None:
    strategy = make_strategy("sft")
    assert isinstance(strategy, SFT)
    assert declared(strategy) == {"dropout", "correct"}
    assert declared(make_strategy("sft", label_smoothing=0.1)) == {"dropout", "correct", "vocab_mean"}
    assert strategy.min_group_size == 1


def test_rows_are_neither_chosen_nor_scored() -> None:
    batch = batch_of(booleans([[1, 1], [1, 0]]))
    strategy = make_strategy("sft")
    assert strategy.select(batch) == (batch, {})
    assert strategy.assign_credit(batch) == (batch, {})


@pytest.mark.parametrize("value", [-0.1, 1.0, 1.5, NAN, math.inf, True, "0.1", None])
def test_label_smoothing_values(value: object) -> None:
    with pytest.raises(ValueError, match=rf"^label_smoothing={value!r}: allowed is a number >= 0"):
        SFTOptions(label_smoothing=value)  # type: ignore[arg-type]


def test_ends_of_the_range() -> None:
    with pytest.raises(ValueError, match=r"^label_smoothing=1.0: allowed is a number >= 0.0 and < 1.0$"):
        SFTOptions(label_smoothing=1.0)
    assert [SFTOptions(label_smoothing=value).label_smoothing for value in (0, 0.99)] == [0, 0.99]
