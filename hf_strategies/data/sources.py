"""Where rows come from: the Hub, local files and folders, generated tasks, and mixtures of these."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, IterableDataset, load_dataset, load_from_disk

from hf_strategies.data.mixtures import Rows, columns_of, concatenate, mix
from hf_strategies.data.reasoning import PREFIX, load_reasoning_gym
from hf_strategies.options import Options, option

FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text"}
# Either lies in a folder that `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote.
SAVED = ("state.json", "dataset_dict.json")
# Held-out problems of a generated task come from another seed than any training seed in use.
HELD_OUT_SEED = 2_000_000_011
ALLOWED = "a Hub id, a local file or folder, or reasoning_gym:<task>"


@dataclass
class DatasetConfig(Options):
    """One dataset of a mixture."""

    path: str = option("", f"What to read: {ALLOWED}; json, csv, parquet or text with data_files.")
    name: str | None = option(None, "Configuration of a Hub dataset.")
    data_dir: str | None = option(None, "Folder within the dataset.")
    data_files: str | list[str] | dict[str, str] | None = option(None, "Files to read, names or patterns.")
    split: str = option("train", "Split; also a part of one, train[:10%].")
    columns: list[str] | None = option(None, "Columns to keep; unset: all.")
    fraction: float | None = option(
        None, "Share of the mixture, > 0; shares are relative to their sum. Set for all datasets of a mixture or none."
    )

    def validate(self) -> None:  # noqa: D102 - see Options
        super().validate()
        if not isinstance(self.path, str) or not self.path.strip():
            raise ValueError(f"path={self.path!r}: allowed is {ALLOWED}")
        if not isinstance(self.data_files, str | list | dict | None):
            raise ValueError(
                f"data_files={self.data_files!r}: allowed is a text, a list or a mapping of split to text"
            )
        if self.fraction is not None:
            self.require_number("fraction", above=0.0)
        _require_columns("columns", self.columns)


@dataclass
class DataArguments(Options):
    """Which data."""

    dataset_name: str | None = option(
        None,
        "Hub id, local file (json, jsonl, parquet, csv, txt) or folder, or reasoning_gym:<task>; unset, and without "
        "datasets: the embedded default.",
    )
    datasets: list[DatasetConfig] = option(
        [],
        "A mixture instead of dataset_name. In YAML a list of mappings with path, name, data_dir, data_files, split, "
        "columns, fraction; on the command line paths alone.",
    )
    dataset_config: str | None = option(None, "Configuration of a Hub dataset.")
    dataset_train_split: str = option("train", "Split to train on; also a part of one, train[:10%].")
    dataset_test_split: str | None = option(
        None, "Split to evaluate on; unset: test where there is one, else held_out_rows of the training rows."
    )
    dataset_columns: list[str] | None = option(None, "Columns of dataset_name to keep; unset: all.")
    streaming: bool = option(False, "Read rows as they are needed instead of all at the start; needs max_steps.")
    shuffle_buffer_size: int = option(
        1000, "Rows of a stream that the next one is drawn from, >= 1; 1 keeps the order of the stream."
    )
    held_out_rows: int = option(
        256, "Rows kept for evaluation when the dataset has no test split; 0: none. The embedded data has 256 at most."
    )
    task_size: int = option(2000, "Problems generated for a reasoning_gym task.")

    def validate(self) -> None:  # noqa: D102 - see Options
        super().validate()
        self.require_integer("held_out_rows", 0)
        self.require_integer("task_size", 1)
        self.require_integer("shuffle_buffer_size", 1)
        if self.dataset_name is not None and not self.dataset_name.strip():
            raise ValueError(f"dataset_name={self.dataset_name!r}: allowed is {ALLOWED}")
        if self.dataset_test_split == self.dataset_train_split:
            raise ValueError(
                f"dataset_test_split={self.dataset_test_split!r} is dataset_train_split too: what is trained on "
                "is not held out"
            )
        _require_columns("dataset_columns", self.dataset_columns)
        if not isinstance(self.datasets, list):
            raise ValueError(f"datasets={self.datasets!r}: allowed is a list of datasets")
        self.datasets = [_dataset_config(f"datasets[{i}]", given) for i, given in enumerate(self.datasets)]
        if self.datasets and self.dataset_name is not None:
            raise ValueError(f"dataset_name={self.dataset_name!r} beside datasets: allowed is one of the two")
        self._require_effect()
        fractions = [source.fraction for source in self.datasets]
        if None in fractions and any(fraction is not None for fraction in fractions):
            raise ValueError(f"fraction={fractions!r} of datasets: allowed is one for every dataset, or none at all")

    def _require_effect(self) -> None:
        """Refuse options that the named data has no use for."""
        about_one_dataset = {
            "dataset_config": None,
            "dataset_train_split": "train",
            "dataset_test_split": None,
            "dataset_columns": None,
        }
        unused: dict[str, Any] = {}
        if self.datasets:
            unused, why = about_one_dataset, "datasets have name, split and columns of their own"
        elif self.dataset_name is None:
            unused, why = about_one_dataset | {"streaming": False}, "it belongs to a dataset_name, which is unset"
        elif self.dataset_name.startswith(PREFIX):
            unused, why = about_one_dataset | {"streaming": False}, "problems of a task are generated"
        for name, default in unused.items():
            if getattr(self, name) != default:
                raise ValueError(f"{name}={getattr(self, name)!r} has no effect: {why}")

    @property
    def is_embedded(self) -> bool:
        """Whether no data was named, so that the embedded default holds."""
        return self.dataset_name is None and not self.datasets

    @property
    def paths(self) -> list[str]:
        """Every dataset that was named."""
        return [source.path for source in self.datasets] if self.dataset_name is None else [self.dataset_name]

    @property
    def label(self) -> str:
        """The named data, for messages."""
        return " + ".join(self.paths)


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
            _load(f"datasets[{i}]", "path", source, data, seed).only(f"datasets[{i}].split", source)
            for i, source in enumerate(data.datasets)
        ]
        fractions = [source.fraction for source in data.datasets]
        labels = [f"datasets[{i}] ({source.path})" for i, source in enumerate(data.datasets)]
        if None in fractions:
            return _held_out(concatenate(labels, parts), data, seed)
        return _held_out(mix(labels, parts, [f for f in fractions if f is not None], seed), data, seed)
    assert data.dataset_name is not None
    source = DatasetConfig(
        data.dataset_name, data.dataset_config, split=data.dataset_train_split, columns=data.dataset_columns
    )
    if data.dataset_name.startswith(PREFIX):
        train = _generated("dataset_name", data.dataset_name, data.task_size, seed)
        count = data.held_out_rows
        return train, _generated("dataset_name", data.dataset_name, count, HELD_OUT_SEED) if count else None
    splits = _load("dataset_name", None, source, data, seed)
    train = splits.only("dataset_train_split", source)
    test = data.dataset_test_split or "test"
    if data.dataset_test_split is None and (test not in splits.loaded or test == source.split):
        return _held_out(train, data, seed)
    heldout = splits.only("dataset_test_split", DatasetConfig(source.path, split=test, columns=source.columns))
    if isinstance(heldout, IterableDataset):
        heldout = _in_memory(heldout, data.held_out_rows) if data.held_out_rows else None
    return _shuffled(train, data, seed), heldout


@dataclass
class _Splits:
    """Splits of one dataset.

    Attributes:
        loaded: split -> rows.
        again: reads a part of a split, for datasets that can be cut by their split's name.
    """

    loaded: Mapping[str, Rows]
    again: Callable[[str], Rows] | None

    def only(self, field: str, source: DatasetConfig) -> Rows:
        """The rows of the source's split, with its columns."""
        rows = self._split(field, source.split)
        columns = columns_of(rows)
        if not columns:
            raise ValueError(f"{field}={source.split!r} of {source.path!r} has no rows")
        missing = [name for name in source.columns or [] if name not in columns]
        if missing:
            where = field.rpartition(".")[0]
            name = f"{where}.columns" if where else "dataset_columns"
            raise ValueError(f"{name}: {', '.join(missing)} not found, the dataset has {', '.join(columns)}")
        return rows.select_columns(source.columns) if source.columns else rows

    def _split(self, field: str, split: str) -> Rows:
        if split in self.loaded:
            return self.loaded[split]
        # train[:10%]+validation
        names = [part.partition("[")[0].strip() for part in split.split("+")]
        for name in names:
            if name not in self.loaded:
                raise ValueError(f"{field}={split!r}: allowed are {', '.join(self.loaded)}")
        if self.again is None:
            raise ValueError(
                f"{field}={split!r}: allowed are whole splits ({', '.join(self.loaded)}), a stream or a saved dataset "
                "cannot be cut by name"
            )
        try:
            return self.again(split)
        except (ValueError, AssertionError) as error:
            raise ValueError(f"{field}={split!r} is no part of a split: {error}") from error


