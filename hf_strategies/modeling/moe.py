"""Mixtures of experts: what the router did, as numbers that add up over micro-batches and processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


def is_mixture_of_experts(causal_lm: nn.Module) -> bool:
    """Whether the model has a router whose logits and aux loss can be asked for."""
    return hasattr(causal_lm.config, "output_router_logits")


def experts_per_token(config: Any) -> int:
    """K of top-K routing."""
    for name in ("num_experts_per_tok", "num_experts_per_token", "top_k"):
        if getattr(config, name, None):
            return int(getattr(config, name))
    raise ValueError(f"{type(config).__name__} does not say how many experts a token goes to")


def balance_loss(router_logits: tuple[Tensor, ...], weights: Tensor, config: Any) -> Tensor:
    """Load-balancing loss of the Switch Transformer (arXiv 2101.03961), as transformers computes it.

    E * sum_e (share of tokens sent to e) * (mean probability of e), over the tokens of all layers; summed over the K
    choices it equals K at perfect balance.

    Args:
        router_logits: per layer, [tokens, E].
        weights: [tokens], how often a token counts.
        config: the model's configuration, for K.

    Returns:
        Scalar, attached through the probabilities.
    """
    probs = torch.cat([logits.reshape(-1, logits.shape[-1]) for logits in router_logits]).softmax(dim=-1)
    count = weights.to(probs.dtype).repeat(len(router_logits)).unsqueeze(-1)
    total = count.sum().clamp(min=1.0)
    chosen = probs.topk(experts_per_token(config), dim=-1).indices
    sent = torch.zeros_like(probs).scatter(-1, chosen, 1.0)
    share, mean = (sent * count).sum(dim=0) / total, (probs * count).sum(dim=0) / total
    return probs.shape[-1] * (share * mean).sum()


@dataclass(frozen=True)
class RouterLoad:
    """Counts from which the ``moe/*`` diagnostics follow.

    Attributes:
        assignments: [layers, experts] float64, how often an expert was among the top K of a real token.
        entropy: [layers] float64, sum over real tokens of the entropy of the router's distribution, in nats.
        tokens: scalar float64, real tokens.
    """

    assignments: Tensor
    entropy: Tensor
    tokens: Tensor

    @classmethod
    def of(cls, router_logits: tuple[Tensor, ...], weights: Tensor, config: Any) -> RouterLoad:
        """Count one forward pass.

        Args:
            router_logits: per layer, [tokens, experts] (or [N, S, experts]).
            weights: [tokens] or [N, S], how often a token counts: 0 for padding, which is routed too.
            config: the model's configuration, for K.
        """
        weights = weights.flatten()
        counted = weights > 0
        top_k = experts_per_token(config)
        with torch.no_grad():
            layers = [logits.reshape(-1, logits.shape[-1])[counted].float() for logits in router_logits]
            probs = [logits.softmax(dim=-1) for logits in layers]
            return cls.from_probs(probs, [p.topk(top_k, dim=-1).indices for p in probs], weights[counted])

    @classmethod
    def from_probs(cls, probs: list[Tensor], chosen: list[Tensor], weights: Tensor | None = None) -> RouterLoad:
        """Count from router probabilities.

        Args:
            probs: per layer, [tokens, experts].
            chosen: per layer, [tokens, K] long, the experts each token went to.
            weights: [tokens], how often a token counts; once each when left out.
        """
        count = (torch.ones_like(probs[0][:, 0]) if weights is None else weights).double()
        assignments, entropies = [], []
        for p, index in zip(probs, chosen, strict=True):
            p = p.double()
            entropies.append((torch.special.entr(p).sum(dim=-1) * count).sum())
            repeated = count.unsqueeze(-1).expand_as(index).flatten()
            assignments.append(p.new_zeros(p.shape[-1]).index_add(0, index.flatten(), repeated))
        return cls(torch.stack(assignments), torch.stack(entropies), count.sum())

    def combine(self, other: RouterLoad) -> RouterLoad:
        """Counts of both."""
        return RouterLoad(
            self.assignments + other.assignments.to(self.assignments.device),
            self.entropy + other.entropy.to(self.entropy.device),
            self.tokens + other.tokens.to(self.tokens.device),
        )

    def values(self) -> dict[str, float]:
        """The diagnostics, averaged over layers.

        Returns:
            ``moe/router_entropy`` (nats), ``moe/dead_expert_fraction`` (experts no token went to),
            ``moe/load_imbalance_mean`` (mean over experts of |load / ideal - 1|, ideal = tokens * K / experts) and
            ``moe/load_imbalance_max`` (load of the busiest expert / ideal; 1 is perfect balance).
        """
        if float(self.tokens) == 0:
            return {}
        ideal = self.assignments.sum(dim=-1, keepdim=True) / self.assignments.shape[-1]
        load = self.assignments / ideal
        return {
            "moe/router_entropy": float((self.entropy / self.tokens).mean()),
            "moe/dead_expert_fraction": float((self.assignments == 0).double().mean()),
            "moe/load_imbalance_mean": float((load - 1).abs().mean()),
            "moe/load_imbalance_max": float(load.amax(dim=-1).mean()),
        }
