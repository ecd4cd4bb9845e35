"""What a token stream is made of: which tokens stand where, who attends to whom, what is scored by what."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_strategies.batch import Batch

# Sequences of one attention call are padded to the longest of them; shorter ones than this part of it start a call of
# their own.
LENGTH_SPREAD = 0.7


@dataclass(frozen=True)
class Block:
    """Sequences that one attention call computes together.

    Attributes:
        prompt_start: stream position of the prompt they share.
        prompt_len: its length; 0 where the sequences share nothing.
        tokens: [sequences, R] long, stream positions; shorter sequences repeat their last one up to R.
        real: [sequences, R] bool, False for the repeated ones.
    """

    prompt_start: int
    prompt_len: int
    tokens: Tensor
    real: Tensor


def trained_tokens(batch: Batch) -> Tensor:
    """[N, C] bool, tokens that are scored: those that train.

    Of a batch that trains nothing it is a single one: such a batch still runs, and what it returns must hang in the
    graph.
    """
    trained = batch.loss_mask & batch.completion_mask
    if not trained.any():
        trained[0, 0] = True
    return trained


class StreamBuilder:
    """Collects a batch's sequences into a `Stream`."""

    def __init__(self, batch: Batch, untrained: bool) -> None:
        self.batch = batch
        self.untrained = untrained
        self.prompt_ids = batch.prompt_ids.cpu()
        self.completion_ids = batch.completion_ids.cpu()
        self.prompt_lens = batch.prompt_mask.sum(dim=1).tolist()
        self.completion_lens = batch.completion_mask.sum(dim=1).tolist()
        self.trains = trained_tokens(batch).cpu()
        self.in_group = batch.in_group.tolist()
        self.ids: list[Tensor] = []
        self.positions: list[Tensor] = []
        self.weights: list[Tensor] = []
        self.row_lengths: list[Tensor] = []
        self.scoring: list[Tensor] = []
        self.targets: list[Tensor] = []
        self.slots: list[Tensor] = []
        self.size = 0

    def build(self) -> dict[str, Any]:
        """Fields of a `Stream` that holds the whole batch."""
        prompts: list[tuple[int, int]] = []
        blocks: list[Block] = []
        alone: list[tuple[int, int]] = []
        for family in self.families():
            if len(family) == 1:
                alone.append(self._add_row(family[0]))
                continue
            start, length = self._add_prompt(family)
            prompts.append((start, length))
            blocks += blocks_of(start, length, [self._add_completion(row, start, length) for row in family])
        if not self.size:
            alone.append(self.add_stub())
        return self.fields(prompts, blocks + blocks_of(0, 0, alone))

    def fields(self, prompts: list[tuple[int, int]], blocks: list[Block]) -> dict[str, Any]:
        """Fields of a `Stream` of what was added, on the batch's device."""
        device = self.batch.device
        placed = [torch.arange(start, start + length) for start, length in prompts]
        placed += [block.tokens[block.real] for block in blocks]
        order = torch.empty(self.size, dtype=torch.long)
        order[torch.cat(placed)] = torch.arange(self.size)
        n, c = self.trains.shape
        return {
            "input_ids": torch.cat(self.ids).unsqueeze(0).to(device),
            "position_ids": torch.cat(self.positions).unsqueeze(0).to(device),
            "prompts": prompts,
            "blocks": [Block(b.prompt_start, b.prompt_len, b.tokens.to(device), b.real.to(device)) for b in blocks],
            "order": order.to(device),
            "scoring": torch.cat(self.scoring).to(device),
            "targets": torch.cat(self.targets).to(device),
            "slots": torch.cat(self.slots).to(device),
            "weights": torch.cat(self.weights).to(device),
            "row_lengths": torch.cat(self.row_lengths).unsqueeze(0).to(device),
            "shape": (n, c),
            "padded_tokens": n * (self.prompt_ids.shape[1] + c),
        }

    def rows(self) -> list[int]:
        """Rows that are laid out: those that train, or all."""
        trained = (self.batch.loss_mask & self.batch.completion_mask).any(dim=1).cpu()
        return (trained | self.untrained).nonzero().flatten().tolist()

    def families(self) -> Iterator[list[int]]:
        """Neighbouring rows of one group with the same prompt, among those that are laid out."""
        groups = self.batch.group.tolist()
        family: list[int] = []
        for row in self.rows():
            if family and groups[row] == groups[family[0]] and self._same_prompt(row, family[0]):
                family.append(row)
                continue
            if family:
                yield family
            family = [row]
        if family:
            yield family

    def _same_prompt(self, a: int, b: int) -> bool:
        length = self.prompt_lens[a]
        return length == self.prompt_lens[b] and torch.equal(self.prompt(a), self.prompt(b))

    def prompt(self, row: int) -> Tensor:
        """Token ids of a row's prompt."""
        return self.prompt_ids[row, self.prompt_ids.shape[1] - self.prompt_lens[row] :]

    def _completion(self, row: int) -> Tensor:
        return self.completion_ids[row, : self.completion_lens[row]]

    def append(self, ids: Tensor, first_position: int, weight: int, row_length: int | None = None) -> int:
        """Add tokens of a row of ``row_length`` tokens, by default these alone; returns where they start."""
        start = self.size
        self.ids.append(ids)
        self.positions.append(torch.arange(first_position, first_position + len(ids)))
        self.weights.append(torch.full((len(ids),), weight))
        self.row_lengths.append(torch.full((len(ids),), len(ids) if row_length is None else row_length))
        self.size += len(ids)
        return start

    def _add_prompt(self, family: Sequence[int]) -> tuple[int, int]:
        ids = self.prompt(family[0])
        longest = len(ids) + max(self.completion_lens[row] for row in family)
        return self.append(ids, 0, sum(self.in_group[row] for row in family), longest), len(ids)

    def _add_completion(self, row: int, prompt_start: int, prompt_len: int) -> tuple[int, int]:
        ids = self._completion(row)
        start = self.append(ids, prompt_len, int(self.in_group[row]), prompt_len + len(ids))
        self._score(row, before_first=prompt_start + prompt_len - 1, start=start)
        return start, len(ids)

    def _add_row(self, row: int) -> tuple[int, int]:
        prompt, completion = self.prompt(row), self._completion(row)
        start = self.append(torch.cat([prompt, completion]), 0, int(self.in_group[row]))
        self._score(row, before_first=start + len(prompt) - 1, start=start + len(prompt))
        return start, len(prompt) + len(completion)

    def add_suffix(self, row: int) -> tuple[int, int]:
        """A row without its prompt, whose last token opens it; returns start and length."""
        prompt, completion = self.prompt(row), self._completion(row)
        start = self.append(torch.cat([prompt[-1:], completion]), len(prompt) - 1, int(self.in_group[row]))
        self._score(row, before_first=start, start=start + 1)
        return start, 1 + len(completion)

    def add_stub(self) -> tuple[int, int]:
        """A single token, for the graph of a batch that trains nothing; returns start and length."""
        start = self.append(self.prompt(0)[-1:], 0, 0)
        self._score(0, before_first=start, start=start + 1)
        return start, 1

    def score_first(self) -> None:
        """One position of logits, for a stream of which nobody reads any."""
        self.scoring, self.targets, self.slots = ([torch.zeros(1, dtype=torch.long)] for _ in range(3))

    def _score(self, row: int, before_first: int, start: int) -> None:
        """Token j of a completion is scored one position before it, the first one by the last prompt token."""
        index = self.trains[row].nonzero().flatten()
        self.scoring.append(torch.where(index == 0, before_first, start + index - 1))
        self.targets.append(self.completion_ids[row, index])
        self.slots.append(row * self.trains.shape[1] + index)


def blocks_of(prompt_start: int, prompt_len: int, sequences: list[tuple[int, int]]) -> list[Block]:
    """Attention calls for sequences (start, length) under one prompt: those of similar length go together."""
    blocks: list[Block] = []
    ordered = sorted((s for s in sequences if s[1] > 0), key=lambda s: (-s[1], s[0]))
    while ordered:
        longest = ordered[0][1]
        together = [s for s in ordered if s[1] >= LENGTH_SPREAD * longest]
        ordered = ordered[len(together) :]
        starts = torch.tensor([start for start, _ in together]).unsqueeze(1)
        lengths = torch.tensor([length for _, length in together]).unsqueeze(1)
        column = torch.arange(longest).unsqueeze(0)
        tokens = starts + torch.minimum(column, lengths - 1)
        blocks.append(Block(prompt_start, prompt_len, tokens, column < lengths))
    return blocks
