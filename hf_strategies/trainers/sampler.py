"""The order in which prompts reach the processes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler


def prompt_positions(prompts: int, process: int, num_processes: int, block: int) -> list[int]:
    """Places of a process's prompts among the prompts of all processes in a rollout.

    The processes take turns in blocks of what they need for one optimizer step. So a step trains on the same prompts
    whatever the number of processes, also where a rollout serves several steps.

    Args:
        prompts: prompts of the rollout on one process, a multiple of ``block``.
        process: number of the process.
        num_processes: how many there are.
        block: prompts of one optimizer step on one process.
    """
    return [((i // block) * num_processes + process) * block + i % block for i in range(prompts)]


class RolloutSampler(Sampler[int]):
    """Hands every process its prompts of a rollout, once per micro-step that the rollout serves.

    An epoch is a permutation of the prompts, cut into chunks of ``prompts_per_process * num_processes``; the chunk of
    a rollout is repeated for each of its ``repeats`` micro-steps, so the length of an epoch and the position in it are
    those of the micro-steps, and skipping batches on resume lands where the run had stopped. The last chunk is filled
    up with the first prompts of the epoch: none is left out.

    Args:
        num_prompts: prompts in the dataset.
        prompts_per_process: prompts of one rollout on one process; the loader's batch size.
        num_processes: loader batches that make up one micro-step.
        repeats: micro-steps served by one rollout.
        seed: of the permutation, together with the epoch.
        block: see `prompt_positions`; all prompts of a process when left out.
    """

    def __init__(
        self,
        num_prompts: int,
        prompts_per_process: int,
        num_processes: int,
        repeats: int,
        seed: int,
        block: int | None = None,
    ) -> None:
        self.num_prompts = num_prompts
        self.chunk = prompts_per_process * num_processes
        block = block or prompts_per_process
        self.arrangement = [
            position
            for process in range(num_processes)
            for position in prompt_positions(prompts_per_process, process, num_processes, block)
        ]
        self.repeats = repeats
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation."""
        self.epoch = epoch

    def __len__(self) -> int:
        chunks = -(-self.num_prompts // self.chunk)
        return chunks * self.repeats * self.chunk

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(self.num_prompts, generator=generator).tolist()
        missing = -len(order) % self.chunk
        order += order[:missing]
        for start in range(0, len(order), self.chunk):
            for _ in range(self.repeats):
                yield from (order[start + position] for position in self.arrangement)
