"""Several datasets as one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeAlias

from datasets import Dataset, IterableDataset, concatenate_datasets, interleave_datasets

logger = logging.getLogger(__name__)

Rows: TypeAlias = Dataset | IterableDataset


def columns_of(rows: Rows) -> list[str]:
    """Names of the columns; none where there is no row. Of a stream they are those of its first row."""
    if isinstance(rows, Dataset):
        return rows.column_names if len(rows) else []
    return list(next(iter(rows.take(1)), {}))


def concatenate(labels: Sequence[str], parts: Sequence[Rows]) -> Rows:
    """Every row of every dataset once.

    Args:
        labels: what messages call the datasets.
        parts: all in memory, or all streams; these take turns, so that none waits for the end of another.

    Raises:
        ValueError: datasets with different columns, or columns of different types.
    """
    _require_same_columns(labels, parts)
    streamed = isinstance(parts[0], IterableDataset)
    return _together(
        labels,
        parts,
        lambda: (
            interleave_datasets(list(parts), stopping_strategy="all_exhausted_without_replacement")
            if streamed
            else concatenate_datasets(list(parts))
        ),
    )


def mix(labels: Sequence[str], parts: Sequence[Rows], fractions: Sequence[float], seed: int) -> Rows:
    """Datasets in given shares; no row occurs twice.

    In memory the shares are exact: the mixture is the largest that the datasets allow, with the first rows of each.
    Of streams every next row is drawn from one of them with these probabilities, until the first of them ends.

    Args:
        labels: what messages call the datasets.
        parts: all in memory, or all streams.
        fractions: > 0, relative to their sum.
        seed: of the draw.

    Raises:
        ValueError: datasets that do not fit together, or a share so small that not one row is left.
    """
    _require_same_columns(labels, parts)
    shares = [fraction / sum(fractions) for fraction in fractions]
    if isinstance(parts[0], IterableDataset):
        # Shares may miss 1 by a rounding error, which is refused as a distribution.
        shares[-1] = 1.0 - sum(shares[:-1])
        return _together(
            labels,
            parts,
            lambda: interleave_datasets(
                list(parts), probabilities=shares, seed=seed, stopping_strategy="first_exhausted"
            ),
        )
    total = min(len(part) / share for part, share in zip(parts, shares, strict=True))
    kept = []
    for label, part, share in zip(labels, parts, shares, strict=True):
        count = round(share * total)
        if count == 0:
            raise ValueError(f"{label}: its share of {share:.2g} is less than a row of a mixture of {total:.0f}")
        if count < len(part):
            logger.warning("mixture: %d of the %d rows of %s, by its fraction", count, len(part), label)
        kept.append(part.select(range(count)))
    return concatenate(labels, kept)


def _require_same_columns(labels: Sequence[str], parts: Sequence[Rows]) -> None:
    columns = [columns_of(part) for part in parts]
    if any(set(names) != set(columns[0]) for names in columns):
        listed = "; ".join(f"{label} has {', '.join(names)}" for label, names in zip(labels, columns, strict=True))
        raise ValueError(f"datasets: a mixture needs the same columns in all, choose them with columns ({listed})")


def _together(labels: Sequence[str], parts: Sequence[Rows], join: Callable[[], Rows]) -> Rows:
    """What ``join`` makes of the parts; a message that names the column where their types differ."""
    try:
        return join()
    except ValueError as error:
        types = [part.features or {} for part in parts]
        for column in types[0]:
            for label, other in zip(labels, types, strict=True):
                if column in other and other[column] != types[0][column]:
                    raise ValueError(
                        f"datasets: column {column!r} is {types[0][column]} in {labels[0]} and {other[column]} in "
                        f"{label}"
                    ) from error
        raise
