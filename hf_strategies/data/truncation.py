"""Rows that are longer than ``max_length``: what is cut, and what is left out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hf_strategies.batch import Row
from hf_strategies.data.packing import Document
from hf_strategies.data.rows import Example

TRUNCATION_MODES = ("keep_start", "keep_end", "drop", "error")


def size_of(row: Row) -> int:
    """Tokens of a row, prompt and completion."""
    return len(row.prompt_ids) + len(row.completion_ids)


def truncated(example: Example, max_length: int, mode: str, bos_token_id: int | None) -> tuple[list[Row], str | None]:
    """Rows of at most ``max_length`` tokens, or the reason why there are none.

    keep_start cuts completions at their end; keep_end cuts prompts at their beginning, and documents; a
    beginning-of-sequence token stays, and so does what opens the answer. Rows of one prompt keep the same one.

    Args:
        example: rows of one dataset row.
        max_length: >= 2.
        mode: one of `TRUNCATION_MODES`.
        bos_token_id: of the tokenizer.

    Raises:
        ValueError: a row that is too long, with mode ``error``.
    """
    rows = example.rows
    longest = max(map(size_of, rows), default=0)
    if longest <= max_length:
        return rows, None
    if mode == "error":
        raise ValueError(
            f"a row of {longest} tokens is longer than max_length={max_length}: shorten it, or let truncation_mode be "
            "another than 'error'"
        )
    if mode == "drop":
        return rows, "too_long"
    if mode == "keep_end":
        return _keep_end(example, max_length, bos_token_id)
    if any(len(row.prompt_ids) >= max_length for row in rows):
        return rows, "all_masked" if example.header is None else "prompt_too_long"
    return [_cut_completion(row, max_length - len(row.prompt_ids)) for row in rows], None


def _keep_end(example: Example, max_length: int, bos_token_id: int | None) -> tuple[list[Row], str | None]:
    rows = example.rows
    begins = list(rows[0].prompt_ids[:1]) if rows[0].prompt_ids[0] == bos_token_id else []
    if example.header is None:
        return _end_of_document(rows[0], max_length, begins)
    room = max_length - max(len(row.completion_ids) for row in rows)
    prompt = list(rows[0].prompt_ids)
    if room < example.header + len(begins):
        return rows, "completion_too_long"
    kept = [*begins, *prompt[len(prompt) - room + len(begins) :]] if room < len(prompt) else prompt
    return [replace(row, prompt_ids=kept, truncated=size_of(row) > max_length) for row in rows], None


def _end_of_document(row: Row, max_length: int, begins: list[int]) -> tuple[list[Row], str | None]:
    document = Document.of(row)
    size = len(document.ids)
    start = size - max_length + len(begins)
    shortened = Document([*begins, *document.ids[start:]], [False] * len(begins) + document.trains[start:])
    piece = shortened.piece(0, max_length)
    return ([replace(piece, truncated=True)], None) if piece is not None else ([row], "all_masked")


def _cut_completion(row: Row, room: int) -> Row:
    def shortened(values: Any) -> Any:
        return None if values is None else list(values)[:room]

    return replace(
        row,
        completion_ids=list(row.completion_ids)[:room],
        loss_mask=shortened(row.loss_mask),
        old_logprobs=shortened(row.old_logprobs),
        truncated=len(row.completion_ids) > room,
    )
