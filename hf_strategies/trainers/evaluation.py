"""Evaluation along the path of training, with rollouts of its own that leave training as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from transformers import Trainer

from hf_strategies.modeling.predictions import Predictions
from hf_strategies.reporting.metrics import MetricStore
from hf_strategies.rollout.callback import RolloutCallback
from hf_strategies.stats import Mean
from hf_strategies.strategies import Strategy
from hf_strategies.trainers.preparation import Preparation
from hf_strategies.trainers.random_state import preserved_random_state


class EvaluationMixin(Trainer):
    """The part of the trainer that evaluates."""

    args: Any
    strategy: Strategy
    rollouts: RolloutCallback | None
    prepare: Preparation
    metric_store: dict[str, MetricStore]
    last_eval_table: list[dict[str, Any]]
    _eval_position: int
    _preprocess_logits: Any
    encoded: Callable[[Any], Any]

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """`Trainer.evaluate`; a dataset given here is read like those that the trainer was made with.

        Args:
            eval_dataset: a dataset, a dict of such, or the name of one of the trainer's own; all of these when left
                out.
            ignore_keys: not used.
            metric_key_prefix: of the metrics' names.
        """
        if isinstance(eval_dataset, dict):
            metrics: dict[str, float] = {}
            for name, dataset in eval_dataset.items():
                metrics |= self.evaluate(dataset, ignore_keys, f"{metric_key_prefix}_{name}")
            return metrics
        if eval_dataset is not None and not isinstance(eval_dataset, str):
            eval_dataset = self.encoded(eval_dataset)
            # Trainer keeps the loader of a set under the name of what it was given.
            getattr(self, "_eval_dataloaders", {}).pop("eval", None)
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def predict(self, test_dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """`Trainer.predict`; the dataset is read like those that the trainer was made with.

        Raises:
            TypeError: several datasets.
        """
        if isinstance(test_dataset, dict):
            raise TypeError(f"test_dataset: got a dict of {list(test_dataset)}, allowed is one dataset")
        return super().predict(self.encoded(test_dataset), *args, **kwargs)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Tensor | None]:
        """Score one evaluation batch along the path of training; training state stays untouched.

        Returns:
            Loss; predictions and labels [examples, S] as `modeling.predictions` lays them out, None where nobody asks
            for them or the strategy's rows have no labels.
        """
        store = self.metric_store["eval"]
        pin_old = self.strategy.needs_old_logprobs
        with torch.no_grad(), self.compute_loss_context_manager():
            if self.rollouts is None:
                (batch,), metrics = self.prepare(model, [inputs["batch"].to(self.args.device)], pin_old=pin_old)
            else:
                first = self._eval_position + self.accelerator.process_index * self.args.per_device_eval_batch_size
                self._eval_position += self.accelerator.num_processes * self.args.per_device_eval_batch_size
                rollout = self.rollouts.evaluate(
                    self.accelerator.unwrap_model(model),
                    inputs["examples"],
                    first,
                    self.state,
                )
                self.last_eval_table += rollout.table
                if self.args.resolved_num_generations_eval < self.strategy.min_group_size:
                    # Nothing to compare a lone completion with: rewards are reported, a loss is not defined.
                    store.add(rollout.metrics)
                    return None, None, None
                (batch,), metrics = self.prepare(model, [rollout.batch.to(self.args.device)], pin_old=pin_old)
                metrics = rollout.metrics | metrics
            store.add(metrics)
            items = self.strategy.count_items(batch)
            inputs, predictions = {"batch": batch}, None
            if self.strategy.labelled and not prediction_loss_only:
                predictions = Predictions(batch, self._preprocess_logits)
                inputs |= {"read_logits": predictions.read} if self._preprocess_logits else {"wanted": ("greedy",)}
            loss, result = self.compute_loss(model, inputs, True, items.clamp(min=1))
            store.add({"loss": Mean(loss.detach() * items, items)})
        if predictions is None:
            return loss, None, None
        return loss, predictions.values(result.policy.greedy), predictions.labels

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """`Trainer.evaluation_loop`, with the strategy's metrics and a loss weighted like the training loss."""
        prefix = kwargs.get("metric_key_prefix", args[4] if len(args) > 4 else "eval")
        self._eval_position, self.last_eval_table = 0, []
        self.metric_store["eval"] = MetricStore()
        with preserved_random_state(self.args.device):
            output = super().evaluation_loop(*args, **kwargs)
        self.prepare.rest()
        assert output.metrics is not None
        metrics = self.metric_store["eval"].reduce(gather_object)
        output.metrics.pop(f"{prefix}_loss", None)
        output.metrics.update({f"{prefix}_{name}": value for name, value in metrics.items()})
        return output
