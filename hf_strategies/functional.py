"""Tensors in, tensors out: reductions, log-probabilities, ratios, divergences, surrogates, aggregation.

Nothing here knows a model, a tokenizer, a device or a process. Shapes use the legend of `hf_strategies.batch`.
Masks are bool, True = counts; whatever a masked slot holds (garbage, inf, NaN) must not matter, in the value or in the
gradient, so masked entries are replaced with ``where`` before any arithmetic instead of being multiplied by zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_strategies.stats import Extreme, Mean, Metrics

# exp(20) = 4.9e8 is far outside any trust region and far inside float32: clamping there keeps a ratio finite without
# touching a gradient that a clipped surrogate would let through.
MAX_LOG_RATIO = 20.0


# ---- masked reductions ----


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum where ``mask``; 0 (attached to the graph) where nothing is left."""
    return torch.where(mask, values, torch.zeros_like(values)).sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean where ``mask``; 0 where nothing is left."""
    return masked_sum(values, mask, dim) / mask.sum(dim).clamp(min=1)


def reduce_tokens(values: Tensor, mask: Tensor, reduction: str) -> Tensor:
    """Reduce [N, C] token values over their row.

    Args:
        values: [N, C].
        mask: [N, C] bool.
        reduction: ``none`` ([N, C], 0 where masked), ``sum`` or ``mean`` over the row's masked-in tokens ([N]; the
            mean of an empty row is 0).

    Raises:
        ValueError: another ``reduction``.
    """
    if reduction == "none":
        return torch.where(mask, values, torch.zeros_like(values))
    if reduction == "sum":
        return masked_sum(values, mask, dim=-1)
    if reduction == "mean":
        return masked_mean(values, mask, dim=-1)
    raise ValueError(f"reduction={reduction!r}: allowed are 'none', 'sum', 'mean'")


# ---- log-probabilities ----


def at_least_float32(logits: Tensor) -> Tensor:
    """Half precision raised to float32: a bfloat16 softmax over a large vocabulary loses whole digits."""
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def token_logprobs(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Log-probability of each token under the logits at its own position.

    Args:
        logits: [..., V]; see `at_least_float32`.
        token_ids: [...] long.

    Returns:
        [...] in nats.
    """
    logits = at_least_float32(logits)
    chosen = logits.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    return chosen - logits.logsumexp(dim=-1)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Entropy of softmax(logits) over the last dimension, in nats."""
    logprobs = at_least_float32(logits).log_softmax(dim=-1)
    # A token ruled out with -inf has p log p = 0, not NaN.
    return -torch.where(logprobs.isinf(), torch.zeros_like(logprobs), logprobs.exp() * logprobs).sum(dim=-1)


def smoothed_nll(logprobs: Tensor, vocab_mean: Tensor | None, label_smoothing: float) -> Tensor:
    """Cross-entropy per token with the target smoothed over the whole vocabulary.

    ``(1 - e) * -log p(y) + e * -mean_v log p(v)``: the convention of `torch.nn.functional.cross_entropy`, in which the
    target keeps its share of the spread mass.

    Args:
        logprobs: [N, C] of the target tokens.
        vocab_mean: [N, C]; needed when ``label_smoothing`` > 0.
        label_smoothing: e in [0, 1).

    Returns:
        [N, C] in nats.
    """
    if label_smoothing == 0.0:
        return -logprobs
    if vocab_mean is None:
        raise ValueError("label_smoothing > 0 needs vocab_mean")
    return -(1.0 - label_smoothing) * logprobs - label_smoothing * vocab_mean


def dynamic_nll(logprobs: Tensor, mask: Tensor) -> Tensor:
    """Negative log-likelihood weighted by the token's own probability: ``-sg(p) log p``.

    The gradient of -log p is 1 / p times that of -p, so a token the model finds unlikely pulls hardest; the weight
    cancels that (dynamic fine-tuning, Wu et al. 2025, arXiv 2508.05629).

    Args:
        logprobs: [N, C] of the target tokens.
        mask: [N, C] bool.

    Returns:
        [N, C] in nats, 0 where masked; no gradient goes through the weight.
    """
    logprobs = torch.where(mask, logprobs, torch.zeros_like(logprobs))
    return -logprobs.detach().exp() * logprobs


# ---- ratios and divergences ----


def log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Log p_new - log p_old per token, 0 where masked, clamped to +-20 (see `MAX_LOG_RATIO`)."""
    difference = torch.where(mask, logprobs - old_logprobs, torch.zeros_like(logprobs))
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def kl_divergence(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, estimator: str) -> Tensor:
    """Per-token estimate of KL(policy || reference) on tokens sampled from the policy.

    With d = log p_ref - log p: ``k1`` = -d, ``k2`` = d^2 / 2, ``k3`` = exp(d) - 1 - d (never negative)
    (Schulman 2020, http://joschu.net/blog/kl-approx.html).

    Args:
        logprobs: [N, C] of the policy.
        ref_logprobs: [N, C] of the reference.
        mask: [N, C] bool.
        estimator: ``k1``, ``k2`` or ``k3``.

    Returns:
        [N, C] in nats, 0 where masked.

    Raises:
        ValueError: another ``estimator``.
    """
    d = log_ratio(ref_logprobs, logprobs, mask)
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return d.square() / 2
    if estimator == "k3":
        # expm1 keeps the digits that exp(d) - 1 loses for the small d of an early step.
        return torch.expm1(d) - d
    raise ValueError(f"estimator={estimator!r}: allowed are 'k1', 'k2', 'k3'")


