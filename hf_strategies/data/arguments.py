"""Options that say which data a run reads."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from hf_strategies.data.reasoning import PREFIX
from hf_strategies.options import Options, option

ALLOWED = "a Hub id, a local file or folder, or reasoning_gym:<task>"


@dataclass
class DatasetConfig(Options):
    """One dataset of a mixture."""

    path: str = option("", f"What to read: {ALLOWED}; json, csv, parquet or text with data_files.")
    name: str | None = option(None, "Configuration of a Hub dataset.")
    data_dir: str | None = option(None, "Folder within the dataset.")
    data_files: str | list[str] | dict[str, str] | None = option(None, "Files to read, names or patterns.")
    split: str = option("train", "Split; also a part of one, train[:1000].")
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
    dataset_train_split: str = option("train", "Split to train on; also a part of one, train[:1000].")
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
        self._require_types(["dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split"])
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
