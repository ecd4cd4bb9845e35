"""Streams of dataset rows, encoded and packed while they are read."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import Any

import datasets
from torch.utils.data import IterableDataset

from hf_strategies.batch import Row
from hf_strategies.data.formats import ExampleEncoder, row_fields, said
from hf_strategies.data.packing import pack, wrap
from hf_strategies.data.rows import columns_read, shape_of

logger = logging.getLogger(__name__)

# Examples that best-fit-decreasing looks at together; all of them is what a stream does not have.
BUFFER_SIZE = 1000


class EncodedStream(IterableDataset):
    """Examples in token ids, read again from the beginning whenever the rows end.

    Iterating always begins with the first row, so that skipping what a run has seen leads to the place where it
    stopped, also within a packed row and after several passes.

    Args:
        rows: a streaming dataset.
        encoder: of its examples.
        packing: see `data.packing`; best-fit-decreasing packs `BUFFER_SIZE` examples at a time.
        max_length: tokens of a packed row.
        prepared: what makes an example of a raw row, with its number.

    Attributes:
        dropped: reason -> examples left out since the iteration began.
        lost_tokens: tokens that would have trained, were they not cut off or their example not left out.
        check: called with most tokens of a row and the largest token id whenever one of them grows.

    Raises:
        ValueError: no rows, columns that cannot be read, or a first row that contradicts itself.
    """

    def __init__(
        self,
        rows: datasets.IterableDataset,
        encoder: ExampleEncoder,
        packing: str | None,
        max_length: int | None,
        prepared: Callable[[dict[str, Any], int], dict[str, Any]] | None = None,
    ) -> None:
        self.rows = rows
        self.encoder = encoder
        self.packing = packing if max_length is not None else None
        self.max_length = max_length or 0
        self.prepared = prepared or (lambda example, number: example)
        self.dropped: Counter[str] = Counter()
        self.lost_tokens = 0
        self.check: Callable[[int, int], None] = lambda longest, largest_id: None
        first = next(self._raw(), None)
        if first is None:
            raise ValueError(f"the {encoder.name} is empty")
        first = self.prepared(first, 0)
        self.columns = list(first)
        shape_of(columns_read(self.columns, encoder.reading), encoder.reading.scored)
        encoder(first, 0)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Endless."""
        self.dropped.clear()
        self.lost_tokens = 0
        rows = self._examples()
        if self.packing is None:
            examples: Iterator[list[Row]] = rows
        elif self.packing == "wrapped":
            examples = self._wrapped(row for example in rows for row in example)
        else:
            examples = self._packed(rows, self.packing)
        for example in examples:
            yield {"rows": [row_fields(row) for row in example]}

    def _raw(self) -> Iterator[dict[str, Any]]:
        """Rows of one pass as they are."""
        rows = iter(self.rows)
        for number in count():
            try:
                example = next(rows)
            except StopIteration:
                return
            except Exception as error:  # of the network, of a file's format, of the generator
                raise ValueError(f"{self.encoder.name}: cannot be read after {number} rows: {said(error)}") from error
            if not isinstance(example, dict):
                raise TypeError(
                    f"{self.encoder.name} row {number}: got {type(example).__name__} ({example!r}), allowed is a dict"
                )
            yield example

    def _examples(self) -> Iterator[list[Row]]:
        """Rows of every example that trains."""
        longest = largest = number = 0
        recorded = None
        for epoch in count():
            self.rows.set_epoch(epoch)
            before = number
            trained = False
            for example in self._raw():
                encoded = self.encoder(self.prepared(example, number), number)
                number += 1
                self._lose(encoded["present"] - encoded["trained"])
                if encoded["reason"]:
                    self._drop(encoded["reason"])
                    continue
                if encoded["longest"] > longest or encoded["largest_id"] > largest:
                    longest, largest = max(longest, encoded["longest"]), max(largest, encoded["largest_id"])
                    self.check(min(longest, self.max_length or longest), largest)
                if encoded["recorded"] != (encoded["recorded"] if recorded is None else recorded):
                    raise ValueError(
                        f"{self.encoder.name} row {number - 1}: old_logprobs is given in some rows: give it in all of "
                        "them or none"
                    )
                recorded = encoded["recorded"]
                trained = True
                yield [Row(**fields) for fields in encoded["rows"]]
            if epoch == 0:
                logger.info("%s: all %d rows are read; it begins anew", self.encoder.name, number)
            if not trained:
                raise ValueError(
                    f"no row of the {self.encoder.name} can train ({number - before} rows, dropped: "
                    f"{dict(self.dropped) or 'none'})"
                )

    def _lose(self, tokens: int) -> None:
        if tokens and not self.lost_tokens:
            logger.warning(
                "%s: tokens that would train are cut off or left out (tokens_lost counts them)", self.encoder.name
            )
        self.lost_tokens += tokens

    def _drop(self, reason: str, examples: int = 1) -> None:
        if not examples:
            return
        if reason not in self.dropped:
            logger.warning("%s: leaving out rows, %s (rows_dropped/%s counts them)", self.encoder.name, reason, reason)
        self.dropped[reason] += examples

    def _wrapped(self, rows: Iterator[Row]) -> Iterator[list[Row]]:
        for packed, untrained in wrap(rows, self.max_length):
            self._drop("untrained_piece", untrained)
            if packed:
                yield packed

    def _packed(self, examples: Iterator[list[Row]], packing: str) -> Iterator[list[Row]]:
        while buffer := list(islice(examples, BUFFER_SIZE)):
            packs, untrained = pack([row for rows in buffer for row in rows], self.max_length, packing)
            self._drop("untrained_piece", untrained)
            yield from packs
