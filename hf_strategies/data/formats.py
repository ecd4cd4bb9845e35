"""Datasets in token ids: every row read (see `data.rows`), cut or packed; what cannot train is counted by reason."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from datasets import Dataset

from hf_strategies.batch import Batch, Row
from hf_strategies.data.chat import encode_prompt, prompt_of
from hf_strategies.data.packing import SPLITTING, pack
from hf_strategies.data.rows import read_rows, shape_of


@dataclass
class Encoded:
    """A dataset in token ids.

    Attributes:
        dataset: one column ``rows``, a list of `Row` fields per example.
        dropped: reason -> number of examples left out.
        longest: most tokens (prompt and completion) of a row.
        largest_id: largest token id of all rows.
        trained_tokens: tokens that train in all rows together.
        lost_tokens: tokens that would train, were they not cut off or their example not left out.
    """

    dataset: Dataset
    dropped: Counter[str] = field(default_factory=Counter)
    longest: int = 0
    largest_id: int = 0
    trained_tokens: int = 0
    lost_tokens: int = 0


def encode_dataset(
    dataset: Dataset,
    tokenizer: Any,
    max_length: int | None,
    *,
    min_rows: int = 1,
    packing: str | None = None,
    scored: bool | None = None,
    name: str = "dataset",
) -> Encoded:
    """Encode every example; what cannot train is left out and counted.

    Args:
        dataset: examples in one of the shapes of `data.rows`.
        tokenizer: the model's tokenizer.
        max_length: most tokens of a row; longer completions are cut, a prompt that leaves no room drops the example.
            Of a packed row it is the length, of one that is cut into pieces the length of these; None: neither.
        min_rows: rows an example must have (2 for groups).
        packing: how rows share examples and what becomes of long ones, see `data.packing`; None: every example has its
            own rows, and long ones are cut off.
        scored: whether rows must carry rewards, see `shape_of`.
        name: of the dataset, for messages.

    Raises:
        ValueError: unknown columns, an example that contradicts itself (naming its number), or nothing left.
    """
    shape_of(dataset.column_names, scored)
    dropped: Counter[str] = Counter()
    examples: list[list[Row]] = []
    splits = packing in SPLITTING
    present = 0
    for number, example in enumerate(dataset):
        try:
            rows = read_rows(example, tokenizer, scored)
        except (ValueError, KeyError) as error:
            raise ValueError(f"{name} row {number}: {error}") from error
        present += _count_trained(rows)
        reason = None if rows else "empty"
        if rows:
            rows, reason = _fit(rows, None if splits else max_length, min_rows)
        if reason:
            dropped[reason] += 1
        else:
            examples.append(rows)
    if packing and max_length:
        examples, dropped["untrained_piece"] = pack([row for rows in examples for row in rows], max_length, packing)
    if not examples:
        raise ValueError(f"no row of the {name} can train ({len(dataset)} rows, dropped: {dict(+dropped) or 'none'})")
    recorded = sum(any(row.old_logprobs is not None for row in rows) for rows in examples)
    if recorded not in (0, len(examples)):
        raise ValueError(
            f"old_logprobs is given in {recorded} of {len(examples)} rows: give it in all of them or none"
        )
    trained = sum(_count_trained(rows) for rows in examples)
    longest = max(len(row.prompt_ids) + len(row.completion_ids) for rows in examples for row in rows)
    return Encoded(
        Dataset.from_list([{"rows": [asdict(row) for row in rows]} for rows in examples]),
        +dropped,
        longest,
        max(max(*row.prompt_ids, *row.completion_ids, 0) for rows in examples for row in rows),
        trained,
        present - trained,
    )


def _count_trained(rows: list[Row]) -> int:
    return sum(len(row.completion_ids) if row.loss_mask is None else sum(row.loss_mask) for row in rows)


def _fit(rows: list[Row], max_length: int | None, min_rows: int) -> tuple[list[Row], str | None]:
    """Rows cut to ``max_length``, or the reason why the example cannot train."""
    if max_length is not None:
        if any(len(row.prompt_ids) >= max_length for row in rows):
            return rows, "prompt_too_long"
        rows = [_cut_completion(row, max_length - len(row.prompt_ids)) for row in rows]
    if len(rows) < min_rows:
        return rows, "group_too_small"
    paired = min_rows > 1 and len(rows) == 2
    empty = [not row.completion_ids for row in rows]
    if all(empty) or (paired and any(empty)):
        return rows, "empty_completion"
    if paired and list(rows[0].completion_ids) == list(rows[1].completion_ids):
        return rows, "equal_completions"
    if all(row.reward is not None and math.isnan(row.reward) for row in rows):
        return rows, "no_reward"
    return rows, None


def _cut_completion(row: Row, room: int) -> Row:
    def shortened(values: Any) -> Any:
        return None if values is None else list(values)[:room]

    return Row(
        prompt_ids=row.prompt_ids,
        completion_ids=list(row.completion_ids)[:room],
        loss_mask=shortened(row.loss_mask),
        reward=row.reward,
        old_logprobs=shortened(row.old_logprobs),
        truncated=len(row.completion_ids) > room,
    )


def collate(examples: list[dict[str, Any]], pad_token_id: int) -> dict[str, Batch]:
    """Encoded examples -> ``{"batch": Batch}``; every example is a group of its own."""
    rows = [
        Row(**{**fields, "group": number}) for number, example in enumerate(examples) for fields in example["rows"]
    ]
    return {"batch": Batch.from_rows(rows, pad_token_id)}


def encode_prompts(dataset: Dataset, tokenizer: Any, name: str = "dataset") -> tuple[Dataset, int]:
    """Add ``prompt`` and ``prompt_ids`` to a dataset of prompts; the other columns travel along to the rewards.

    Returns:
        The dataset and the length of its longest prompt in tokens.

    Raises:
        ValueError: a row without a usable prompt (naming its number).
    """

    def encode(example: dict[str, Any], number: int) -> dict[str, Any]:
        try:
            prompt = prompt_of(example)
            return {"prompt": prompt, "prompt_ids": encode_prompt(tokenizer, prompt)}
        except (ValueError, KeyError) as error:
            message = error.args[0] if error.args else error
            raise ValueError(f"{name} row {number}: {message}") from error

    rows = [{**example, **encode(example, number)} for number, example in enumerate(dataset)]
    return Dataset.from_list(rows), max(len(row["prompt_ids"]) for row in rows)
