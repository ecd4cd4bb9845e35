"""What a strategy is: three hooks between rows and gradient, and a declaration of what they need."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from hf_strategies import options as _options
from hf_strategies.batch import Batch
from hf_strategies.policy_output import PolicyOutput
from hf_strategies.stats import Mean, Metrics


class Strategy(ABC):
    """A training objective over `Batch` rows.

    Strategies see numbers: no model, tokenizer, accelerator or process. The trainer calls, once per optimizer step or
    rollout, `select` and `assign_credit`, cuts the result into micro-batches, adds `count_items` up over micro-batches
    and processes, and calls `loss` per micro-batch. The loss is a sum divided by that count, so it does not depend on
    how the step was cut.

    Attributes:
        Options: dataclass with the strategy's options.
        needs_rewards: rows must carry rewards when they reach `select`.
        needs_critic: `loss` reads ``policy.values``.
        needs_old_logprobs: ``old_logprobs`` are captured before the first update on a rollout, always.
        keep_groups: rows of a group must stay in one micro-batch.
        min_group_size: rows per prompt that the objective needs.
        packed: rows are documents: long ones are cut into pieces and, unless the config says otherwise, several share
            an example.
        labelled: rows are texts whose trained tokens are labels, which metrics may compare with predictions.
        dropout: whether training may run with dropout. Objectives that compare log-probabilities of two passes must
            not: the two would disagree for no reason.
    """

    Options: ClassVar[type[_options.Options]]
    # Sums over all rows of earlier optimizer steps and processes that a loss may read, set on construction. They are
    # in every checkpoint.
    sums: Tensor | None = None
    # What the rows of the present step add to them on this process: for `loss` to add to. The only thing that it may
    # change.
    unmerged: Tensor | None = None

    needs_rewards: ClassVar[bool] = False
    needs_critic: ClassVar[bool] = False
    needs_old_logprobs: ClassVar[bool] = False
    keep_groups: ClassVar[bool] = False
    min_group_size: ClassVar[int] = 1
    packed: ClassVar[bool] = False
    labelled: ClassVar[bool] = False
    dropout: ClassVar[bool] = False

    def __init__(self, options: _options.Options) -> None:
        self.options = options

    @property
    def needs_reference(self) -> bool:
        """Whether ``ref_logprobs`` must be filled in before `assign_credit`."""
        return False

    @classmethod
    def may_need_reference(cls) -> bool:
        """Whether it has options under which it compares with a reference."""
        return cls.needs_reference is not Strategy.needs_reference

    @property
    def needs_reward_std(self) -> bool:
        """Whether ``reward_std`` must be filled in before `assign_credit`."""
        return False

    @property
    def reads(self) -> tuple[str, ...]:
        """Fields of `PolicyOutput` that `loss` reads beside log-probabilities and values."""
        return ("entropy",)

    def select(self, batch: Batch) -> tuple[Batch, Metrics]:
        """Rows that train, from complete groups. Identity by default."""
        return batch, {}

    def assign_credit(self, batch: Batch) -> tuple[Batch, Metrics]:
        """Turn rewards into what the loss reads, once per group, before the batch is cut. Identity by default."""
        return batch, {}

    def uses(self, batch: Batch) -> list[str]:
        """What `select` makes of each row of complete groups, in a word for people; empty where it says nothing."""
        return []

    def count_items(self, batch: Batch) -> Tensor:
        """What this micro-batch adds to the step's denominator: its trained tokens by default.

        Returns:
            Scalar float64.
        """
        return batch.loss_mask.sum().to(torch.float64)

    def idle_rows(self, batch: Batch) -> Tensor:
        """[N] bool, rows from which no gradient can come whatever the policy says: they need not be computed.

        They count in the denominator all the same. None by default.
        """
        return torch.zeros(batch.num_rows, dtype=torch.bool, device=batch.device)

    @abstractmethod
    def loss(self, policy: PolicyOutput, batch: Batch, num_items: Tensor) -> tuple[Tensor, Metrics]:
        """This micro-batch's share of the step's loss.

        Args:
            policy: numbers of the current policy for this batch, with gradient.
            batch: N rows as `assign_credit` left them.
            num_items: scalar, `count_items` summed over the optimizer step and all processes, at least 1.

        Returns:
            Scalar loss, attached to the graph also when no token trains, and detached metrics.
        """

    def share(self, loss: Tensor, batch: Batch, num_items: Tensor) -> Mean:
        """A loss share as a metric whose parts add up to the step's value."""
        return Mean(loss.detach().double() * num_items.to(loss.device), self.count_items(batch))

    @staticmethod
    def entropy_metric(policy: PolicyOutput, mask: Tensor) -> Metrics:
        """Mean entropy of the trained tokens that were computed, if it was asked for."""
        if policy.entropy is None:
            return {}
        return {"entropy": Mean.of(policy.entropy, policy.computed_of(mask))}