def _load(where: str, field: str | None, source: DatasetConfig, data: DataArguments, seed: int) -> _Splits:
    """All splits of a source; ``where`` and ``field`` name the option that holds its path."""
    label = f"{where}.{field}" if field else where
    if source.path.startswith(PREFIX):
        if data.streaming:
            raise ValueError(f"{label}={source.path!r}: allowed with streaming are datasets that are not generated")
        return _Splits({"train": _generated(label, source.path, data.task_size, seed)}, None)
    path = Path(source.path).expanduser()
    if path.is_dir() and any((path / name).is_file() for name in SAVED):
        return _Splits(_saved(label, source, path, data.streaming), None)
    options = _options(label, where if field else None, source, path)

    def read(**further: Any) -> Any:
        try:
            return load_dataset(**options, streaming=data.streaming, **further)
        except Exception as error:  # of many kinds: of the network, of the file's format, of the Hub
            if further and isinstance(error, ValueError | AssertionError):
                raise
            reason = error.__cause__ or error
            raise ValueError(f"{label}={source.path!r} cannot be read: {type(reason).__name__}: {reason}") from error

    return _Splits(read(), None if data.streaming else lambda split: read(split=split))


def _options(label: str, where: str | None, source: DatasetConfig, path: Path) -> dict[str, Any]:
    """Arguments of `load_dataset`."""
    given = {"name": source.name, "data_dir": source.data_dir, "data_files": source.data_files}
    given = {name: value for name, value in given.items() if value is not None}
    if source.path in FORMATS.values() and not path.exists():
        if not given.keys() & {"data_dir", "data_files"}:
            raise ValueError(f"{label}={source.path!r} names a format: data_files or data_dir is needed with it")
        return {"path": source.path, **given}
    if path.is_file() or (path.suffix in FORMATS and not path.exists()):
        if not path.exists():
            raise ValueError(f"{label}={source.path!r}: no such file")
        if path.suffix not in FORMATS:
            raise ValueError(f"{label}={source.path!r}: allowed are files that end in {', '.join(FORMATS)}")
        for name, value in given.items():
            option_name = f"{where}.{name}" if where else {"name": "dataset_config"}.get(name, name)
            raise ValueError(f"{option_name}={value!r}: a local file has no configurations or parts, leave it out")
        if not path.stat().st_size:
            raise ValueError(f"{label}={source.path!r}: the file is empty")
        return {"path": FORMATS[path.suffix], "data_files": {"train": str(path)}}
    if not path.exists() and source.path.startswith((".", "/", "~")):
        raise ValueError(f"{label}={source.path!r}: no such file or folder")
    return {"path": str(path) if path.is_dir() else source.path, **given}


