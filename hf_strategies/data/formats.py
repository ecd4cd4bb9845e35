"""Datasets in token ids: every row read (see `data.rows`), cut or packed; what cannot train is counted by reason."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import repeat
from typing import Any

from datasets import Dataset, Features, List, Value
from datasets.fingerprint import Hasher

from hf_strategies.batch import Batch, Row
from hf_strategies.data.chat import prompt_of
from hf_strategies.data.packing import SPLITTING, pack
from hf_strategies.data.rows import Reading, columns_read, read_example, shape_of
from hf_strategies.data.truncation import size_of, truncated

ROW = {
    "prompt_ids": List(Value("int64")),
    "completion_ids": List(Value("int64")),
    "loss_mask": List(Value("bool")),
    "reward": Value("float64"),
    "old_logprobs": List(Value("float64")),
    "truncated": Value("bool"),
}
# Column of an encoded dataset: the rows of each example.
ENCODED = "rows"
# A further one: log-probabilities of the reference, as long as the completions of the example's rows.
REFERENCE = "ref_logprobs"
# What is known of an encoded example beside its rows.
ABOUT = ("reason", "present", "trained", "longest", "largest_id", "recorded")
FEATURES = Features(
    {"rows": List(ROW), "reason": Value("string"), **{name: Value("int64") for name in ABOUT if name != "reason"}}
)


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


@dataclass(frozen=True)
class ExampleEncoder:
    """Encodes one example of a dataset after the other.

    Attributes:
        tokenizer: the model's tokenizer.
        reading: how a row becomes tokens.
        max_length: most tokens of a row; None: no cut.
        truncation_mode: what becomes of longer rows, see `truncation`.
        min_rows: rows an example must have (2 for groups).
        name: of the dataset, for messages.
    """

    tokenizer: Any
    reading: Reading
    max_length: int | None = None
    truncation_mode: str = "keep_start"
    min_rows: int = 1
    name: str = "dataset"

    @classmethod
    def of(
        cls,
        tokenizer: Any,
        reading: Reading,
        max_length: int | None,
        truncation_mode: str,
        packing: str | None,
        min_rows: int,
        name: str,
    ) -> ExampleEncoder:
        """For rows that are packed afterwards: those that will be cut into pieces are not cut here."""
        in_pieces = packing in SPLITTING and truncation_mode == "keep_start"
        reading = replace(reading, header=truncation_mode == "keep_end")
        return cls(tokenizer, reading, None if in_pieces else max_length, truncation_mode, min_rows, name)

    def __call__(self, example: dict[str, Any], number: int) -> dict[str, Any]:
        """Rows of an example as plain fields, and what `ABOUT` names; ``reason`` is empty where they train.

        Raises:
            ValueError: an example that contradicts itself (naming its number).
        """
        try:
            read = read_example(example, self.tokenizer, self.reading)
            rows, reason = read.rows, None if read.rows else "empty"
            if rows and self.max_length is not None:
                bos = self.tokenizer.bos_token_id
                rows, reason = truncated(read, self.max_length, self.truncation_mode, bos)
        except Exception as error:  # of a template or a tokenizer, of any kind
            raise ValueError(f"{self.name} row {number}: {said(error)}") from error
        reason = reason or _untrainable(rows, self.min_rows)
        present = count_trained(read.rows)
        rows = [] if reason else rows
        return {
            "rows": [row_fields(row) for row in rows],
            "reason": reason or "",
            "present": present,
            "trained": count_trained(rows),
            "longest": max(map(size_of, rows), default=0),
            "largest_id": max((token for row in rows for token in (*row.prompt_ids, *row.completion_ids)), default=0),
            "recorded": int(any(row.old_logprobs is not None for row in rows)),
        }

    @property
    def fingerprint(self) -> str:
        """Changes with everything that rows are made from: tokenizer, template and options."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        words = backend.to_str() if backend is not None else sorted(self.tokenizer.get_vocab().items())
        template = getattr(self.tokenizer, "chat_template", None)
        special = sorted((name, str(token)) for name, token in self.tokenizer.special_tokens_map.items())
        options = asdict(replace(self, tokenizer=None))
        return Hasher.hash([words, template, special, options])


