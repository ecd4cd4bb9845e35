"""Base of the small option dataclasses that live beside what they configure."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Collection
from dataclasses import dataclass, field, fields
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, ClassVar, Union, get_args, get_origin, get_type_hints

# What an option of a type may be; anything else that is annotated (paths, enumerations, dicts) is not checked.
KINDS: dict[Any, tuple[str, str]] = {
    bool: ("True or False", "True or False"),
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("a text", "texts"),
    NoneType: ("None", "None"),
}


def option(default: Any, help: str, **metadata: Any) -> Any:
    """A documented dataclass field; ``help`` is what the command line shows."""
    metadata = {"help": help, **metadata}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class Options:
    """Options validate themselves on construction; several may be combined into one config by inheritance.

    Attributes:
        aliases: fields of a config that give an option under another name -> the option. Once taken over, such a
            field is back at its default, so that nobody else acts on it.
    """

    aliases: ClassVar[dict[str, str]] = {}

    def __post_init__(self) -> None:
        # What another library reads is checked before it is read; here `validate` has the better message.
        own = _own_fields(_class_of(self))
        self._require_types([f.name for f in fields(self) if f.init and f.name not in own])
        parent = super()
        if hasattr(parent, "__post_init__"):
            parent.__post_init__()
        self._resolve_aliases()
        self.validate()
        self._require_types([f.name for f in fields(self) if f.init and f.name in own])

    def _resolve_aliases(self) -> None:
        defaults = {f.name: f.default for f in fields(self)}
        for alias, name in self.aliases.items():
            value = getattr(self, alias, None)
            if alias not in defaults or value == defaults[alias]:
                continue
            if getattr(self, name) not in (defaults[name], value):
                raise ValueError(
                    f"{alias}={value!r} and {name}={getattr(self, name)!r} are names of one option: give one of them"
                )
            setattr(self, name, value)
            setattr(self, alias, defaults[alias])

    def _require_types(self, names: Collection[str]) -> None:
        hints = _hints(_class_of(self))
        for name in names:
            kinds = _kinds(hints.get(name))
            value = getattr(self, name)
            if kinds and not any(_is_a(value, kind) for kind in kinds):
                raise ValueError(f"{name}={value!r}: allowed is {' or '.join(map(_describe, kinds))}")

    def validate(self) -> None:
        """Raise `ValueError` naming the field, its value and what is allowed; combined options chain by ``super``."""

    def require_one_of(self, name: str, allowed: Collection[Any]) -> None:
        """Check an enumerated option."""
        value = getattr(self, name)
        if value not in allowed:
            raise ValueError(f"{name}={value!r}: allowed are {', '.join(map(repr, allowed))}")

    def require_number(
        self,
        name: str,
        low: float = -math.inf,
        high: float = math.inf,
        *,
        above: float | None = None,
        below: float | None = None,
    ) -> None:
        """Check a finite number: ``low <= value <= high``; ``above`` and ``below`` are bounds it must not reach."""
        value = getattr(self, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        too_low = is_number and not (value > above if above is not None else value >= low)
        too_high = is_number and not (value < below if below is not None else value <= high)
        if not is_number or too_low or too_high:
            lower = f"> {above}" if above is not None else f">= {low}" if low > -math.inf else "any finite number"
            upper = f" and < {below}" if below is not None else f" and <= {high}" if high < math.inf else ""
            raise ValueError(f"{name}={value!r}: allowed is a number {lower}{upper}")

    def require_integer(self, name: str, low: int, high: int | None = None) -> None:
        """Check a whole number of at least ``low`` and at most ``high``."""
        value = getattr(self, name)
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or value < low or (high is not None and value > high):
            upper = "" if high is None else f" and <= {high}"
            raise ValueError(f"{name}={value!r}: allowed is a whole number >= {low}{upper}")


def _class_of(options: Options) -> Any:
    return type(options)  # Any, because a type checker takes no dataclass for a key of `cache`


@cache
def _own_fields(cls: Any) -> frozenset[str]:
    """Fields that a subclass of `Options` declares; the others belong to a dataclass it is combined with."""
    return frozenset(
        name
        for base in cls.__mro__
        if isinstance(base, type) and issubclass(base, Options)
        for name in inspect.get_annotations(base)
    )


@cache
def _hints(cls: Any) -> dict[str, Any]:
    try:
        return get_type_hints(cls)
    except NameError:  # a class made inside a function may name what only that function knows
        return {}


def _kinds(hint: Any) -> tuple[Any, ...]:
    """Members of a type annotation, or none where one of them is no plain type."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    plain = all(kind in KINDS or (get_origin(kind) is list and get_args(kind)[0] in KINDS) for kind in kinds)
    return kinds if plain else ()


def _is_a(value: Any, kind: Any) -> bool:
    if get_origin(kind) is list:
        return isinstance(value, list | tuple) and all(_is_a(item, get_args(kind)[0]) for item in value)
    if kind in (int, float):
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    return isinstance(value, str | os.PathLike if kind is str else kind)


def _describe(kind: Any) -> str:
    return f"a list of {KINDS[get_args(kind)[0]][1]}" if get_origin(kind) is list else KINDS[kind][0]