def clipped_surrogate(ratio: Tensor, advantages: Tensor, epsilon: float, epsilon_high: float) -> Tensor:
    """PPO's pessimistic objective as a loss per token: ``-min(r A, clip(r, 1 - eps, 1 + eps_high) A)``.

    Schulman et al. 2017 (arXiv 1707.06347); a wider upper bound is clip-higher of DAPO (arXiv 2503.14476).

    Args:
        ratio: p_new / p_old, broadcastable to ``advantages``.
        advantages: [N, C].
        epsilon: lower distance, >= 0.
        epsilon_high: upper distance, >= 0.

    Returns:
        [N, C].
    """
    clipped = ratio.clamp(1.0 - epsilon, 1.0 + epsilon_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


SAMPLER_CORRECTIONS = ("off", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def sampler_weights(
    old_logprobs: Tensor, sampling_logprobs: Tensor, mask: Tensor, how: str, low: float, high: float
) -> Tensor:
    """Importance weights w = p_trainer / p_sampler for tokens that another precision or engine sampled.

    Args:
        old_logprobs: [N, C] of the policy that was sampled, as the training path computes it.
        sampling_logprobs: [N, C] of the distribution that was really sampled from.
        mask: [N, C] bool.
        how: ``token_truncate``, w at most ``high`` (TIS, Yao et al. 2025); ``token_mask``, w where it lies within
            [low, high] and 0 elsewhere (IcePop); ``sequence_truncate`` and ``sequence_mask``, the same with the
            product of a row's token weights and ``high`` alone; ``off``, 1.
        low: lower bound of ``token_mask``.
        high: upper bound.

    Returns:
        [N, C], detached and finite; what stands where masked means nothing.

    Raises:
        ValueError: another ``how``.
    """
    with torch.no_grad():
        difference = log_ratio(old_logprobs, sampling_logprobs, mask)
        if how == "off":
            return torch.ones_like(difference)
        if how not in SAMPLER_CORRECTIONS:
            raise ValueError(f"sampler correction {how!r}: allowed are {SAMPLER_CORRECTIONS}")
        if how.startswith("sequence"):
            total = difference.sum(dim=-1, keepdim=True).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
            difference = torch.where(mask, total, torch.zeros_like(difference))
        weights = difference.exp()
        if how.endswith("truncate"):
            return weights.clamp(max=high)
        inside = (weights <= high) & ((weights >= low) | how.startswith("sequence"))
        return torch.where(inside, weights, torch.zeros_like(weights))


def clip_metrics(ratio: Tensor, advantages: Tensor, mask: Tensor, epsilon: float, epsilon_high: float) -> Metrics:
    """Shares of the masked-in tokens whose gradient the clip removed.

    Returns:
        ``clip_ratio/low_mean`` (ratio fell below 1 - eps where A < 0), ``clip_ratio/high_mean`` (ratio rose above
        1 + eps_high where A > 0), ``clip_ratio/region_mean`` (either), ``clip_ratio/low_min`` and
        ``clip_ratio/high_max`` (extremes of the micro-batches' means).
    """
    low = (ratio < 1.0 - epsilon) & (advantages < 0)
    high = (ratio > 1.0 + epsilon_high) & (advantages > 0)
    low_mean = Mean.of(low.to(ratio.dtype), mask)
    high_mean = Mean.of(high.to(ratio.dtype), mask)
    return {
        "clip_ratio/low_mean": low_mean,
        "clip_ratio/high_mean": high_mean,
        "clip_ratio/region_mean": Mean.of((low | high).to(ratio.dtype), mask),
        "clip_ratio/low_min": Extreme(low_mean.total / low_mean.count.clamp(min=1), "min"),
        "clip_ratio/high_max": Extreme(high_mean.total / high_mean.count.clamp(min=1), "max"),
    }


# ---- aggregation of token losses over an optimizer step ----

AGGREGATIONS = ("dapo", "grpo", "dr_grpo", "bnpo")


def count_items(mask: Tensor, how: str, max_completion_length: int) -> Tensor:
    """What a micro-batch adds to the denominator that `aggregate` divides by.

    Args:
        mask: [N, C] bool, tokens that train.
        how: one of `AGGREGATIONS`.
        max_completion_length: the constant of ``dr_grpo``.

    Returns:
        Scalar float64: tokens (dapo), rows that train (grpo), rows * max_completion_length (dr_grpo), 1 for a
        micro-batch that trains anything (bnpo).

    Raises:
        ValueError: another ``how``.
    """
    rows = mask.any(dim=-1).sum()
    if how == "dapo":
        items = mask.sum()
    elif how == "grpo":
        items = rows
    elif how == "dr_grpo":
        items = rows * max_completion_length
    elif how == "bnpo":
        items = mask.any()
    else:
        raise ValueError(f"aggregation {how!r}: allowed are {AGGREGATIONS}")
    return items.to(torch.float64)


def aggregate(token_loss: Tensor, mask: Tensor, num_items: Tensor, how: str) -> Tensor:
    """This micro-batch's share of the step's loss: a sum over its tokens, divided by a count over the whole step.

    Summed over the micro-batches and processes of an optimizer step the result does not depend on how the step was
    cut, except for ``bnpo``, a mean of micro-batch means by definition.

    Args:
        token_loss: [N, C].
        mask: [N, C] bool.
        num_items: scalar, sum of `count_items` over the optimizer step and all processes, at least 1.
        how: ``dapo`` mean over tokens (arXiv 2503.14476); ``grpo`` mean over rows of their token means
            (arXiv 2402.03300); ``dr_grpo`` sum over a constant (arXiv 2503.20783); ``bnpo`` token mean of a
            micro-batch.

    Returns:
        Scalar, attached to the graph also when nothing trains.

    Raises:
        ValueError: another ``how``.
    """
    if how not in AGGREGATIONS:
        raise ValueError(f"aggregation {how!r}: allowed are {AGGREGATIONS}")
    if how == "grpo":
        total = masked_mean(token_loss, mask, dim=-1).sum()
    elif how == "bnpo":
        total = masked_mean(token_loss, mask)
    else:
        total = masked_sum(token_loss, mask)
    return total / num_items.to(device=total.device, dtype=total.dtype)
