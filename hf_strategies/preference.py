"""Losses of preference pairs: equations on numbers, one function each, and the table of their names.

Throughout, of N pairs, x_c and x_r are ``log pi - log pi_ref`` of the chosen and the rejected completion, n_c and n_r
their trained tokens, s the logistic function, e the label smoothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LARGEST_EXPONENT = 80.0  # exp of it is finite in float32


# ---- divergences (arXiv 2309.16240): what takes the place of x ----


def divergence_score(log_ratio: Tensor, kind: str, alpha: float) -> Tensor:
    """f'(pi / pi_ref) up to a constant, from its logarithm; the reverse KL divergence gives plain DPO.

    Args:
        log_ratio: log pi - log pi_ref, any shape.
        kind: ``reverse_kl`` (log t), ``forward_kl`` (1 - 1 / t), ``js_divergence`` (log(2 t / (1 + t))) or
            ``alpha_divergence`` ((t^(alpha - 1) - 1) / (alpha - 1), log t at alpha = 1).
        alpha: of the last one.

    Raises:
        ValueError: another kind.
    """
    if kind == "reverse_kl":
        return log_ratio
    if kind == "forward_kl":
        return -torch.expm1((-log_ratio).clamp(max=LARGEST_EXPONENT))
    if kind == "js_divergence":
        return math.log(2.0) + F.logsigmoid(log_ratio)
    if kind == "alpha_divergence":
        power = alpha - 1.0
        return torch.expm1((power * log_ratio).clamp(max=LARGEST_EXPONENT)) / power if power else log_ratio
    raise ValueError(f"f_divergence_type={kind!r}: allowed are {', '.join(map(repr, DIVERGENCES))}")


DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")


# ---- losses, [N] each ----


def sigmoid(margin: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """``-(1 - e) log s(m) - e log s(-m)``; e > 0 is conservative DPO (arXiv 2305.18290, appendix of the DPO code).

    Args:
        margin: m = beta (x_c - x_r).
        label_smoothing: e, the share of pairs whose labels are thought to be wrong.
    """
    return -(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)


def robust(margin: Tensor, label_smoothing: float) -> Tensor:
    """``[-(1 - e) log s(m) + e log s(-m)] / (1 - 2 e)``: unbiased under flipped labels (arXiv 2403.00409)."""
    flipped = label_smoothing * F.logsigmoid(-margin)
    return (-(1 - label_smoothing) * F.logsigmoid(margin) + flipped) / (1 - 2 * label_smoothing)


def hinge(margin: Tensor) -> Tensor:
    """``max(0, 1 - m)`` (SLiC, arXiv 2305.10425)."""
    return torch.relu(1 - margin)


def ipo(difference: Tensor, beta: float) -> Tensor:
    """``(h - 1 / (2 beta))^2`` with h the difference of length-averaged log-ratios (arXiv 2310.12036)."""
    return (difference - 1 / (2 * beta)).square()


def exo_pair(margin: Tensor, label_smoothing: float) -> Tensor:
    """KL divergence from (1 - e, e) to (q, 1 - q), q = s(m), in the direction that seeks modes (arXiv 2402.00856)."""
    chosen = margin.sigmoid() * (F.logsigmoid(margin) - math.log1p(-label_smoothing))
    return chosen + (-margin).sigmoid() * (F.logsigmoid(-margin) - math.log(label_smoothing))


def nca_pair(chosen: Tensor, rejected: Tensor) -> Tensor:
    """``-log s(r_c) - 0.5 log s(-r_c) - 0.5 log s(-r_r)`` of the rewards beta x (arXiv 2402.05369)."""
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def bco_pair(chosen: Tensor, rejected: Tensor, shift: Tensor | float = 0.0) -> Tensor:
    """``-log s(r_c - d) - log s(-(r_r - d))`` of the rewards beta x, d a running mean of them (arXiv 2404.04656)."""
    return -F.logsigmoid(chosen - shift) - F.logsigmoid(-(rejected - shift))


def sppo_hard(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """``(x_c - 1 / (2 beta))^2 + (x_r + 1 / (2 beta))^2`` (arXiv 2405.00675, probabilities 1 and 0)."""
    return (chosen - 0.5 / beta).square() + (rejected + 0.5 / beta).square()


def apo_zero(chosen: Tensor, rejected: Tensor) -> Tensor:
    """``1 - s(r_c) + s(r_r)`` of the rewards beta x: chosen up, rejected down (arXiv 2408.06266)."""
    return (-chosen).sigmoid() + rejected.sigmoid()


def apo_down(chosen: Tensor, rejected: Tensor) -> Tensor:
    """``s(r_c) + 1 - s(r_c - r_r)`` of the rewards beta x: both down, rejected more (arXiv 2408.06266)."""
    return chosen.sigmoid() + (rejected - chosen).sigmoid()


def discopop(margin: Tensor, tau: float) -> Tensor:
    """``-(1 - w) log s(m) + w exp(-m)``, w = s(m / tau) (arXiv 2406.08414)."""
    weight = (margin / tau).sigmoid()
    return -(1 - weight) * F.logsigmoid(margin) + weight * torch.exp((-margin).clamp(max=LARGEST_EXPONENT))


def simpo(difference: Tensor, beta: float, gamma: float, label_smoothing: float = 0.0) -> Tensor:
    """`sigmoid` of ``beta h - gamma``, h the difference of length-averaged log-probabilities (arXiv 2405.14734)."""
    return sigmoid(beta * difference - gamma, label_smoothing)


def orpo(chosen: Tensor, rejected: Tensor, weight: float) -> Tensor:
    """``-l_c - weight * log s(log odds(l_c) - log odds(l_r))``, odds(l) = e^l / (1 - e^l) (arXiv 2403.07691).

    Args:
        chosen: l_c, length-averaged log-probability of the chosen completion.
        rejected: l_r.
        weight: of the odds ratio.
    """

    def log_odds(mean: Tensor) -> Tensor:
        # A certain completion has infinite odds; its distance from 1 is bounded by what its precision can tell.
        return mean - torch.log(-torch.expm1(mean.clamp(max=-torch.finfo(mean.dtype).eps)))

    return -chosen - weight * F.logsigmoid(log_odds(chosen) - log_odds(rejected))


def sorted_sigmoid(better: Tensor, worse: Tensor, label_smoothing: float = 0.0, beta: float = 1.0) -> Tensor:
    """`sigmoid` of the differences of sorted values: one distribution above another (AOT, arXiv 2406.05882)."""
    return sigmoid(beta * (better.sort().values - worse.sort().values), label_smoothing)


# ---- the table ----


@dataclass(frozen=True)
class Pairs:
    """Numbers of N pairs, column 0 chosen, column 1 rejected.

    Attributes:
        logps: [N, 2] log-probabilities of the policy, summed over trained tokens.
        ref_logps: [N, 2] of the reference; zeros where there is none.
        lengths: [N, 2] trained tokens, at least 1.
        means: [N, 2] log-probabilities of the policy averaged over all trained tokens alike.
        average: whether a completion's log-ratio is averaged over its tokens instead of summed.
        divergence: see `divergence_score`.
        alpha: see `divergence_score`.
        shift: of the rewards of `bco_pair`.
    """

    logps: Tensor
    ref_logps: Tensor
    lengths: Tensor
    means: Tensor
    average: bool = False
    divergence: str = "reverse_kl"
    alpha: float = 0.5
    shift: float = 0.0

    @property
    def log_ratios(self) -> Tensor:
        """[N, 2] x_c and x_r."""
        summed = self.logps - self.ref_logps
        return summed / self.lengths if self.average else summed

    @property
    def difference(self) -> Tensor:
        """[N] x_c - x_r, of the divergence."""
        scores = divergence_score(self.log_ratios, self.divergence, self.alpha)
        return scores[:, 0] - scores[:, 1]

    @property
    def averaged_difference(self) -> Tensor:
        """[N] x_c / n_c - x_r / n_r, of the divergence."""
        scores = divergence_score(self.logps - self.ref_logps, self.divergence, self.alpha) / self.lengths
        return scores[:, 0] - scores[:, 1]


@dataclass(frozen=True)
class PreferenceLoss:
    """A row of the table.

    Attributes:
        compute: pairs and options (``beta`` and so on, see `strategies.dpo.DPOOptions`) -> [N].
        reference: whether it compares with a reference.
        smooths: whether label smoothing is defined for it.
        diverges: whether another divergence may take the place of the reverse KL.
        sorts: whether it looks at all pairs of a micro-batch together, so that it depends on how a step is cut.
    """

    compute: Callable[[Pairs, Any], Tensor]
    reference: bool = True
    smooths: bool = False
    diverges: bool = False
    sorts: bool = False


def _sides(values: Tensor) -> tuple[Tensor, Tensor]:
    return values[:, 0], values[:, 1]


def _of_rewards(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Pairs, Any], Tensor]:
    return lambda pairs, o: loss(*_sides(o.beta * pairs.log_ratios))


LOSSES: dict[str, PreferenceLoss] = {
    "sigmoid": PreferenceLoss(
        lambda pairs, o: sigmoid(o.beta * pairs.difference, o.label_smoothing), smooths=True, diverges=True
    ),
    "sigmoid_norm": PreferenceLoss(
        lambda pairs, o: sigmoid(o.beta * pairs.averaged_difference, o.label_smoothing), smooths=True, diverges=True
    ),
    "robust": PreferenceLoss(
        lambda pairs, o: robust(o.beta * pairs.difference, o.label_smoothing), smooths=True, diverges=True
    ),
    "hinge": PreferenceLoss(lambda pairs, o: hinge(o.beta * pairs.difference), diverges=True),
    "ipo": PreferenceLoss(lambda pairs, o: ipo(pairs.averaged_difference, o.beta), diverges=True),
    "exo_pair": PreferenceLoss(
        lambda pairs, o: exo_pair(o.beta * pairs.difference, o.label_smoothing), smooths=True, diverges=True
    ),
    "nca_pair": PreferenceLoss(_of_rewards(nca_pair)),
    "bco_pair": PreferenceLoss(lambda pairs, o: bco_pair(*_sides(o.beta * pairs.log_ratios), pairs.shift)),
    "sppo_hard": PreferenceLoss(lambda pairs, o: sppo_hard(*_sides(pairs.log_ratios), o.beta)),
    "aot": PreferenceLoss(
        lambda pairs, o: sorted_sigmoid(
            pairs.logps[:, 0] - pairs.logps[:, 1],
            pairs.ref_logps[:, 0] - pairs.ref_logps[:, 1],
            o.label_smoothing,
            o.beta,
        ),
        smooths=True,
        sorts=True,
    ),
    "aot_unpaired": PreferenceLoss(
        lambda pairs, o: sorted_sigmoid(*_sides(pairs.log_ratios), o.label_smoothing, o.beta),
        smooths=True,
        sorts=True,
    ),
    "apo_zero": PreferenceLoss(_of_rewards(apo_zero)),
    "apo_down": PreferenceLoss(_of_rewards(apo_down)),
    "discopop": PreferenceLoss(lambda pairs, o: discopop(o.beta * pairs.difference, o.discopop_tau), diverges=True),
    "simpo": PreferenceLoss(
        lambda pairs, o: simpo(pairs.means[:, 0] - pairs.means[:, 1], o.beta, o.simpo_gamma, o.label_smoothing),
        reference=False,
        smooths=True,
    ),
    "orpo": PreferenceLoss(lambda pairs, o: orpo(*_sides(pairs.means), o.beta), reference=False),
    "sft": PreferenceLoss(lambda pairs, o: -pairs.means[:, 0], reference=False),
}
