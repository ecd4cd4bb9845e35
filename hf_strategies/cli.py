"""What the recipes share: options with YAML files and flags, the model's and the data's arguments."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

import yaml
from datasets import Dataset, DatasetDict, load_dataset
from peft import LoraConfig
from transformers import HfArgumentParser

from hf_strategies.options import Options, option

FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text"}


@dataclass
class ModelArguments(Options):
    """Which model, and which adapter on it."""

    model_name_or_path: str | None = option(None, "Hub id or path; unset: the embedded SmolLM2-135M-Instruct.")
    use_peft: bool = option(True, "Train a LoRA adapter; --no_use_peft trains the whole model.")
    lora_r: int = option(16, "Rank of the LoRA matrices, >= 1.")
    lora_alpha: int = option(32, "LoRA scale: updates are multiplied by alpha / r.")
    lora_dropout: float = option(0.0, "Dropout on the adapter's input, in [0, 1).")
    lora_target_modules: str = option("all-linear", "Modules that get an adapter: all-linear, or names by comma.")
    use_dora: bool = option(False, "Weight-decomposed adapters (DoRA).")
    use_rslora: bool = option(False, "Scale by alpha / sqrt(r) instead (rank-stabilised LoRA).")

    def validate(self) -> None:  # noqa: D102 - see Options
        super().validate()
        self.require_integer("lora_r", 1)
        self.require_integer("lora_alpha", 1)
        self.require_number("lora_dropout", 0.0, below=1.0)
        if self.model_name_or_path is not None and not self.model_name_or_path.strip():
            raise ValueError(f"model_name_or_path={self.model_name_or_path!r}: allowed is a Hub id or a path")
        if not all(name.strip() for name in self.lora_target_modules.split(",")):
            raise ValueError(
                f"lora_target_modules={self.lora_target_modules!r}: allowed are all-linear, or names by comma"
            )

    def peft_config(self) -> LoraConfig | None:
        """The adapter to train, or None for full fine-tuning."""
        if not self.use_peft:
            return None
        modules = self.lora_target_modules
        return LoraConfig(
            r=self.lora_r,
            lora_alpha=self.lora_alpha,
            lora_dropout=self.lora_dropout,
            target_modules=modules if modules == "all-linear" else [name.strip() for name in modules.split(",")],
            use_dora=self.use_dora,
            use_rslora=self.use_rslora,
            task_type="CAUSAL_LM",
        )


@dataclass
class DataArguments(Options):
    """Which data."""

    dataset_name: str | None = option(
        None, "Hub id, local file (jsonl, parquet, csv, txt) or reasoning_gym:<task>; unset: the embedded default."
    )
    dataset_config: str | None = option(None, "Configuration of a Hub dataset.")
    dataset_train_split: str = option("train", "Split to train on.")
    dataset_test_split: str = option("test", "Split to evaluate on; ignored when the dataset has no such split.")
    held_out_rows: int = option(
        256, "Rows kept for evaluation when the dataset has no test split; 0: none. The embedded data has 256 at most."
    )
    task_size: int = option(2000, "Problems generated for a reasoning_gym task.")

    def validate(self) -> None:  # noqa: D102 - see Options
        super().validate()
        self.require_integer("held_out_rows", 0)
        self.require_integer("task_size", 1)
        if self.dataset_name is not None and not self.dataset_name.strip():
            raise ValueError(
                f"dataset_name={self.dataset_name!r}: allowed is a Hub id, a file or reasoning_gym:<task>"
            )
        if self.dataset_test_split == self.dataset_train_split:
            raise ValueError(
                f"dataset_test_split={self.dataset_test_split!r} is dataset_train_split too: what is trained on "
                "is not held out"
            )


def load_rows(data: DataArguments, seed: int) -> tuple[Dataset, Dataset | None]:
    """Training and evaluation rows of a Hub dataset or a local file.

    Raises:
        ValueError: the dataset cannot be read, or the split does not exist; the message lists those that do.
    """
    assert data.dataset_name is not None
    name, path = data.dataset_name, Path(data.dataset_name)
    is_file = path.suffix in FORMATS
    if is_file and not path.is_file():
        raise ValueError(f"dataset_name={name!r}: no such file")
    if path.is_file() and not is_file:
        raise ValueError(f"dataset_name={name!r}: allowed are files that end in {', '.join(FORMATS)}")
    if is_file and data.dataset_config is not None:
        raise ValueError(f"dataset_config={data.dataset_config!r}: a local file has no configurations, leave it out")
    if is_file and not path.stat().st_size:
        raise ValueError(f"dataset_name={name!r}: the file is empty")
    try:
        if is_file:
            loaded = load_dataset(FORMATS[path.suffix], data_files={data.dataset_train_split: str(path)})
        else:
            loaded = load_dataset(name, data.dataset_config)
    except Exception as error:  # of many kinds: of the network, of the file's format, of the Hub
        reason = error.__cause__ or error
        raise ValueError(f"dataset_name={name!r} cannot be read: {type(reason).__name__}: {reason}") from error
    assert isinstance(loaded, DatasetDict)
    if data.dataset_train_split not in loaded:
        raise ValueError(f"dataset_train_split={data.dataset_train_split!r}: allowed are {', '.join(loaded)}")
    train = loaded[data.dataset_train_split]
    if data.dataset_test_split in loaded:
        return train, loaded[data.dataset_test_split]
    if data.held_out_rows == 0:
        return train, None
    if data.held_out_rows >= len(train):
        raise ValueError(f"held_out_rows={data.held_out_rows}: allowed is less than the dataset's {len(train)} rows")
    parts = train.train_test_split(test_size=data.held_out_rows, seed=seed)
    return parts["train"], parts["test"]


class StrategyParser(HfArgumentParser):
    """Flags and a YAML file for several dataclasses: ``--config file.yaml``, then flags, which win.

    Args:
        dataclass_types: dataclasses whose fields become flags.
        default_config: YAML file that is read when the command line names neither a ``--config`` nor any of
            ``unless_given``.
        unless_given: flags that keep ``default_config`` out.
    """

    def __init__(
        self, dataclass_types: Any, default_config: Path | None = None, unless_given: Sequence[str] = (), **kwargs: Any
    ) -> None:
        # A prefix is no name: whoever mistypes a flag is told, and --config is always found.
        super().__init__(dataclass_types, allow_abbrev=False, **kwargs)
        self.default_config = default_config
        self.unless_given = tuple(unless_given)
        self.add_argument("--config", default=None, help="YAML file with options; flags override it.")

    def error(self, message: str) -> NoReturn:
        """Exit with the message alone: the usage of some two hundred flags would bury it."""
        self.exit(2, f"error: {message}\n(--help lists all options)\n")

    def parse(self, argv: Sequence[str] | None = None) -> tuple[Any, ...]:
        """Dataclass instances from the command line; exits with a message on unknown flags, keys or bad values."""
        arguments = list(sys.argv[1:] if argv is None else argv)
        path = self._config_path(arguments)
        if path is not None:
            self.set_defaults(**self._read(path))
        try:
            parsed = self.parse_args_into_dataclasses(arguments, return_remaining_strings=True)
        except ValueError as error:
            self.error(str(error))
        *instances, rest = parsed
        # --config is no field of a dataclass: the parser hands it back beside them.
        instances = [instance for instance in instances if type(instance) in list(self.dataclass_types)]
        if rest:
            self.error(f"unknown: {' '.join(rest)}{self._hint(rest[0].lstrip('-').split('=')[0])}")
        return tuple(instances)

    def _config_path(self, arguments: list[str]) -> Path | None:
        for i, argument in enumerate(arguments):
            if argument == "--config":
                if i + 1 == len(arguments):
                    self.error("--config needs a file")
                return Path(arguments[i + 1])
            if argument.startswith("--config="):
                return Path(argument.split("=", 1)[1])
        given = {argument.split("=")[0] for argument in arguments}
        return None if given & set(self.unless_given) else self.default_config

    def _read(self, path: Path) -> dict[str, Any]:
        if not path.is_file():
            self.error(f"--config {path}: no such file")
        try:
            content = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys) or {}
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            self.error(f"--config {path}: {error}")
        if not isinstance(content, dict):
            self.error(f"--config {path}: allowed is a mapping of option names to values")
        known = self._known()
        for key in content:
            if key not in known:
                self.error(f"--config {path}: unknown option {key!r}{self._hint(str(key))}")
        return content

    def _known(self) -> list[str]:
        return [f.name for cls in self.dataclass_types for f in fields(cls) if f.init]

    def _hint(self, name: str) -> str:
        near = difflib.get_close_matches(name, self._known(), n=1)
        return f" (did you mean {near[0]!r}?)" if near else ""


class _UniqueKeys(yaml.SafeLoader):
    """A safe loader that refuses an option given twice, where YAML would silently take the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Raise `yaml.constructor.ConstructorError` on a repeated key."""
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for number, key in enumerate(keys):
            if key in keys[:number]:
                mark = node.value[number][0].start_mark
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} is given twice", mark)
        return super().construct_mapping(node, deep)
