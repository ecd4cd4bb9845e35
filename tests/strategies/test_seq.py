"""Continued pretraining: the objective of sft over whole documents."""

from __future__ import annotations

import pytest
import torch
from conftest import f64
from pure import batch_of, booleans, close, declared

from hf_strategies import Batch, PolicyOutput, Row, make_strategy
from hf_strategies.strategies import Seq, SeqOptions


def test_every_token_but_the_first_trains() -> None:
    # Documents of 4 and 2 tokens as rows: first token | rest. (1 + 2 + 3 + 6) / 4 tokens.
    batch = Batch.from_rows([Row([5], [6, 7, 8]), Row([9], [10], group=1)])
    logprobs = f64([[-1.0, -2.0, -3.0], [-6.0, 1e6, 1e6]]).requires_grad_()
    strategy = make_strategy("seq")
    items = strategy.count_items(batch)
    assert items == 4
    loss, metrics = strategy.loss(PolicyOutput(logprobs), batch, items)
    close(loss, 3.0)
    assert torch.equal(torch.autograd.grad(loss, logprobs)[0], f64([[-0.25] * 3, [-0.25, 0.0, 0.0]]))
    assert list(metrics) == ["task_loss"]


def test_label_smoothing_by_hand() -> None:
    # 0.75 * 2 + 0.25 * 4
    strategy = make_strategy("seq", label_smoothing=0.25)
    policy = PolicyOutput(f64([[-2.0]]), vocab_mean=f64([[-4.0]]))
    loss, _ = strategy.loss(policy, batch_of(booleans([[1]])), torch.tensor(1.0))
    close(loss, 2.5)


def test_what_it_declares() -> None:
    strategy = make_strategy("seq")
    assert isinstance(strategy, Seq)
    assert type(strategy.options) is SeqOptions
    assert declared(strategy) == {"packed", "dropout", "correct"}
    with pytest.raises(ValueError, match=r"^label_smoothing=-1: allowed is a number >= 0"):
        SeqOptions(label_smoothing=-1)