def _saved(label: str, source: DatasetConfig, path: Path, streaming: bool) -> Mapping[str, Rows]:
    """Splits of a folder that `save_to_disk` wrote."""
    try:
        loaded = load_from_disk(str(path))
    except Exception as error:
        raise ValueError(f"{label}={source.path!r} cannot be read: {type(error).__name__}: {error}") from error
    splits = loaded if isinstance(loaded, DatasetDict) else {"train": loaded}
    return {name: rows.to_iterable_dataset() for name, rows in splits.items()} if streaming else splits


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
    return Dataset.from_list(list(rows.take(count)), features=rows.features)


def _dataset_config(where: str, given: Any) -> DatasetConfig:
    """A dataset of a mixture as YAML gives it."""
    if isinstance(given, DatasetConfig):
        return given
    if not isinstance(given, dict):
        raise ValueError(f"{where}={given!r}: allowed is a mapping with path")
    known = [f.name for f in fields(DatasetConfig)]
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f", did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{where} has no option {key!r}{hint} (known: {', '.join(known)})")
    try:
        return DatasetConfig(**given)
    except ValueError as error:
        raise ValueError(f"{where}.{error}") from None


def _require_columns(name: str, columns: Sequence[str] | None) -> None:
    if isinstance(columns, list) and (not columns or len(set(columns)) < len(columns)):
        raise ValueError(f"{name}={columns!r}: allowed is a list of different names, not empty")
