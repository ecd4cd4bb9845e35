"""What a model predicts for given tokens, in the layout in which `transformers` hands predictions to metrics.

An example is one row: its documents one after another, labels -100 where a token does not train. Position t of the
predictions is about the token at t + 1, as in the output of a causal LM, so metrics shift them as usual. Logits of one
example exist at a time, [B, S, V] never does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_strategies.batch import Batch

IGNORED = -100
# What a forward pass offers of its logits: the flat places [M] in [N, C] of the tokens that were scored, and a
# function from a slice of these to logits [m, V].
LogitReader = Callable[[Tensor, Callable[[Tensor], Tensor]], None]


class Predictions:
    """Predictions and labels of a batch, an example a row.

    Args:
        batch: N rows; those of a group make one example.
        preprocess: from logits [1, S, V] and labels [1, S] of an example to what is kept of them, a tensor or a tuple
            of tensors with a first axis of 1. Logits are 0 where the token after them does not train. None: the
            likeliest tokens are kept, -100 where logits would be 0.

    Attributes:
        labels: [examples, S] long, padded on the right.
        kept: results of ``preprocess``, one per example.
    """

    def __init__(self, batch: Batch, preprocess: Callable[[Tensor, Tensor], Any] | None = None) -> None:
        self.preprocess = preprocess
        self.trained = batch.loss_mask & batch.completion_mask
        sizes = batch.attention_mask.sum(dim=1)
        _, self.example, rows = batch.group.unique_consecutive(return_inverse=True, return_counts=True)
        ends = sizes.cumsum(0)
        first_rows = rows.cumsum(0) - rows
        starts = ends - sizes
        first = starts - starts[first_rows][self.example] + batch.prompt_mask.sum(dim=1)
        # [N, C], where in its example each completion token stands.
        self.places = first.unsqueeze(1) + torch.arange(batch.completion_ids.shape[1], device=batch.device)
        lengths = torch.zeros_like(rows).index_add_(0, self.example, sizes)
        self.labels = self._filled(batch.completion_ids, int(lengths.max()), shift=0)
        self.kept: list[Any] = []

    def _filled(self, values: Tensor, length: int, shift: int) -> Tensor:
        """[N, C] values of trained tokens -> [examples, length], ``shift`` places before the token, -100 elsewhere."""
        out = values.new_full((int(self.example.max()) + 1, length), IGNORED)
        examples = self.example.unsqueeze(1).expand_as(values)
        out[examples[self.trained], self.places[self.trained] - shift] = values[self.trained]
        return out

    def read(self, slots: Tensor, logits_of: Callable[[Tensor], Tensor]) -> None:
        """Keep what ``preprocess`` makes of each example's logits; see `LogitReader`."""
        assert self.preprocess is not None
        examples = self.example[slots // self.places.shape[1]]
        for number in range(len(self.labels)):
            chosen = (examples == number).nonzero().flatten()
            if len(chosen) == 0:  # nothing of it trains: as many zeros as there are tokens in the vocabulary
                chosen = torch.zeros(1, dtype=torch.long, device=slots.device)
                logits, at = torch.zeros_like(logits_of(chosen)), chosen
            else:
                logits, at = logits_of(chosen), self.places.flatten()[slots[chosen]] - 1
            row = logits.new_zeros(1, self.labels.shape[1], logits.shape[-1])
            row[0, at] = logits
            self.kept.append(self.preprocess(row, self.labels[number : number + 1]))

    def values(self, greedy: Tensor | None) -> Any:
        """What is kept, all examples together.

        Args:
            greedy: [N, C] likeliest tokens, where there is no ``preprocess``.
        """
        if self.preprocess is None:
            assert greedy is not None
            return self._filled(greedy, self.labels.shape[1], shift=1)
        return _together(self.kept)


def _together(parts: list[Any]) -> Any:
    if isinstance(parts[0], tuple | list):
        return tuple(_together(list(column)) for column in zip(*parts, strict=True))
    return torch.cat(parts)
