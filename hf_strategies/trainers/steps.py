"""One optimizer step.

`get_batch_samples` sees every micro-batch of the step: it rolls out, pins what must not change (old and reference
log-probabilities, values), lets the strategy assign credit, and counts the exact denominator over micro-batches and
processes. `compute_loss` is then one forward pass and one call of the strategy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from transformers import Trainer

from hf_strategies.batch import Batch
from hf_strategies.modeling.forward import CheckedForward, ForwardResult
from hf_strategies.reporting.completions import USE
from hf_strategies.reporting.metrics import MetricStore
from hf_strategies.rollout.callback import Rollout, RolloutCallback
from hf_strategies.stats import Mean
from hf_strategies.strategies import Strategy
from hf_strategies.trainers.micro_batches import level, pieces_of, without_sync
from hf_strategies.trainers.preparation import Preparation


class StepMixin(Trainer):
    """The part of the trainer that runs in every optimizer step."""

    args: Any
    strategy: Strategy
    rollouts: RolloutCallback | None
    forward_pass: CheckedForward
    prepare: Preparation
    metric_store: dict[str, MetricStore]
    num_tokens: int
    _tokens_since_log: int

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], Tensor | int | None]:
        """Micro-batches of one optimizer step, ready for the loss, and the step's denominator over all processes."""
        samples = []
        for _ in range(num_batches):
            try:
                samples.append(next(epoch_iterator))
            except StopIteration:
                break
        if self.rollouts is None:
            batches, metrics = self.prepare(self.model_wrapped, [sample["batch"].to(device) for sample in samples])
            self.metric_store["train"].add(metrics)
        else:
            batches = [self._next_rollout_batch(sample["examples"], device) for sample in samples]
        if not batches:
            return [], None
        items = torch.stack([self.strategy.count_items(batch).to(device) for batch in batches]).sum()
        tokens = torch.stack([batch.num_tokens for batch in batches]).sum()
        self._tokens_since_log += int(tokens)
        totals = self.accelerator.gather(torch.stack([items, tokens.to(items.dtype)]).unsqueeze(0)).sum(dim=0)
        self.num_tokens += int(totals[1])
        inputs = [
            {"whole": batch, "pieces": self._inputs(pieces, totals[1])}
            for batch, pieces in zip(batches, self._cut(batches), strict=True)
        ]
        return inputs, totals[0].clamp(min=1)

    def _cut(self, batches: list[Batch]) -> list[list[Batch]]:
        """Pieces of each micro-batch, as many on every process."""
        budget, apart = self.args.max_tokens_per_micro_batch, self.args.low_memory and self.forward_pass.stream
        if budget is None and not apart:
            return [[batch] for batch in batches]
        prompts = "apart" if apart else "per_piece" if self.forward_pass.stream else "per_row"
        keep = self.strategy.keep_groups
        return level([pieces_of(b, budget or 1, keep_groups=keep, prompts=prompts) for b in batches], gather_object)

    @staticmethod
    def _inputs(pieces: list[Batch], tokens: Tensor) -> list[dict[str, Any]]:
        return [{"batch": piece, "token_share": piece.num_tokens / tokens.clamp(min=1)} for piece in pieces]

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Forward and backward pass of each piece of a micro-batch; gradients are reduced after the last one."""
        *first, last = inputs["pieces"]
        losses, prefix = [], None
        if self.args.low_memory:
            model.train()
            with without_sync(self.accelerator, model), self.compute_loss_context_manager():
                prefix = self.forward_pass.run_prefix(model, inputs["whole"])
        with self.forward_pass.going_on_from(prefix):
            for piece in first:
                with without_sync(self.accelerator, model):
                    losses.append(super().training_step(model, piece, num_items_in_batch))
            if prefix is not None:
                prefix.attach()
            losses.append(super().training_step(model, last, num_items_in_batch))
        return torch.stack(losses).sum()

    def _next_rollout_batch(self, examples: list[dict[str, Any]], device: torch.device) -> Batch:
        assert self.rollouts is not None
        if self.rollouts.buffer.needs_rollout:
            rollout = self.rollouts.rollout(examples, self.state)
            pin_old = self.strategy.needs_old_logprobs or self.args.updates_within_rollout
            for row, use in zip(rollout.table, self.strategy.uses(rollout.batch), strict=False):
                row[USE] = use
            parts, whole = self.args.resolved_steps_per_generation, rollout.batch.to(device)
            # Groups that stay together are cut before rows are selected: which prompts a step trains on must not
            # depend on how many of the others are left out, here or on another process.
            cut = whole.split(parts, keep_groups=True) if self.strategy.keep_groups else [whole]
            batches, metrics = self.prepare(self.model_wrapped, cut, pin_old=pin_old)
            self.metric_store["train"].add(rollout.metrics | metrics)
            self.rollouts.buffer.fill(batches if self.strategy.keep_groups else batches[0].split(parts))
            self._call_on_rollout(rollout)
        return self.rollouts.next_batch().to(device)  # a checkpoint brings it back on the CPU

    def _call_on_rollout(self, rollout: Rollout) -> None:
        for callback in self.callback_handler.callbacks:
            if hasattr(callback, "on_rollout"):
                callback.on_rollout(self.args, self.state, self.control, rollout=rollout)

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return inputs  # micro-batches are on the device already

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """This micro-batch's share of the step's loss.

        Args:
            model: wrapped model.
            inputs: ``batch``; ``token_share``, its part of the step's tokens, which weighs the router's aux loss;
                ``wanted`` and ``read_logits`` of `Forward`, beside what the strategy reads.
            return_outputs: also return the `ForwardResult`.
            num_items_in_batch: the step's denominator; the batch's own when left out.

        Returns:
            Scalar. Engines average gradients over processes, so it is multiplied by their number in training.
        """
        batch: Batch = inputs["batch"]
        num_items = num_items_in_batch
        if not isinstance(num_items, Tensor):
            num_items = self.strategy.count_items(batch).clamp(min=1)
        idle = self.strategy.idle_rows(batch)
        if self.forward_pass.is_moe or not model.training:
            idle = torch.zeros_like(idle)  # a router's loss comes from every row; an evaluation reports on all of them
        result = self.forward_pass(
            model,
            batch.replace(loss_mask=batch.loss_mask & ~idle.unsqueeze(-1)),
            wanted=(*self.strategy.reads, *inputs.get("wanted", ())),
            values=self.strategy.needs_critic,
            router=True,
            read_logits=inputs.get("read_logits"),
        )
        result.policy.computed = ~idle
        loss, metrics = self.strategy.loss(result.policy, batch, num_items)
        metrics["stream/sharing_factor"] = Mean(
            torch.tensor(float(result.padded_tokens)), torch.tensor(result.computed_tokens)
        )
        if result.aux_loss is not None:
            loss = loss + self._weighted_aux_loss(result, batch, inputs.get("token_share", 1.0), metrics)
        self.metric_store["train" if model.training else "eval"].add(metrics)
        if model.training:
            loss = loss * self.accelerator.num_processes
            prefix = self.forward_pass.prefix
            if prefix is not None and (pull := prefix.pull()) is not None:
                loss = loss + pull - pull.detach()  # a gradient, and no part of the loss
        return (loss, result) if return_outputs else loss

    def _weighted_aux_loss(self, result: ForwardResult, batch: Batch, share: Any, metrics: dict[str, Any]) -> Tensor:
        # A product of batch means has no exact split; the token-weighted mean over micro-batches at least does not
        # grow with their number.
        assert result.aux_loss is not None
        coefficient, tokens, aux = self.args.router_aux_loss_coef, batch.num_tokens, result.aux_loss
        metrics["aux_loss"] = Mean(aux.detach() * tokens, tokens)
        metrics["aux_loss_weighted"] = Mean(coefficient * aux.detach() * tokens, tokens)
        if result.router_load is not None:
            metrics["moe"] = result.router_load
        return coefficient * aux * share
