"""Rollouts between their generation and their last use, keyed by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hf_strategies.batch import Batch


class RolloutBuffer:
    """Serves the micro-batches of one rollout, ``steps_per_generation`` per pass, ``num_iterations`` passes.

    What is served depends on the number of micro-steps taken and on nothing else: not on prompt contents, not on the
    loader, not on evaluation in between.

    Args:
        steps_per_generation: micro-batches a rollout is cut into.
        num_iterations: times each micro-batch is used.
    """

    def __init__(self, steps_per_generation: int, num_iterations: int) -> None:
        self.steps_per_generation = steps_per_generation
        self.num_iterations = num_iterations
        self.micro_step = 0
        self._batches: list[Batch] = []

    @property
    def window(self) -> int:
        """Micro-steps served by one rollout."""
        return self.steps_per_generation * self.num_iterations

    @property
    def generation(self) -> int:
        """Index of the rollout that serves the next micro-step, counted from 0."""
        return self.micro_step // self.window

    @property
    def needs_rollout(self) -> bool:
        """Whether the next micro-step starts a new rollout."""
        return self.micro_step % self.window == 0

    def fill(self, batches: Sequence[Batch]) -> None:
        """Put in the micro-batches of a new rollout.

        Raises:
            ValueError: not exactly ``steps_per_generation`` of them.
            RuntimeError: the present rollout is still in use.
        """
        if len(batches) != self.steps_per_generation:
            raise ValueError(f"a rollout makes {self.steps_per_generation} micro-batches, got {len(batches)}")
        if not self.needs_rollout:
            raise RuntimeError(f"the rollout in the buffer is still in use at micro-step {self.micro_step}")
        self._batches = list(batches)

    def next(self) -> Batch:
        """Micro-batch of the next micro-step."""
        if not self._batches:
            raise RuntimeError("the rollout buffer is empty")
        batch = self._batches[self.micro_step % self.steps_per_generation]
        self.micro_step += 1
        if self.needs_rollout:
            # Used up: a checkpoint written now needs none of it.
            self._batches = []
        return batch

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What a checkpoint keeps: numbers and tensors."""
        tensors = {
            f"{i}.{name}": value.contiguous()
            for i, batch in enumerate(self._batches)
            for name, value in batch.tensors().items()
        }
        pads = [batch.pad_token_id for batch in self._batches]
        return {
            "micro_step": self.micro_step,
            "window": self.window,
            "pad_token_ids": pads,
        }, tensors

    def load_state(self, numbers: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Restore what `state` returned.

        Raises:
            ValueError: the checkpoint's rollouts are cut or reused differently.
        """
        if numbers["window"] != self.window:
            raise ValueError(
                f"the checkpoint's rollouts serve {numbers['window']} micro-steps, this run's {self.window} "
                "(steps_per_generation * num_iterations): resume with the settings of the checkpoint"
            )
        self.micro_step = numbers["micro_step"]
        self._batches = []
        for i, pad in enumerate(numbers["pad_token_ids"]):
            mine = {key.split(".", 1)[1]: value for key, value in tensors.items() if key.split(".", 1)[0] == str(i)}
            self._batches.append(Batch(**mine, pad_token_id=pad))
