"""Options from flags and a YAML file."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

import yaml
from transformers import HfArgumentParser


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
