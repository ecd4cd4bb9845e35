"""Where rows come from: the Hub, local files and folders, generated tasks, and mixtures of these."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, IterableDataset, load_dataset, load_from_disk

from hf_strategies.data.arguments import DataArguments, DatasetConfig
from hf_strategies.data.mixtures import Rows, columns_of, concatenate, mix
from hf_strategies.data.reasoning import PREFIX, load_reasoning_gym

FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text"}
# Either lies in a folder that `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote.
SAVED = ("state.json", "dataset_dict.json")
# Held-out problems of a generated task come from another seed than any training seed in use.
HELD_OUT_SEED = 2_000_000_011
# What the fields of `DatasetConfig` are called where there is one dataset.
OPTIONS_OF_ONE_DATASET = {
    "path": "dataset_name",
    "name": "dataset_config",
    "split": "dataset_train_split",
    "columns": "dataset_columns",
}


def load_rows(data: DataArguments, seed: int) -> tuple[Rows, Dataset | None]:
    """Training and evaluation rows of the named data.

    Args:
        data: which; not the embedded default.
        seed: of generated problems, of what is held out, and of the order of a stream.

    Returns:
        Rows to train on, a stream if ``data.streaming``; and rows to evaluate on, always in memory or memory-mapped.
        Of a stream they are its first ``held_out_rows``, or the first of its test split.

    Raises:
        ValueError: data that cannot be read, a split or column that does not exist (the message lists those that
            do), no rows, or a mixture whose datasets do not fit together.
    """
    if data.datasets:
        parts = [
            _Source(config, f"datasets[{i}].{{}}".format, data, seed).rows() for i, config in enumerate(data.datasets)
        ]
        labels = [f"datasets[{i}] ({config.path})" for i, config in enumerate(data.datasets)]
        fractions = [config.fraction for config in data.datasets if config.fraction is not None]
        together = mix(labels, parts, fractions, seed) if fractions else concatenate(labels, parts)
        return _held_out(together, data, seed)
    assert data.dataset_name is not None
    if data.dataset_name.startswith(PREFIX):
        train = _generated("dataset_name", data.dataset_name, data.task_size, seed)
        count = data.held_out_rows
        return train, _generated("dataset_name", data.dataset_name, count, HELD_OUT_SEED) if count else None
    config = DatasetConfig(
        data.dataset_name, data.dataset_config, split=data.dataset_train_split, columns=data.dataset_columns
    )
    source = _Source(config, OPTIONS_OF_ONE_DATASET.__getitem__, data, seed)
    train_rows = source.rows()
    test = data.dataset_test_split or "test"
    if data.dataset_test_split is None and (test not in source.splits or test in _names_of(config.split)):
        return _held_out(train_rows, data, seed)
    heldout = source.rows(test, "dataset_test_split")
    if isinstance(heldout, IterableDataset):
        heldout = _in_memory(heldout, data.held_out_rows) if data.held_out_rows else None
    return _shuffled(train_rows, data, seed), heldout


class _Source:
    """All splits of one dataset.

    Args:
        config: which one.
        called: option name of a field of ``config``, for messages.
        data: see `load_rows`.
        seed: see `load_rows`.
    """

    def __init__(self, config: DatasetConfig, called: Callable[[str], str], data: DataArguments, seed: int) -> None:
        self.config = config
        self.called = called
        self.path = Path(config.path).expanduser()
        self.streaming = data.streaming
        self.options: dict[str, Any] | None = None  # of `load_dataset`, where it reads the data
        if config.path.startswith(PREFIX):
            if data.streaming:
                raise ValueError(f"{self.label}: allowed with streaming are datasets that are not generated")
            self.splits: Mapping[str, Rows] = {"train": _generated(called("path"), config.path, data.task_size, seed)}
        elif self.path.is_dir() and any((self.path / name).is_file() for name in SAVED):
            self.splits = self._saved()
        else:
            self.options = self._load_options()
            with self._reading():
                self.splits = load_dataset(**self.options, streaming=data.streaming)

    @property
    def label(self) -> str:
        """Option and value that name the dataset."""
        return f"{self.called('path')}={self.config.path!r}"

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of many kinds: of the network, of the file's format, of the Hub
            reason = error.__cause__ or error
            raise ValueError(f"{self.label} cannot be read: {type(reason).__name__}: {reason}") from error

    def rows(self, split: str | None = None, field: str | None = None) -> Rows:
        """Rows of a split, the config's own by default, with the columns that the config keeps.

        Args:
            split: another one.
            field: option that names it.
        """
        split, field = split or self.config.split, field or self.called("split")
        rows, kept = self._split(split, field), self.config.columns
        with self._reading():  # of a stream, for the first time
            columns = columns_of(rows)
        if not columns:
            raise ValueError(f"{field}={split!r} of {self.config.path!r} has no rows")
        missing = [name for name in kept or [] if name not in columns]
        if missing:
            name = self.called("columns")
            raise ValueError(f"{name}: {', '.join(missing)} not found, the dataset has {', '.join(columns)}")
        return rows.select_columns(kept) if kept else rows

    def _split(self, split: str, field: str) -> Rows:
        if split in self.splits:
            return self.splits[split]
        allowed = ", ".join(self.splits)
        if any(name not in self.splits for name in _names_of(split)):
            raise ValueError(f"{field}={split!r}: allowed are {allowed}")
        if self.options is None or self.streaming:
            raise ValueError(
                f"{field}={split!r}: allowed are whole splits ({allowed}), a stream, a saved dataset or a generated "
                "one cannot be cut by name"
            )
        try:
            return load_dataset(**self.options, split=split)
        except (ValueError, AssertionError) as error:
            raise ValueError(f"{field}={split!r} is no part of a split: {error}") from error

    def _saved(self) -> Mapping[str, Rows]:
        """Splits of a folder that `save_to_disk` wrote."""
        with self._reading():
            loaded = load_from_disk(str(self.path))
        splits = loaded if isinstance(loaded, DatasetDict) else {"train": loaded}
        return {name: rows.to_iterable_dataset() for name, rows in splits.items()} if self.streaming else splits

    def _load_options(self) -> dict[str, Any]:
        """Arguments of `load_dataset`."""
        config, path = self.config, self.path
        given = {name: getattr(config, name) for name in ("name", "data_dir", "data_files")}
        given = {name: value for name, value in given.items() if value is not None}
        if config.path in FORMATS.values() and not path.exists():
            if not given.keys() & {"data_dir", "data_files"}:
                raise ValueError(f"{self.label} names a format: data_files or data_dir is needed with it")
            return {"path": config.path, **given}
        if path.is_file() or (path.suffix in FORMATS and not path.exists()):
            if not path.exists():
                raise ValueError(f"{self.label}: no such file")
            if path.suffix not in FORMATS:
                raise ValueError(f"{self.label}: allowed are files that end in {', '.join(FORMATS)}")
            if given:
                name, value = next(iter(given.items()))
                raise ValueError(f"{self.called(name)}={value!r}: a local file has no configurations or parts")
            if not path.stat().st_size:
                raise ValueError(f"{self.label}: the file is empty")
            return {"path": FORMATS[path.suffix], "data_files": {"train": escape(str(path))}}
        if not path.exists() and config.path.startswith((".", "/", "~")):
            raise ValueError(f"{self.label}: no such file or folder")
        return {"path": str(path) if path.is_dir() else config.path, **given}


def _names_of(split: str) -> list[str]:
    """Splits that ``train[:10%]+validation`` is made of."""
    return [part.partition("[")[0].strip() for part in split.split("+")]


def _generated(label: str, spec: str, size: int, seed: int) -> Dataset:
    try:
        return load_reasoning_gym(spec, size, seed)
    except ValueError as error:
        raise ValueError(f"{label}={spec!r}: {error}") from error


def _held_out(rows: Rows, data: DataArguments, seed: int) -> tuple[Rows, Dataset | None]:
    """Rows without those that are held out, and these."""
    count = data.held_out_rows
    if count == 0:
        return _shuffled(rows, data, seed), None
    if isinstance(rows, IterableDataset):
        heldout, rest = _in_memory(rows, count), rows.skip(count)
        if not columns_of(rest):
            raise ValueError(f"held_out_rows={count}: allowed is less than the stream's {len(heldout)} rows")
        return _shuffled(rest, data, seed), heldout
    if count >= len(rows):
        raise ValueError(f"held_out_rows={count}: allowed is less than the dataset's {len(rows)} rows")
    parts = rows.train_test_split(test_size=count, seed=seed)
    return parts["train"], parts["test"]


def _shuffled(rows: Rows, data: DataArguments, seed: int) -> Rows:
    """A stream in the order of its buffer; rows that are all there are shuffled by the trainer."""
    if isinstance(rows, IterableDataset) and data.shuffle_buffer_size > 1:
        return rows.shuffle(seed=seed, buffer_size=data.shuffle_buffer_size)
    return rows


def _in_memory(rows: IterableDataset, count: int) -> Dataset:
    """The first rows of a stream."""
    try:
        return Dataset.from_list(list(rows.take(count)), features=rows.features)
    except Exception as error:  # of the network, of a file's format
        raise ValueError(
            f"the first {count} rows, which are held out, cannot be read: {type(error).__name__}: {error}"
        ) from error
