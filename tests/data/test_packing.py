"""Plans, pieces and masks of packed rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_strategies.batch import Row
from hf_strategies.data.packing import (
    SPLITTING,
    best_fit_decreasing,
    doc_boundary_mask,
    document_ids,
    pack,
    pieces_of_row,
    wrap,
)


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


def spans(rows: Sequence[Row | None]) -> list[Any]:
    """Rows as (prompt, completion), with a mask where not everything trains."""
    return [
        row and (list(row.prompt_ids), list(row.completion_ids), *([list(row.loss_mask)] if row.loss_mask else []))
        for row in rows
    ]


def test_pieces_by_hand() -> None:
    """Every piece begins with a token of the piece before it, so that 2 to 6 train once each."""
    assert spans(pieces_of_row(Row([1], [2, 3, 4, 5, 6]), 3)) == [([1], [2, 3]), ([3], [4, 5]), ([5], [6])]
    assert spans(pieces_of_row(Row([1], [2, 3, 4]), 3)) == [([1], [2, 3]), ([3], [4])]
    assert spans(pieces_of_row(Row([1], [2, 3]), 3)) == [([1], [2, 3])]
    assert spans(pieces_of_row(Row([1], [2, 3]), 2)) == [([1], [2]), ([2], [3])]


def test_pieces_of_what_trains_in_part() -> None:
    """A piece of a prompt alone trains nothing; context before the first trained token is a prompt; masks stay."""
    row = Row([1, 2, 3], [4, 5, 6, 7, 8], [True, True, False, True, False])
    assert pieces_of_row(row, 8) == [row]
    assert spans(pieces_of_row(row, 3)) == [None, ([3], [4, 5]), ([5, 6], [7]), None]
    assert spans(pieces_of_row(row, 5)) == [([1, 2, 3], [4, 5]), ([5, 6], [7, 8], [True, False])]


def test_wrapped_by_hand() -> None:
    """Documents of 5, 3 and 4 tokens in rows of 4: 1 2 3 4 | 4 5, 11 12 | 12 13, 21 22 | 22 23 24."""
    rows = [Row([1], [2, 3, 4, 5]), Row([11], [12, 13]), Row([21], [22, 23, 24])]
    got = list(wrap(iter(rows), 4))
    assert [spans(packed) for packed, _ in got] == [
        [([1], [2, 3, 4])],
        [([4], [5]), ([11], [12])],
        [([12], [13]), ([21], [22])],
        [([22], [23, 24])],
    ]
    assert [untrained for _, untrained in got] == [0, 0, 0, 0]
    # Rows of 3: the second document would begin with a single token in the second row.
    assert [spans(packed) for packed, _ in wrap(rows[:2], 3)] == [
        [([1], [2, 3])],
        [([3], [4, 5])],
        [([11], [12, 13])],
    ]
    # What no token of trains takes no room.
    got = list(wrap([Row([1, 2, 3, 4, 5], [6]), Row([7], [8])], 3))
    assert [(spans(packed), untrained) for packed, untrained in got] == [([([5], [6])], 2), ([([7], [8])], 0)]


def test_wrapping_reads_no_further_than_it_must() -> None:
    """Two documents of 3 tokens fill a row of 4, with the cut within the second; a third is not asked for."""

    def endless() -> Iterator[Row]:
        for number in range(10, 40, 10):
            assert number < 30
            yield Row([number], [number + 1, number + 2])

    first, _ = next(wrap(endless(), 4))
    assert spans(first) == [([10], [11, 12])]


rows_of = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.booleans(), min_size=1, max_size=25).filter(any)), max_size=12
)


@settings(max_examples=200, deadline=None)
@given(rows_of, st.integers(2, 12))
def test_every_token_trains_once(shapes: list[tuple[int, list[bool]]], capacity: int) -> None:
    """Whatever is packed how: each trained token of each document once, after the tokens that it followed there."""
    rows = [
        Row([1000 * i + j for j in range(p)], [1000 * i + p + j for j in range(len(mask))], mask)
        for i, (p, mask) in enumerate(shapes)
    ]
    expected = sorted(t for row in rows for t, m in zip(row.completion_ids, row.loss_mask or [], strict=True) if m)
    for strategy in (*SPLITTING, "bfd"):
        fitting = rows if strategy != "bfd" else [row for row in rows if total(row) <= capacity]
        examples, untrained = pack(fitting, capacity, strategy)
        documents = [row for example in examples for row in example]
        trained = []
        for row in documents:
            ids = [*row.prompt_ids, *row.completion_ids]
            assert ids == list(range(ids[0], ids[0] + len(ids)))
            mask = [True] * len(row.completion_ids) if row.loss_mask is None else row.loss_mask
            trained += [t for t, m in zip(row.completion_ids, mask, strict=True) if m]
        if strategy != "bfd":
            assert sorted(trained) == expected
        else:
            assert (sorted(documents, key=lambda row: row.prompt_ids[0]), untrained) == (fitting, 0)
        assert all(0 < sum(map(total, example)) <= capacity for example in examples)
        assert strategy != "pieces" or all(len(example) == 1 for example in examples)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(2, 40), min_size=1, max_size=12), st.integers(2, 12))
def test_wrapped_rows_are_full(lengths: list[int], capacity: int) -> None:
    """All but the last, up to a single token that could not be predicted from anything."""
    examples, untrained = pack([Row([1], [2] * (length - 1)) for length in lengths], capacity, "wrapped")
    assert untrained == 0
    assert {sum(map(total, example)) for example in examples[:-1]} <= {capacity, capacity - 1}


def total(row: Row) -> int:
    return len(row.prompt_ids) + len(row.completion_ids)


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
