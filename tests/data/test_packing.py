"""Plans, pieces and masks of packed rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_strategies.data.packing import best_fit_decreasing, cut, doc_boundary_mask, document_ids


def test_best_fit_by_hand() -> None:
    # Capacity 10, longest first: 7 and 6 open bins with 3 and 4 left; 4 fits the second, 3 the first, 2 opens a third.
    assert best_fit_decreasing([2, 6, 3, 7, 4], 10) == [[3, 2], [1, 4], [0]]
    # Capacity 20: 14 leaves 6, 12 and 7 leave 1: a document of 1 goes where it fits best, not where it fits first.
    assert best_fit_decreasing([14, 12, 7, 1], 20) == [[0], [1, 2, 3]]
    # Equal lengths keep their order; what is too long fills a bin; an exact fit closes one.
    assert best_fit_decreasing([5, 5, 5], 10) == [[0, 1], [2]]
    assert best_fit_decreasing([30, 10, 1], 10) == [[0], [1], [2]]
    assert best_fit_decreasing([], 10) == []


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 40), max_size=40), st.integers(1, 32))
def test_every_document_is_placed_once(lengths: list[int], capacity: int) -> None:
    bins = best_fit_decreasing(lengths, capacity)
    assert sorted(i for members in bins for i in members) == list(range(len(lengths)))
    fill = [sum(min(lengths[i], capacity) for i in members) for members in bins]
    assert all(total <= capacity for total in fill)
    # A bin is opened only by a document that fits no other: two bins never fit into one.
    assert sum(total <= capacity / 2 for total in fill) <= 1


@pytest.mark.parametrize("capacity", [0, -3])
def test_bad_capacity(capacity: int) -> None:
    with pytest.raises(ValueError, match=rf"^capacity={capacity}: allowed is a whole number >= 1$"):
        best_fit_decreasing([1], capacity)


def test_empty_documents_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^every document needs at least one token$"):
        best_fit_decreasing([3, 0], 4)


def test_cut() -> None:
    assert cut([1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4], [5]]
    assert cut([1, 2, 3, 4], 2) == [[1, 2], [3, 4]]
    assert cut((1, 2), 5) == [[1, 2]]
    assert cut([], 3) == []


def test_document_ids_by_hand() -> None:
    # A restart, a fall to a number above 0 and a repeated position start documents; a gap forward does not.
    positions = torch.tensor([[0, 1, 0, 1, 2], [4, 5, 2, 3, 3], [0, 1, 7, 8, 9], [0, 0, 0, 0, 0]])
    assert document_ids(positions).tolist() == [[0, 0, 1, 1, 1], [0, 0, 1, 1, 2], [0] * 5, [0, 1, 2, 3, 4]]
    assert document_ids(torch.tensor([[3]])).tolist() == [[0]]


def test_boundary_mask_by_hand() -> None:
    """Pitfall D-69: a token sees itself and what came before it in its own document, nothing else."""
    mask = doc_boundary_mask(torch.tensor([[0, 1, 0, 1]]))
    assert mask.dtype == torch.bool
    assert mask.long().tolist() == [[[[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]]]
    assert doc_boundary_mask(torch.zeros(3, 5, dtype=torch.long)).shape == (3, 1, 5, 5)


def test_the_mask_isolates_documents() -> None:
    """Pitfall D-69: attention over a packed row gives what attention over each document alone gives."""
    generator = torch.Generator().manual_seed(0)
    lengths = [3, 1, 4]
    q, k, v = torch.randn(3, 1, 1, sum(lengths), 8, generator=generator, dtype=torch.float64)
    positions = torch.tensor([[i for length in lengths for i in range(length)]])
    attend = torch.nn.functional.scaled_dot_product_attention
    packed = attend(q, k, v, attn_mask=doc_boundary_mask(positions))
    alone = [
        attend(a, b, c, is_causal=True)
        for a, b, c in zip(q.split(lengths, 2), k.split(lengths, 2), v.split(lengths, 2), strict=True)
    ]
    torch.testing.assert_close(packed, torch.cat(alone, dim=2), atol=1e-12, rtol=0)
