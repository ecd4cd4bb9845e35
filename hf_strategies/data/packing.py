"""Packing documents into rows of a fixed number of tokens."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


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


def cut(token_ids: Sequence[int], capacity: int) -> list[list[int]]:
    """Pieces of at most ``capacity`` tokens; nothing is lost."""
    return [list(token_ids[start : start + capacity]) for start in range(0, len(token_ids), capacity)]


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