def encode_dataset(
    dataset: Dataset,
    tokenizer: Any,
    max_length: int | None,
    *,
    min_rows: int = 1,
    packing: str | None = None,
    truncation_mode: str = "keep_start",
    reading: Reading | None = None,
    num_proc: int | None = None,
    name: str = "dataset",
) -> Encoded:
    """Encode every example; what cannot train is left out and counted.

    The result of a dataset that lies in files is kept in datasets' cache, until the rows, the tokenizer, its chat
    template or an option change.

    Args:
        dataset: examples in one of the shapes of `data.rows`.
        tokenizer: the model's tokenizer.
        max_length: most tokens of a row. Of a packed row it is the length, of one that is cut into pieces the length
            of these; None: neither.
        min_rows: rows an example must have (2 for groups).
        packing: how rows share examples and what becomes of long ones, see `data.packing`; None: every example has its
            own rows, and long ones are what ``truncation_mode`` says.
        truncation_mode: see `truncation`.
        reading: how a row becomes tokens.
        num_proc: processes that encode; None: this one.
        name: of the dataset, for messages.

    Raises:
        ValueError: unknown columns, an example that contradicts itself (naming its number), or nothing left.
    """
    reading = reading or Reading()
    shape_of(columns_read(dataset.column_names, reading), reading.scored)
    encoder = ExampleEncoder.of(tokenizer, reading, max_length, truncation_mode, packing, min_rows, name)
    with _same_environment():
        mapped = dataset.map(
            encoder,
            with_indices=True,
            remove_columns=dataset.column_names,
            features=FEATURES,
            num_proc=num_proc if num_proc and len(dataset) >= num_proc else None,
            new_fingerprint=Hasher.hash([dataset._fingerprint, encoder.fingerprint]),
            desc=f"Encoding the {name}",
        )
    about = {column: mapped.with_format("numpy")[column][:] for column in ABOUT}
    dropped = Counter(str(reason) for reason in about["reason"] if reason)
    kept = [i for i, reason in enumerate(about["reason"]) if not reason]
    present, recorded = int(sum(about["present"])), int(sum(about["recorded"]))
    result = mapped.select(kept).select_columns(["rows"]) if dropped else mapped.select_columns(["rows"])
    if recorded not in (0, len(kept)):
        raise ValueError(f"old_logprobs is given in {recorded} of {len(kept)} rows: give it in all of them or none")
    trained, longest = int(sum(about["trained"])), int(max(about["longest"]))
    if packing and max_length and kept:
        rows = [Row(**fields) for example in result for fields in example["rows"]]
        packs, dropped["untrained_piece"] = pack(rows, max_length, packing)
        trained = sum(count_trained(rows) for rows in packs)
        longest = max((size_of(row) for rows in packs for row in rows), default=0)
        result = Dataset.from_list(
            [{"rows": [row_fields(row) for row in rows]} for rows in packs],
            features=Features({"rows": FEATURES["rows"]}),
        )
    if len(result) == 0:
        raise ValueError(f"no row of the {name} can train ({len(dataset)} rows, dropped: {dict(+dropped) or 'none'})")
    return Encoded(result, +dropped, longest, int(max(about["largest_id"])), trained, present - trained)


@contextmanager
def _same_environment() -> Iterator[None]:
    """Datasets with several processes puts a copy in the place of ``os.environ``; who holds it never sees that."""
    environment, before = os.environ, dict(os.environ)
    try:
        yield
    finally:
        os.environ = environment  # noqa: B003
        for name in environment.keys() - before.keys():
            del environment[name]


def said(error: Exception) -> str:
    """What an error says, with its kind where that is none of ours."""
    message = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
    return message if type(error) in (ValueError, KeyError) else f"{type(error).__name__}: {message}"


def row_fields(row: Row) -> dict[str, Any]:
    """A row as an encoded example holds it; `collate` makes one of it again."""
    values = {name: getattr(row, name) for name in ROW}
    return {name: list(value) if isinstance(value, list | tuple) else value for name, value in values.items()}


def count_trained(rows: list[Row]) -> int:
    """Tokens of rows that train."""
    return sum(len(row.completion_ids) if row.loss_mask is None else sum(row.loss_mask) for row in rows)


def _untrainable(rows: list[Row], min_rows: int) -> str | None:
    """The reason why an example cannot train."""
    if len(rows) < min_rows:
        return "group_too_small"
    paired = min_rows > 1 and len(rows) == 2
    empty = [not row.completion_ids for row in rows]
    if all(empty) or (paired and any(empty)):
        return "empty_completion"
    if count_trained(rows) == 0:
        return "all_masked"
    if paired and list(rows[0].completion_ids) == list(rows[1].completion_ids):
        return "equal_completions"
    if all(row.reward is not None and math.isnan(row.reward) for row in rows):
        return "no_reward"
    return None


def collate(examples: list[dict[str, Any]], pad_token_id: int) -> dict[str, Batch]:
    """Encoded examples -> ``{"batch": Batch}``; every example is a group of its own.

    A column `REFERENCE` holds, for each row of an example, the reference's log-probabilities.
    """
    rows = [
        Row(**{**fields, "group": number, "ref_logprobs": scores})
        for number, example in enumerate(examples)
        for fields, scores in zip(example["rows"], example.get(REFERENCE) or repeat(None))  # noqa: B905 - endless
    ]
    return {"batch": Batch.from_rows(rows, pad_token_id)}


def encode_prompts(
    dataset: Dataset, tokenizer: Any, name: str = "dataset", reading: Reading | None = None
) -> tuple[Dataset, int]:
    """Add ``prompt`` and ``prompt_ids`` to a dataset of prompts; the other columns travel along to the rewards.

    Returns:
        The dataset and the length of its longest prompt in tokens.

    Raises:
        ValueError: a row without a usable prompt (naming its number).
    """
    reading = reading or Reading()

    def encode(example: dict[str, Any], number: int) -> dict[str, Any]:
        try:
            prompt = prompt_of(example)
            return {"prompt": prompt, "prompt_ids": reading.encoder(tokenizer, example).prompt(prompt)}
        except Exception as error:  # of a template or a tokenizer, of any kind
            raise ValueError(f"{name} row {number}: {said(error)}") from error

    rows = [{**example, **encode(example, number)} for number, example in enumerate(dataset)]
    texts = [isinstance(row["prompt"], str) for row in rows]
    if len(set(texts)) > 1:
        other = texts.index(not texts[0])
        kinds = ("a text", "messages") if texts[0] else ("messages", "a text")
        raise ValueError(
            f"{name} row {other}: its prompt is {kinds[1]}, that of row 0 is {kinds[0]}: allowed is one kind"
        )
    return Dataset.from_list(rows), max(len(row["prompt_ids"]) for row in rows)
