"""Log-probabilities of given tokens straight from hidden states, without keeping logits.

    d logp(y) / d h = (W[y] - softmax(z) W) / T,   z = W h / T

is one vector per token. With a frozen head it is computed in the forward pass, while the logits of a chunk of
positions are there anyway, and kept; the backward pass is a product with it. A trained head needs gradients of its
own: its chunks are computed again in the backward pass. Either way one chunk of logits exists at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
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


# What can be asked for beside log-probabilities; only the vocabulary's mean carries a gradient.
EXTRAS = ("entropy", "vocab_mean", "mean_logit", "log_collision", "correct", "greedy")


@dataclass
class TokenScores:
    """Numbers of M scored tokens; what was not asked for is None.

    Attributes:
        logprobs: [M], attached.
        entropy: [M] of the distribution that each token was drawn from, in nats, detached.
        vocab_mean: [M] mean log-probability of all V tokens, attached.
        mean_logit: [M] mean of the logits of all V tokens, detached.
        log_collision: [M] logarithm of the sum of all V squared probabilities, detached.
        correct: [M] 1.0 where no token is likelier than the scored one, else 0.0.
        greedy: [M] long, the likeliest token.
    """

    logprobs: Tensor
    entropy: Tensor | None = None
    vocab_mean: Tensor | None = None
    mean_logit: Tensor | None = None
    log_collision: Tensor | None = None
    correct: Tensor | None = None
    greedy: Tensor | None = None

    @classmethod
    def cat(cls, parts: Sequence[TokenScores]) -> TokenScores:
        """Scores of parts one after another."""
        columns = {name: [getattr(part, name) for part in parts] for name in ("logprobs", *EXTRAS)}
        return cls(**{name: torch.cat(column) for name, column in columns.items() if column[0] is not None})


def score_logits(logits: Tensor, targets: Tensor, wanted: Collection[str] = ()) -> TokenScores:
    """Scores from shaped logits [M, V]: the plain way, and the oracle of the others."""
    scores = TokenScores(f.token_logprobs(logits, targets))
    if "vocab_mean" in wanted:
        scores.vocab_mean = logits.mean(dim=-1) - logits.logsumexp(dim=-1)
    with torch.no_grad():
        if "entropy" in wanted:
            scores.entropy = f.entropy_from_logits(logits)
        if "mean_logit" in wanted:
            scores.mean_logit = logits.mean(dim=-1)
        if "log_collision" in wanted:
            scores.log_collision = (2 * logits).logsumexp(dim=-1) - 2 * logits.logsumexp(dim=-1)
        if "correct" in wanted:
            scores.correct = _is_greatest(logits, targets)
        if "greedy" in wanted:
            scores.greedy = logits.argmax(dim=-1)
    return scores


def _is_greatest(logits: Tensor, targets: Tensor) -> Tensor:
    at_target = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return (at_target >= logits.amax(dim=-1)).to(logits.dtype)  # several times faster than argmax


class SavedDirection(torch.autograd.Function):
    """Log-probability and detached extras under a frozen head, with the gradient's direction kept from forward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        shape: LogitShape,
        keep: bool,
        wanted: Sequence[str],
    ) -> tuple[Tensor, ...]:
        """Scores of one chunk: hidden [M, E], weight [V, E], bias [V] or None, targets [M] -> [M] each."""
        logits = shape.apply(linear(hidden, weight, bias))
        slope = shape.slope(logits) if keep else None
        extras: dict[str, Tensor] = {}
        if "mean_logit" in wanted:
            extras["mean_logit"] = logits.mean(dim=-1)
        # In place: passes over [chunk, V] are what costs here beside the two products.
        logged = logits.sub_(logits.logsumexp(dim=-1, keepdim=True))
        logprobs = logged.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        if "correct" in wanted:
            extras["correct"] = _is_greatest(logged, targets)
        if "greedy" in wanted:
            extras["greedy"] = logged.argmax(dim=-1)
        if keep or {"entropy", "log_collision"} & set(wanted):
            probs = logged.exp()
            if "entropy" in wanted:
                extras["entropy"] = -torch.bmm(probs.unsqueeze(1), logged.unsqueeze(2)).flatten()
            if "log_collision" in wanted:
                extras["log_collision"] = torch.bmm(probs.unsqueeze(1), probs.unsqueeze(2)).flatten().log()
        if slope is not None:
            pull = weight[targets]
            if isinstance(slope, Tensor):
                pull = slope.gather(-1, targets.unsqueeze(-1)) * pull
                probs = probs.mul_(slope)
            direction = pull - linear(probs.to(weight.dtype), weight.t())
            if not isinstance(slope, Tensor):
                direction = direction * slope
            ctx.save_for_backward(direction.to(hidden.dtype))
        ctx.mark_non_differentiable(*extras.values())
        return logprobs, *(extras[name] for name in wanted)

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, *unused: Tensor) -> Any:
        """Gradient of the hidden states alone."""
        (direction,) = ctx.saved_tensors
        grad = grad_logprobs.unsqueeze(-1) * direction
        return grad.to(direction.dtype), None, None, None, None, None, None


def score_hidden(
    head: nn.Linear, hidden: Tensor, targets: Tensor, shape: LogitShape, wanted: Collection[str] = ()
) -> TokenScores:
    """Scores of M tokens, a chunk of positions at a time.

    Args:
        head: the LM head.
        hidden: [M, E].
        targets: [M] long.
        shape: see `LogitShape`.
        wanted: what to return beside log-probabilities, of `EXTRAS`.
    """
    trained = head.weight.requires_grad or (head.bias is not None and head.bias.requires_grad)
    grad = torch.is_grad_enabled()
    names = [name for name in EXTRAS if name in wanted]

    def plain(hidden: Tensor, targets: Tensor) -> TokenScores:
        return score_logits(shape.apply(linear(hidden, head.weight, head.bias)), targets, names)

    def chunk_scores(hidden: Tensor, targets: Tensor) -> TokenScores:
        if "vocab_mean" not in names and not trained:
            keep = grad and hidden.requires_grad
            logprobs, *extras = SavedDirection.apply(hidden, head.weight, head.bias, targets, shape, keep, names)
            return TokenScores(logprobs, **dict(zip(names, extras, strict=True)))
        return checkpoint(plain, hidden, targets, use_reentrant=False) if grad else plain(hidden, targets)

    chunks = zip(hidden.split(POSITIONS_PER_CHUNK), targets.split(POSITIONS_PER_CHUNK), strict=True)
    return TokenScores.cat([chunk_scores(h, t) for h, t in chunks])


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
        return fields | {name: values for name, values in vars(scores).items() if values is not None}

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
