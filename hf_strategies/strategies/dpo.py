"""Direct preference optimisation (Rafailov et al. 2023, arXiv 2305.18290), from given pairs or from sampled groups.

    x = log pi(y) - log pi_ref(y),   L = mean_pairs[ -log sigmoid(beta * (x_chosen - x_rejected)) ]

log pi(y) sums over the completion's trained tokens (``reduction="mean"`` averages). ``loss_type`` names this loss
(``sigmoid``) or others of the family, with their equations in `preference`; several are added up. A pair is two rows
of a group, chosen first; which completions of a sampled group make pairs is decided in `pairs`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch import Tensor

from hf_strategies import functional as f
from hf_strategies.batch import Batch
from hf_strategies.options import Options, option
from hf_strategies.policy_output import PolicyOutput
from hf_strategies.preference import DIVERGENCES, LOSSES, Pairs, PreferenceLoss
from hf_strategies.stats import Mean, Metrics
from hf_strategies.strategies.base import Strategy
from hf_strategies.strategies.pairs import SELECTIONS, select_pairs, uses_of


@dataclass
class DPOOptions(Options):
    """Options of DPO."""

    loss_type: str | list[str] = option(["sigmoid"], f"Loss, or several that are added up: {', '.join(LOSSES)}.")
    loss_weights: list[float] | None = option(None, "Weight of each loss of loss_type; 1 when left out (MPO).")
    beta: float = option(0.1, "Strength of the pull to the reference, > 0; of orpo the weight of its odds ratio.")
    reduction: str = option(
        "sum",
        "Log-ratio of a completion: sum over its tokens, or mean. Losses that are defined on averages (sigmoid_norm, "
        "ipo, simpo, orpo, sft) always average.",
    )
    label_smoothing: float = option(
        0.0, "Share of pairs whose labels are thought to be wrong, in [0, 0.5); exo_pair needs it above 0."
    )
    f_divergence_type: str = option("reverse_kl", f"Divergence from the reference: {', '.join(DIVERGENCES)}.")
    f_alpha_divergence_coef: float = option(0.5, "Alpha of alpha_divergence.")
    ld_alpha: float | None = option(
        None, "Weight, in [0, 1], of the tokens by which one completion is longer than the other (LD-DPO)."
    )
    use_weighting: bool = option(False, "Weigh pairs by how likely the policy is to write them itself (WPO).")
    discopop_tau: float = option(0.05, "Temperature of discopop's mixture, > 0.")
    bco_running_mean: bool = option(
        False, "Shift the rewards of bco_pair by the mean of all that earlier optimizer steps have seen; off: by 0."
    )
    simpo_gamma: float = option(0.5, "Margin that simpo asks for, after beta.")
    pair_selection: str = option("best_worst", f"Pairs of a sampled group: {', '.join(SELECTIONS)}.")

    def validate(self) -> None:  # noqa: D102 - see Options
        super().validate()
        self.require_number("beta", above=0.0)
        # "none" would average a per-token log-sigmoid over padding too.
        self.require_one_of("reduction", ("sum", "mean"))
        self.require_one_of("f_divergence_type", DIVERGENCES)
        self.require_number("f_alpha_divergence_coef")
        self.require_number("discopop_tau", above=0.0)
        self.require_number("simpo_gamma")
        self.require_one_of("pair_selection", SELECTIONS)
        if self.ld_alpha is not None:
            self.require_number("ld_alpha", 0.0, 1.0)
        self._validate_losses()
        self._validate_own()
        if self.bco_running_mean and "bco_pair" not in self.loss_type:
            raise ValueError(f"bco_running_mean=True: only loss_type 'bco_pair' has a shift, not {self.loss_type}")

    def _validate_own(self) -> None:
        """Refuse what none of the losses reads."""
        defaults = {f.name: f.default for f in fields(DPOOptions)}
        for name, loss in (("discopop_tau", "discopop"), ("simpo_gamma", "simpo")):
            if getattr(self, name) != defaults[name] and loss not in self.loss_type:
                raise ValueError(
                    f"{name}={getattr(self, name)!r}: only loss_type {loss!r} has it, not {self.loss_type}"
                )
        alpha, kind = self.f_alpha_divergence_coef, self.f_divergence_type
        if alpha != defaults["f_alpha_divergence_coef"] and kind != "alpha_divergence":
            raise ValueError(
                f"f_alpha_divergence_coef={alpha!r}: only f_divergence_type 'alpha_divergence' has it, not {kind!r}"
            )
        if self.f_divergence_type != "reverse_kl" and not any(LOSSES[name].diverges for name in self.loss_type):
            raise ValueError(f"f_divergence_type={self.f_divergence_type!r}: loss_type {self.loss_type} has none")

    def _validate_losses(self) -> None:
        if isinstance(self.loss_type, str):
            self.loss_type = [self.loss_type]
        names = list(self.loss_type)
        if not names or any(name not in LOSSES for name in names):
            raise ValueError(f"loss_type={names!r}: allowed are one or more of {', '.join(map(repr, LOSSES))}")
        if self.loss_weights is not None and len(self.loss_weights) != len(names):
            raise ValueError(
                f"loss_weights={self.loss_weights!r}: allowed is one number for each of loss_type={names}"
            )
        self.require_number("label_smoothing", 0.0, below=0.5)
        for name in names:
            if self.label_smoothing > 0 and not LOSSES[name].smooths:
                able = ", ".join(repr(other) for other, loss in LOSSES.items() if loss.smooths)
                raise ValueError(
                    f"label_smoothing={self.label_smoothing!r}: loss_type {name!r} has none; allowed is 0, or one of "
                    f"{able}"
                )
            if self.f_divergence_type != "reverse_kl" and LOSSES[name].reference and not LOSSES[name].diverges:
                able = ", ".join(repr(other) for other, loss in LOSSES.items() if loss.diverges)
                raise ValueError(
                    f"f_divergence_type={self.f_divergence_type!r}: loss_type {name!r} knows reverse_kl alone; others "
                    f"are for {able}"
                )
            if self.use_weighting and LOSSES[name].sorts:
                raise ValueError(f"use_weighting=True: loss_type {name!r} sorts its pairs, so that none has a weight")
        if "exo_pair" in names and self.label_smoothing == 0:
            raise ValueError("label_smoothing=0.0: loss_type 'exo_pair' needs a number > 0.0 and < 0.5, such as 0.001")

    @property
    def losses(self) -> list[tuple[PreferenceLoss, float]]:
        """Losses and their weights."""
        return [(LOSSES[name], w) for name, w in zip(self.loss_type, self.weights, strict=True)]

    @property
    def weights(self) -> list[float]:
        """Weight of each loss."""
        return [1.0] * len(self.loss_type) if self.loss_weights is None else list(self.loss_weights)


class DPO(Strategy):
    """See the module's docstring."""

    Options: ClassVar[type[Options]] = DPOOptions
    options: DPOOptions
    needs_rewards = True
    keep_groups = True
    min_group_size = 2

    def __init__(self, options: DPOOptions) -> None:
        super().__init__(options)
        if self.options.bco_running_mean:
            self.sums = torch.zeros(2, dtype=torch.float64)

    @property
    def needs_reference(self) -> bool:  # noqa: D102 - see Strategy
        return any(loss.reference for loss, _ in self.options.losses)

    @property
    def reads(self) -> tuple[str, ...]:  # noqa: D102 - see Strategy
        weighting = ("log_collision",) if self.options.use_weighting else ()
        return ("entropy", "correct", "mean_logit", *weighting)

    def select(self, batch: Batch) -> tuple[Batch, Metrics]:
        """Pairs of each group, better row first; ties and pairs with an empty side make none."""
        return select_pairs(batch, self.options.pair_selection)

    def uses(self, batch: Batch) -> list[str]:
        """Which rows are chosen and which rejected."""
        return uses_of(batch, self.options.pair_selection)

    def count_items(self, batch: Batch) -> Tensor:
        """Pairs of the batch."""
        return (batch.in_group.sum() // 2).to(torch.float64)

    def loss(self, policy: PolicyOutput, batch: Batch, num_items: Tensor) -> tuple[Tensor, Metrics]:  # noqa: D102
        o = self.options
        pairs = self.pairs(policy.logprobs, batch)
        losses = sum((weight * loss.compute(pairs, o) for loss, weight in o.losses), pairs.logps.new_zeros(()))
        if o.use_weighting:
            losses = losses * self._weights(policy, batch)
        # The blank rows of a surplus micro-batch add a zero that keeps the graph (and the other ranks) going.
        attached_zero = f.masked_sum(policy.logprobs, torch.zeros_like(batch.loss_mask))
        loss = (losses.sum() + attached_zero) / num_items.to(device=losses.device, dtype=losses.dtype)
        metrics: Metrics = {"dpo_loss": self.share(loss, batch, num_items)}
        metrics |= self._reward_metrics(pairs)
        metrics |= self._token_metrics(policy, batch)
        self._seen(pairs)
        return loss, metrics

    def pairs(self, logprobs: Tensor, batch: Batch) -> Pairs:
        """Numbers of the pairs of a batch, from the policy's log-probabilities [N, C]."""
        mask = batch.loss_mask[batch.in_group]
        logprobs = logprobs[batch.in_group]
        weights = self._token_weights(mask, logprobs.dtype)

        def paired(values: Tensor) -> Tensor:
            return f.masked_sum(values if weights is None else torch.where(mask, values * weights, 0), mask, -1).view(
                -1, 2
            )

        logps = paired(logprobs)
        return Pairs(
            logps=logps,
            ref_logps=torch.zeros_like(logps)
            if batch.ref_logprobs is None
            else paired(batch.ref_logprobs[batch.in_group]),
            lengths=mask.sum(dim=1).view(-1, 2),
            means=f.masked_mean(logprobs, mask, dim=-1).view(-1, 2),
            average=self.options.reduction == "mean",
            divergence=self.options.f_divergence_type,
            alpha=self.options.f_alpha_divergence_coef,
            shift=self._shift,
        )

    # ---- the running mean of bco_pair ----

    @property
    def _shift(self) -> float:
        if self.sums is None:
            return 0.0
        total, count = self.sums.tolist()
        return total / count if count else 0.0

    def _seen(self, pairs: Pairs) -> None:
        if self.unmerged is not None and torch.is_grad_enabled():
            rewards = (self.options.beta * pairs.log_ratios).detach().double()
            self.unmerged += torch.stack([rewards.sum().cpu(), torch.tensor(rewards.numel(), dtype=torch.float64)])

    def _token_weights(self, mask: Tensor, dtype: torch.dtype) -> Tensor | None:
        """[2 P, C]: 1 for the tokens up to the length of a pair's shorter completion, ``ld_alpha`` after them.

        Desirable length of LD-DPO (arXiv 2409.06411): what one answer says beyond the other's length is mostly that
        it is longer.
        """
        if self.options.ld_alpha is None:
            return None
        shared = mask.sum(dim=1).view(-1, 2).amin(dim=1).repeat_interleave(2)
        beyond = mask.cumsum(dim=1) > shared.unsqueeze(1)
        return torch.ones_like(mask, dtype=dtype).masked_fill(beyond, self.options.ld_alpha)

    def _weights(self, policy: PolicyOutput, batch: Batch) -> Tensor:
        """[P] product over both completions of exp(mean_t(log p(y_t) - log sum_v p(v)^2)) (WPO, arXiv 2406.11827)."""
        assert policy.log_collision is not None
        aligned = (policy.logprobs.detach() - policy.log_collision)[batch.in_group]
        return f.masked_mean(aligned, batch.loss_mask[batch.in_group], dim=-1).view(-1, 2).sum(dim=1).exp()

    def _token_metrics(self, policy: PolicyOutput, batch: Batch) -> Metrics:
        metrics = self.entropy_metric(policy, batch.loss_mask)
        chosen = batch.in_group & (batch.in_group.cumsum(dim=0) % 2 == 1)
        for side, rows in (("chosen", chosen), ("rejected", batch.in_group & ~chosen)):
            mask = batch.loss_mask & rows.unsqueeze(-1)
            if policy.mean_logit is not None:
                metrics[f"logits/{side}"] = Mean.of(policy.mean_logit, mask)
            if policy.correct is not None and side == "chosen":
                metrics["mean_token_accuracy"] = Mean.of(policy.correct, mask)
        return metrics

    def _reward_metrics(self, pairs: Pairs) -> Metrics:
        """The implicit rewards beta x, and what they are made of."""
        chosen, rejected = (self.options.beta * pairs.log_ratios).detach().unbind(dim=1)
        every_pair = torch.ones_like(chosen, dtype=torch.bool)
        logps = pairs.logps / pairs.lengths if pairs.average else pairs.logps
        return {
            "rewards/chosen": Mean.of(chosen, every_pair),
            "rewards/rejected": Mean.of(rejected, every_pair),
            "rewards/margins": Mean.of(chosen - rejected, every_pair),
            "rewards/accuracies": Mean.of((chosen > rejected).to(chosen.dtype), every_pair),
            "logps/chosen": Mean.of(logps[:, 0], every_pair),
            "logps/rejected": Mean.of(logps[:, 1], every_pair),
            "logps/accuracies": Mean.of((logps[:, 0] > logps[:, 1]).to(logps.dtype), every_pair),
        }
