"""What a user's own module looks like: two strategies that this package does not know, registered under new names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_strategies import Batch, PolicyOutput, Strategy, register_strategy
from hf_strategies.functional import aggregate, masked_sum
from hf_strategies.options import Options, option
from hf_strategies.stats import Mean, Metrics


@dataclass
class ReinforceOptions(Options):
    """Options of REINFORCE."""

    baseline: float = option(0.0, "Constant subtracted from every reward.")


class Reinforce(Strategy):
    """Williams 1992: ``-(r - baseline) * log p`` per token, averaged over the trained tokens of the step."""

    Options: ClassVar[type[Options]] = ReinforceOptions
    options: ReinforceOptions
    needs_rewards = True

    def assign_credit(self, batch: Batch) -> tuple[Batch, Metrics]:
        """Every token of a row gets the row's reward."""
        assert batch.rewards is not None
        advantages = (batch.rewards - self.options.baseline).float().unsqueeze(-1).expand(batch.loss_mask.shape)
        every = torch.ones_like(batch.rewards, dtype=torch.bool)
        return batch.replace(advantages=advantages.contiguous()), {"reward": Mean.of(batch.rewards, every)}

    def loss(self, policy: PolicyOutput, batch: Batch, num_items: Tensor) -> tuple[Tensor, Metrics]:
        """See the class."""
        loss = aggregate(-batch.advantages * policy.logprobs, batch.loss_mask, num_items, "dapo")
        return loss, {"reinforce_loss": self.share(loss, batch, num_items)}


@dataclass
class MarginOptions(Options):
    """Options of the margin loss."""

    margin: float = option(1.0, "Wanted distance of the two log-probabilities, in nats, >= 0.")

    def validate(self) -> None:
        """Check the range."""
        super().validate()
        self.require_number("margin", 0.0)


class Margin(Strategy):
    """``max(0, margin - (log p(chosen) - log p(rejected)))``, averaged over pairs; no reference."""

    Options: ClassVar[type[Options]] = MarginOptions
    options: MarginOptions
    needs_rewards = True
    keep_groups = True
    min_group_size = 2

    def count_items(self, batch: Batch) -> Tensor:
        """Pairs."""
        return ((batch.group >= 0).sum() // 2).to(torch.float64)

    def loss(self, policy: PolicyOutput, batch: Batch, num_items: Tensor) -> tuple[Tensor, Metrics]:
        """See the class."""
        logps = masked_sum(policy.logprobs, batch.loss_mask, dim=-1)
        chosen, rejected = logps[batch.group >= 0].view(-1, 2).unbind(dim=1)
        losses = (self.options.margin - (chosen - rejected)).clamp(min=0.0)
        loss = (losses.sum() + 0.0 * logps.sum()) / num_items.to(losses.dtype)
        return loss, {"margin_loss": self.share(loss, batch, num_items)}


register_strategy("reinforce", Reinforce, online=True, reads="prompt (+ reward columns)")
register_strategy("margin", Margin, reads="prompt, chosen, rejected")
