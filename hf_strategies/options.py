"""Base of the small option dataclasses that live beside what they configure."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import MISSING, Field, dataclass, field
from typing import Any


def option(default: Any, help: str, **metadata: Any) -> Any:
    """A documented dataclass field; ``help`` is what the command line shows."""
    metadata = {"help": help, **metadata}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class Options:
    """Options validate themselves on construction; several may be combined into one config by inheritance."""

    def __post_init__(self) -> None:
        parent = super()
        if hasattr(parent, "__post_init__"):
            parent.__post_init__()
        self.validate()

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
    ) -> None:
        """Check a finite number: ``low <= value <= high``, or ``above < value <= high`` when ``above`` is given."""
        value = getattr(self, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or not (value > above if above is not None else value >= low) or value > high:
            lower = f"> {above}" if above is not None else f">= {low}" if low > -math.inf else "any finite number"
            upper = f" and <= {high}" if high < math.inf else ""
            raise ValueError(f"{name}={value!r}: allowed is a number {lower}{upper}")

    def require_integer(self, name: str, low: int) -> None:
        """Check a whole number of at least ``low``."""
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise ValueError(f"{name}={value!r}: allowed is a whole number >= {low}")


def default_of(f: Field) -> Any:
    """Default value of a dataclass field (a fresh one where it is built by a factory)."""
    return f.default_factory() if f.default_factory is not MISSING else f.default
