"""Batches and policies for losses, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_strategies.batch import Batch
from hf_strategies.policy_output import PolicyOutput
from hf_strategies.stats import Extreme, Mean
from hf_strategies.strategies import Strategy

NAN, INF = float("nan"), float("inf")
GARBAGE = (NAN, INF, -INF, 1e6)


def booleans(rows: Sequence[Sequence[int]] | Tensor) -> Tensor:
    """A mask from ones and zeros."""
    return torch.as_tensor(rows).bool()


def batch_of(mask: Tensor, group: Sequence[int] | Tensor | None = None, **tensors: Tensor | None) -> Batch:
    """A batch for a loss: prompts of one token, a completion of one number per token (0 is padding).

    Args:
        mask: [N, C] bool, tokens that train; a hole between them is a token that is seen but not trained.
        group: [N]; every row its own group when left out.
        tensors: further fields.
    """
    n, c = mask.shape
    real = mask.flip(-1).cummax(dim=-1).values.flip(-1) if c else mask
    ids = torch.arange(1, n * c + 1).view(n, c)
    return Batch(
        prompt_ids=torch.ones(n, 1, dtype=torch.long),
        prompt_mask=torch.ones(n, 1, dtype=torch.bool),
        completion_ids=torch.where(real, ids, 0),
        completion_mask=real,
        loss_mask=mask,
        group=torch.arange(n) if group is None else torch.as_tensor(group),
        **tensors,  # type: ignore[arg-type]
    )


def policy_from(table: Tensor, batch: Batch) -> PolicyOutput:
    """A policy whose numbers are looked up by token id, so that its gradient can be compared between batches.

    Args:
        table: [3, tokens]: log-probabilities, values and vocabulary means.
        batch: any batch.
    """
    logprobs, values, vocab_mean = (row[batch.completion_ids] for row in table)
    return PolicyOutput(logprobs=logprobs, values=values, vocab_mean=vocab_mean)


def number(metric: Mean | Extreme | Any) -> float:
    """What is logged for a statistic."""
    return float(metric.value) if isinstance(metric, Extreme) else float(metric.total) / float(metric.count)


def declared(strategy: Strategy) -> set[str]:
    """Names of the switches that a strategy has on."""
    names = (
        "needs_rewards",
        "needs_critic",
        "needs_old_logprobs",
        "needs_reference",
        "needs_reward_std",
        "keep_groups",
        "packed",
        "dropout",
    )
    return {name for name in names if getattr(strategy, name)} | set(strategy.reads) - {"entropy"}


def close(actual: Tensor, expected: Any, atol: float = 1e-12, rtol: float = 1e-10) -> None:
    """Equal numbers and shapes, in the precision of ``actual``; NaN equals NaN."""
    expected = torch.as_tensor(expected, dtype=actual.dtype)
    torch.testing.assert_close(actual.detach(), expected, atol=atol, rtol=rtol, equal_nan=True)
