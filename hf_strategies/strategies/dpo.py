"""Direct preference optimisation (Rafailov et al. 2023, arXiv 2305.18290), from given pairs or from sampled groups.

    r_x = beta * (log pi(x) - log pi_ref(x)),   L = mean_pairs[ -log sigmoid(r_chosen - r_rejected) ]

log pi(x) sums over the completion's trained tokens (``reduction="mean"`` normalises by length). A pair is a group of
two rows, chosen first, with rewards 1 and 0. Of a sampled group, best and worst by reward make the pair.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_strategies import functional as f
from hf_strategies.batch import Batch, PolicyOutput
from hf_strategies.options import Options, option
from hf_strategies.stats import Mean, Metrics
from hf_strategies.strategies.base import Strategy


@dataclass
class DPOOptions(Options):
    """Options of DPO."""

    beta: float = option(0.1, "Strength of the pull to the reference, > 0 (DPO paper, TRL).")
    reduction: str = option(
        "sum",
        "Log-probability of a completion: sum over its tokens, or mean (length-normalised).",
    )

    def validate(self) -> None:  # noqa: D102 - see Options
        super().validate()
        self.require_number("beta", above=0.0)
        # "none" would average a per-token log-sigmoid over padding too.
        self.require_one_of("reduction", ("sum", "mean"))


class DPO(Strategy):
    """See the module's docstring."""

    Options: ClassVar[type[Options]] = DPOOptions
    options: DPOOptions
    needs_rewards = True
    keep_groups = True
    min_group_size = 2

    @property
    def needs_reference(self) -> bool:  # noqa: D102 - see Strategy
        return True

    def select(self, batch: Batch) -> tuple[Batch, Metrics]:
        """Best and worst row of each group, in that order; ties and pairs with an empty side make no pair."""
        assert batch.rewards is not None
        # Decided on the host: on an accelerator every group would wait for it several times.
        rewards, group, trains = batch.rewards.cpu(), batch.group.cpu(), batch.loss_mask.any(dim=1).cpu()
        chosen_rows: list[int] = []
        tied = empty = groups = 0
        for number in group.unique_consecutive().tolist():
            if number < 0:
                continue
            rows = torch.nonzero(group == number).flatten()
            rows = rows[~rewards[rows].isnan()]
            groups += 1
            if rows.numel() == 0 or rewards[rows].max() == rewards[rows].min():
                tied += 1
                continue
            # argmax and argmin return the first of equals: the choice is deterministic.
            best = int(rows[rewards[rows].argmax()])
            worst = int(rows[rewards[rows].argmin()])
            if not (trains[best] and trains[worst]):
                empty += 1
                continue
            chosen_rows += [best, worst]
        count = torch.tensor(groups)
        metrics: Metrics = {
            "frac_pairs_tied": Mean(torch.tensor(float(tied)), count),
            "rows_dropped/empty_side": Mean(torch.tensor(float(empty)), count),
        }
        return batch.select(chosen_rows) if chosen_rows else batch.blank(), metrics

    def count_items(self, batch: Batch) -> Tensor:
        """Pairs of the batch."""
        return (batch.in_group.sum() // 2).to(torch.float64)

    def loss(self, policy: PolicyOutput, batch: Batch, num_items: Tensor) -> tuple[Tensor, Metrics]:  # noqa: D102
        assert batch.ref_logprobs is not None
        o = self.options
        logps = f.reduce_tokens(policy.logprobs, batch.loss_mask, o.reduction)
        ref_logps = f.reduce_tokens(batch.ref_logprobs, batch.loss_mask, o.reduction)
        paired = batch.in_group
        pairs = logps[paired].view(-1, 2)
        rewards = f.dpo_margins(pairs, ref_logps[paired].view(-1, 2), o.beta)
        chosen, rejected = rewards.unbind(dim=1)
        losses = f.dpo_loss(chosen, rejected)
        # The blank rows of a surplus micro-batch add a zero that keeps the graph (and the other ranks) going.
        attached_zero = f.masked_sum(logps, torch.zeros_like(paired))
        loss = (losses.sum() + attached_zero) / num_items.to(device=losses.device, dtype=losses.dtype)
        every_pair = torch.ones_like(losses, dtype=torch.bool)
        metrics: Metrics = {
            "dpo_loss": self.share(loss, batch, num_items),
            "rewards/chosen": Mean.of(chosen, every_pair),
            "rewards/rejected": Mean.of(rejected, every_pair),
            "rewards/margins": Mean.of(chosen - rejected, every_pair),
            "rewards/accuracies": Mean.of((chosen > rejected).to(losses.dtype), every_pair),
            "logps/chosen": Mean.of(pairs[:, 0], every_pair),
            "logps/rejected": Mean.of(pairs[:, 1], every_pair),
        }
        return loss, metrics
