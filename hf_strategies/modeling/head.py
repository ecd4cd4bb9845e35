"""Log-probabilities of given tokens straight from hidden states, without keeping logits.

    d logp(y) / d h = (W[y] - softmax(z) W) / T,   z = W h / T

is one vector per token. With a frozen head it is computed in the forward pass, while the logits of a chunk of
positions are there anyway, and kept; the backward pass is a product with it. A trained head needs gradients of its
own: its chunks are computed again in the backward pass. Either way one chunk of logits exists at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from hf_strategies import functional as f

# Logits of this many positions exist at a time.
POSITIONS_PER_CHUNK = 256


@dataclass(frozen=True)
class LogitShape:
    """What a model does to the output of its head.

    Attributes:
        scale: factor of the logits, 1 / temperature included.
        softcap: logits become cap * tanh(logits / cap) before the temperature divides them; None for most.
        inner_scale: factor before the cap.
    """

    scale: float = 1.0
    softcap: float | None = None
    inner_scale: float = 1.0

    @classmethod
    def of(cls, config: Any, temperature: float) -> LogitShape:
        """Read a model's configuration: Gemma caps its logits, Granite and Cohere scale them."""
        text = config.get_text_config()
        inner = float(getattr(text, "logit_scale", None) or 1.0) / float(getattr(text, "logits_scaling", None) or 1.0)
        return cls(1.0 / temperature, getattr(text, "final_logit_softcapping", None), inner)

    def apply(self, logits: Tensor) -> Tensor:
        """Logits of the distribution that is scored; half precision is raised to float32."""
        logits = f.at_least_float32(logits)
        if self.inner_scale != 1.0:
            logits = logits * self.inner_scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits * self.scale if self.scale != 1.0 else logits

    def slope(self, shaped: Tensor) -> Tensor | float:
        """Derivative of `apply` where it returned ``shaped``."""
        if self.softcap is None:
            return self.inner_scale * self.scale
        return (1.0 - (shaped / (self.scale * self.softcap)).square()) * (self.inner_scale * self.scale)


@dataclass
class TokenScores:
    """Numbers of M scored tokens.

    Attributes:
        logprobs: [M], attached.
        entropy: [M], detached; None unless asked for.
        vocab_mean: [M] mean log-probability of all V tokens, attached; None unless asked for.
    """

    logprobs: Tensor
    entropy: Tensor | None = None
    vocab_mean: Tensor | None = None


def score_logits(logits: Tensor, targets: Tensor, *, entropy: bool, vocab_mean: bool) -> TokenScores:
    """Scores from shaped logits [M, V]: the plain way, and the oracle of the others."""
    scores = TokenScores(f.token_logprobs(logits, targets))
    if entropy:
        with torch.no_grad():
            scores.entropy = f.entropy_from_logits(logits)
    if vocab_mean:
        scores.vocab_mean = logits.mean(dim=-1) - logits.logsumexp(dim=-1)
    return scores


class SavedDirection(torch.autograd.Function):
    """Log-probability and entropy under a frozen head, with the gradient's direction kept from the forward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, shape: LogitShape, keep: bool
    ) -> tuple[Tensor, Tensor]:
        """Scores of one chunk: hidden [M, E], weight [V, E], bias [V] or None, targets [M] -> two [M]."""
        logits = shape.apply(linear(hidden, weight, bias))
        slope = shape.slope(logits) if keep else None
        # In place: passes over [chunk, V] are what costs here beside the two products.
        logged = logits.sub_(logits.logsumexp(dim=-1, keepdim=True))
        logprobs = logged.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        probs = logged.exp()
        entropy = -torch.bmm(probs.unsqueeze(1), logged.unsqueeze(2)).flatten()
        if slope is not None:
            pull = weight[targets]
            if isinstance(slope, Tensor):
                pull = slope.gather(-1, targets.unsqueeze(-1)) * pull
                probs = probs.mul_(slope)
            direction = pull - linear(probs.to(weight.dtype), weight.t())
            if not isinstance(slope, Tensor):
                direction = direction * slope
            ctx.save_for_backward(direction.to(hidden.dtype))
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> Any:
        """Gradient of the hidden states alone."""
        (direction,) = ctx.saved_tensors
        grad = grad_logprobs.unsqueeze(-1) * direction
        return grad.to(direction.dtype), None, None, None, None, None


def score_hidden(
    head: nn.Linear, hidden: Tensor, targets: Tensor, shape: LogitShape, *, entropy: bool, vocab_mean: bool
) -> TokenScores:
    """Scores of M tokens, a chunk of positions at a time.

    Args:
        head: the LM head.
        hidden: [M, E].
        targets: [M] long.
        shape: see `LogitShape`.
        entropy: also return entropies.
        vocab_mean: also return the vocabulary's mean log-probability.
    """
    trained = head.weight.requires_grad or (head.bias is not None and head.bias.requires_grad)
    grad = torch.is_grad_enabled()

    def plain(hidden: Tensor, targets: Tensor) -> tuple[Tensor | None, ...]:
        logits = shape.apply(linear(hidden, head.weight, head.bias))
        scores = score_logits(logits, targets, entropy=entropy, vocab_mean=vocab_mean)
        return scores.logprobs, scores.entropy, scores.vocab_mean

    def chunk_scores(hidden: Tensor, targets: Tensor) -> tuple[Tensor | None, ...]:
        if not vocab_mean and not trained:
            keep = grad and hidden.requires_grad
            return SavedDirection.apply(hidden, head.weight, head.bias, targets, shape, keep)
        if grad:
            return checkpoint(plain, hidden, targets, use_reentrant=False)
        return plain(hidden, targets)

    parts = [
        chunk_scores(h, t)
        for h, t in zip(hidden.split(POSITIONS_PER_CHUNK), targets.split(POSITIONS_PER_CHUNK), strict=True)
    ]
    columns = [None if column[0] is None else torch.cat(column) for column in zip(*parts, strict=True)]  # type: ignore[arg-type]
    logprobs, entropies, *rest = columns
    assert logprobs is not None
    return TokenScores(logprobs, entropies if entropy else None, rest[0] if rest else None)


def fusible(head: Any) -> bool:
    """Whether a head is a plain linear layer, whose output is a product with its weight and nothing else."""
    return type(head) is nn.Linear


@contextmanager
def scoring(causal_lm: Any, score: Callable[[Tensor], TokenScores]) -> Iterator[None]:
    """Inside this context the model's output has the fields of `TokenScores` instead of logits.

    The head is replaced where it stands, inside the model's own forward, so that wrappers which gather weights or
    watch outputs (ZeRO, DDP) see an ordinary call.

    Args:
        causal_lm: the model whose head it is, not a wrapper.
        score: what is done with the hidden states of the kept positions.
    """
    head = causal_lm.get_output_embeddings()
    result: list[TokenScores] = []

    def scored(hidden: Tensor) -> Tensor:
        result.append(score(hidden))
        return hidden[..., :1]  # stands for the logits; nobody reads it

    def replace_logits(module: nn.Module, args: Any, output: Any) -> dict[str, Any]:
        scores = result.pop()
        fields = {name: value for name, value in output.items() if name != "logits"}
        return {
            **fields,
            "logprobs": scores.logprobs,
            "entropy": scores.entropy,
            "vocab_mean": scores.vocab_mean,
        }

    before = head.__dict__.get("forward")
    head.forward = scored
    handle = causal_lm.register_forward_hook(replace_logits)
    try:
        yield
    finally:
        handle.remove()
        if before is None:
            del head.forward
        else:
            head.forward = before
