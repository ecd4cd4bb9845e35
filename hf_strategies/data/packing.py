"""Packing documents into rows of a fixed number of tokens.

Documents of a packed row never see each other. A document that is longer than a row, or that a row has no room for, is
cut into pieces. A piece begins with the last token of the one before it, which is seen and not trained, so that every
token that trains in the whole document trains in exactly one piece.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_strategies.batch import Row

# bfd: whole documents (the caller cuts long ones off), best-fit-decreasing. bfd_split: the same with long ones in
# pieces. wrapped: one after another, cut wherever a row is full. pieces: long ones in pieces, nothing shares a row.
PACKING_STRATEGIES = ("bfd", "bfd_split", "wrapped")
SPLITTING = ("bfd_split", "wrapped", "pieces")


@dataclass
class Document:
    """A row as one sequence.

    Attributes:
        ids: tokens of prompt and completion.
        trains: of each of them, whether it trains; the first one never does.
    """

    ids: list[int]
    trains: list[bool]

    @classmethod
    def of(cls, row: Row) -> Document:
        """Prompt and completion of a row."""
        mask = [True] * len(row.completion_ids) if row.loss_mask is None else list(row.loss_mask)
        return cls([*row.prompt_ids, *row.completion_ids], [False] * len(row.prompt_ids) + mask)

    def piece(self, start: int, end: int) -> Row | None:
        """The tokens of a span as a row of their own; None where none of them trains."""
        trains = [False, *self.trains[start + 1 : end]]
        if True not in trains:
            return None
        first = trains.index(True)
        mask = trains[first:]
        ids = self.ids[start:end]
        return Row(ids[:first], ids[first:], None if all(mask) else mask)


def pieces_of_row(row: Row, capacity: int) -> list[Row | None]:
    """A row in pieces of at most ``capacity`` tokens, see the module's docstring; itself where it fits.

    Args:
        row: at least one token trains.
        capacity: >= 2.

    Returns:
        Pieces in order; None for one of which no token trains.
    """
    size = len(row.prompt_ids) + len(row.completion_ids)
    if size <= capacity:
        return [row]
    document = Document.of(row)
    return [document.piece(start, min(start + capacity, size)) for start in range(0, size - 1, capacity - 1)]


def wrap(rows: Iterable[Row], capacity: int) -> Iterator[tuple[list[Row], int]]:
    """Rows one after another in packed rows of ``capacity`` tokens, cut where one is full.

    A packed row is a token short where a document would leave a single token in it, which nothing could be predicted
    from; the last one holds what is left.

    Args:
        rows: read as they are needed.
        capacity: >= 2.

    Yields:
        Documents of a packed row, and how many pieces were left out since the last one because nothing of them trains.
    """
    packed: list[Row] = []
    room, untrained = capacity, 0
    for row in rows:
        document = Document.of(row)
        size, start = len(document.ids), 0
        while start < size - 1:
            if room < 2:
                yield packed, untrained
                packed, room, untrained = [], capacity, 0
            end = min(start + room, size)
            piece = document.piece(start, end)
            if piece is None:
                untrained += 1
            else:
                packed.append(piece)
                room -= end - start
            start = end - 1
    if packed or untrained:
        yield packed, untrained


def pack(rows: Sequence[Row], capacity: int, strategy: str) -> tuple[list[list[Row]], int]:
    """Rows packed into examples of at most ``capacity`` tokens.

    Args:
        rows: documents, of each of which a token trains; not longer than ``capacity`` for ``bfd``.
        capacity: tokens of a packed row, >= 2.
        strategy: one of `PACKING_STRATEGIES`, or ``pieces``.

    Returns:
        Rows of each example, and the number of pieces that were left out because nothing of them trains.
    """
    if strategy == "wrapped":
        wrapped = list(wrap(rows, capacity))
        return [packed for packed, _ in wrapped if packed], sum(count for _, count in wrapped)
    pieces = [piece for row in rows for piece in pieces_of_row(row, capacity)]
    kept = [piece for piece in pieces if piece is not None]
    untrained = len(pieces) - len(kept)
    if strategy == "pieces":
        return [[piece] for piece in kept], untrained
    plan = best_fit_decreasing([len(piece.prompt_ids) + len(piece.completion_ids) for piece in kept], capacity)
    return [[kept[i] for i in chosen] for chosen in plan], untrained


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Plan bins by best-fit-decreasing: longest document first, into the fullest bin it still fits.

    Args:
        lengths: tokens per document, >= 1; longer ones count as ``capacity`` (the caller cuts them).
        capacity: tokens per bin, >= 1.

    Returns:
        Document numbers per bin, bins in the order they were opened.

    Raises:
        ValueError: a capacity or a length below 1.
    """
    if capacity < 1:
        raise ValueError(f"capacity={capacity!r}: allowed is a whole number >= 1")
    if any(length < 1 for length in lengths):
        raise ValueError("every document needs at least one token")
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, bin), sorted: the first that fits is the best fit
    for document in order:
        length = min(lengths[document], capacity)
        position = bisect.bisect_left(room, (length, -1))
        if position < len(room):
            left, number = room.pop(position)
            bins[number].append(document)
        else:
            left, number = capacity, len(bins)
            bins.append([document])
        bisect.insort(room, (left - length, number))
    return bins


def document_ids(position_ids: Tensor) -> Tensor:
    """Number of the document each token of a packed row belongs to: a new one where positions do not grow.

    Args:
        position_ids: [N, S] long, restarting (or falling) at every document.

    Returns:
        [N, S] long, counted from 0 in each row.
    """
    starts = position_ids[..., 1:] <= position_ids[..., :-1]
    return F.pad(starts.long().cumsum(dim=-1), (1, 0))


def doc_boundary_mask(position_ids: Tensor) -> Tensor:
    """Attention mask of packed rows: causal, and only within a document.

    Args:
        position_ids: [N, S] long, see `document_ids`.

    Returns:
        [N, 1, S, S] bool, True = the query (third axis) may see the key (last axis).
    """
    documents = document_ids(position_ids)
    same = documents.unsqueeze(-1) == documents.unsqueeze(-2)
    causal = torch.ones(same.shape[-2:], dtype=torch.bool, device=same.device).tril()
    return (same & causal).unsqueeze(-3)
