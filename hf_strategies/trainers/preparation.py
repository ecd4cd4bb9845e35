"""From rows to rows with credit: select, pin, assign. Runs once per rollout, or per optimizer step of offline data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn

from hf_strategies.batch import Batch
from hf_strategies.modeling.forward import CheckedForward
from hf_strategies.modeling.generation import generating
from hf_strategies.modeling.reference import Reference
from hf_strategies.reporting.metrics import MetricStore
from hf_strategies.strategies import Strategy


class Preparation:
    """Gives rows everything the loss reads.

    Args:
        strategy: chooses rows and assigns credit.
        forward: scores rows.
        reference: the frozen policy, if the strategy needs one.
        rows_per_pass: rows scored at a time, in whole groups where they share a prompt; None: a batch at a time.
    """

    def __init__(
        self, strategy: Strategy, forward: CheckedForward, reference: Reference | None, rows_per_pass: int | None
    ) -> None:
        self.strategy = strategy
        self.forward = forward
        self.reference = reference
        self.rows_per_pass = rows_per_pass
        # Of the training pass: a model that no engine has wrapped does not do it by itself.
        self.autocast: Callable[[], AbstractContextManager] = nullcontext
        # Whether the reference frees the accelerator between two uses.
        self.parks = False

    def __call__(
        self, model: nn.Module, batches: Sequence[Batch], *, pin_old: bool = False
    ) -> tuple[list[Batch], dict[str, Any]]:
        """Select rows of each batch, pin numbers, and assign credit over all batches together.

        Args:
            model: the policy as it is called in training, wrapped or not.
            batches: complete groups.
            pin_old: keep the present policy's log-probabilities as ``old_logprobs``, where rows bring none.

        Returns:
            One batch per given batch, and metrics.
        """
        if not batches:
            return [], {}
        self.forward.check(model, batches[0], lambda value: max(gather_object([value])))
        metrics = MetricStore()
        chosen = []
        for batch in batches:
            selected, stats = self.strategy.select(batch)
            metrics.add(stats)
            chosen.append(self._pin(model, selected, pin_old))
        together = Batch.cat(chosen)
        if self.strategy.needs_reward_std:
            together = together.replace(reward_std=self._reward_std(together))
        credited, stats = self.strategy.assign_credit(together)
        metrics.add(stats)
        prepared, start = [], 0
        for batch in chosen:
            prepared.append(credited.select(range(start, start + batch.num_rows)))
            start += batch.num_rows
        return prepared, metrics.collected()

    def _parts(self, batch: Batch) -> list[Batch]:
        """Rows that are scored together: a group that is parted would compute its prompt twice."""
        if self.rows_per_pass is None:
            return [batch]
        wanted = -(-batch.num_rows // self.rows_per_pass)
        if not self.forward.stream:
            return batch.split(wanted)
        return batch.split(min(wanted, len(batch.group.unique_consecutive())), keep_groups=True)

    def _reward_std(self, batch: Batch) -> Tensor:
        """Standard deviation of all rewards, those of other processes included, for each row; 0 for a single one."""
        assert batch.rewards is not None
        rewards = batch.rewards[~batch.rewards.isnan()].tolist()
        everywhere = torch.tensor(gather_object(rewards), dtype=torch.float64, device=batch.device)
        return (everywhere.std() if len(everywhere) > 1 else everywhere.new_zeros(())).expand(batch.num_rows)

    def score_reference(self, model: nn.Module, batch: Batch) -> Tensor:
        """Log-probabilities of the reference, [N, C] in nats; called without gradient, in evaluation mode.

        Raises:
            ValueError: there is none any more.
        """
        if self.reference is None:
            raise ValueError(
                "precompute_ref_log_probs=True: the weights the run started from are not kept, so that rows that were "
                "not there then cannot be compared with them; give the dataset when the trainer is made, or a "
                "ref_model, or leave precompute_ref_log_probs off"
            )
        with self.reference.activated(model) as reference, self.autocast():
            return self.forward(reference, batch).policy.logprobs

    def rest(self) -> None:
        """No reference is asked for a while."""
        if self.parks and self.reference is not None:
            self.reference.park()

    def _pin(self, model: nn.Module, batch: Batch, pin_old: bool) -> Batch:
        """Compute what later passes over these rows must find unchanged, without gradient."""
        wants_values = self.strategy.needs_critic
        wants_old = pin_old and batch.old_logprobs is None
        wants_reference = self.strategy.needs_reference and batch.ref_logprobs is None
        if not (wants_old or wants_values or wants_reference):
            return batch
        pinned = []
        with generating(model):
            for part in self._parts(batch):
                if wants_old or wants_values:
                    policy = self.forward(model, part, values=wants_values).policy
                    part = part.replace(
                        values=policy.values, old_logprobs=policy.logprobs if wants_old else part.old_logprobs
                    )
                if wants_reference:
                    part = part.replace(ref_logprobs=self.score_reference(model, part))
                pinned.append(part)
        # Concatenation numbers groups per part; rows of one group may have been in two.
        return Batch.cat(pinned).replace(group=batch.group)
