"""Supervised fine-tuning: next-token cross-entropy over the tokens that train.

L = sum_t mask_t * CE_t / (trained tokens of the optimizer step),
CE_t = (1 - e) * -log p(y_t) + e * -mean_v log p(v)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from hf_strategies import functional as f
from hf_strategies.batch import Batch, PolicyOutput
from hf_strategies.options import Options, option
from hf_strategies.stats import Metrics
from hf_strategies.strategies.base import Strategy


@dataclass
class SFTOptions(Options):
    """Options of SFT."""

    label_smoothing: float = option(0.0, "Share e of the target spread over the whole vocabulary, in [0, 1).")

    def validate(self) -> None:  # noqa: D102 - see Options
        super().validate()
        self.require_number("label_smoothing", 0.0, below=1.0)


class SFT(Strategy):
    """See the module's docstring."""

    Options: ClassVar[type[Options]] = SFTOptions
    options: SFTOptions
    dropout = True

    @property
    def reads(self) -> tuple[str, ...]:  # noqa: D102 - see Strategy
        return ("entropy", "vocab_mean") if self.options.label_smoothing > 0 else ("entropy",)

    def loss(self, policy: PolicyOutput, batch: Batch, num_items: Tensor) -> tuple[Tensor, Metrics]:  # noqa: D102
        nll = f.smoothed_nll(policy.logprobs, policy.vocab_mean, self.options.label_smoothing)
        loss = f.aggregate(nll, batch.loss_mask, num_items, "dapo")
        metrics: Metrics = {"task_loss": self.share(loss, batch, num_items)}
        metrics |= self.entropy_metric(policy, batch.loss_mask)
        return loss, metrics
