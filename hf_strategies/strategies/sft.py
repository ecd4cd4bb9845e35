"""Supervised fine-tuning: next-token cross-entropy over the tokens that train.

L = sum_t mask_t * l_t / (trained tokens of the optimizer step)

nll:  l_t = (1 - e) * -log p(y_t) + e * -mean_v log p(v), e the label smoothing
dft:  l_t = -sg(p(y_t)) log p(y_t), sg stopping the gradient (dynamic fine-tuning, arXiv 2508.05629)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from hf_strategies import functional as f
from hf_strategies.batch import Batch
from hf_strategies.options import Options, option
from hf_strategies.policy_output import PolicyOutput
from hf_strategies.stats import Mean, Metrics
from hf_strategies.strategies.base import Strategy

LOSS_TYPES = ("nll", "dft")


@dataclass
class SFTOptions(Options):
    """Options of SFT. `transformers` calls the smoothing ``label_smoothing_factor``: either name sets it."""

    aliases: ClassVar[dict[str, str]] = {"label_smoothing_factor": "label_smoothing"}

    loss_type: str = option(
        "nll",
        "Loss of a token: nll, minus its log-probability; dft, that times its probability, so that tokens the model "
        "finds unlikely pull less.",
    )
    label_smoothing: float = option(0.0, "Share e of the target spread over the whole vocabulary, in [0, 1).")

    def validate(self) -> None:  # noqa: D102 - see Options
        super().validate()
        self.require_one_of("loss_type", LOSS_TYPES)
        self.require_number("label_smoothing", 0.0, below=1.0)
        if self.loss_type == "dft" and self.label_smoothing > 0:
            raise ValueError(
                f"label_smoothing={self.label_smoothing!r} with loss_type='dft': allowed is 0, a smoothed target has "
                "no probability of its own to weigh with"
            )


class SFT(Strategy):
    """See the module's docstring."""

    Options: ClassVar[type[Options]] = SFTOptions
    options: SFTOptions
    labelled = True
    dropout = True

    @property
    def reads(self) -> tuple[str, ...]:  # noqa: D102 - see Strategy
        smoothed = ("vocab_mean",) if self.options.label_smoothing > 0 else ()
        return ("entropy", "correct", *smoothed)

    def loss(self, policy: PolicyOutput, batch: Batch, num_items: Tensor) -> tuple[Tensor, Metrics]:  # noqa: D102
        if self.options.loss_type == "dft":
            token_loss = f.dynamic_nll(policy.logprobs, batch.loss_mask)
        else:
            token_loss = f.smoothed_nll(policy.logprobs, policy.vocab_mean, self.options.label_smoothing)
        loss = f.aggregate(token_loss, batch.loss_mask, num_items, "dapo")
        metrics: Metrics = {"task_loss": self.share(loss, batch, num_items)}
        metrics |= self.entropy_metric(policy, batch.loss_mask)
        if policy.correct is not None:
            metrics["mean_token_accuracy"] = Mean.of(policy.correct, policy.computed_of(batch.loss_mask))
        return loss, metrics
