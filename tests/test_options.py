"""Options validate themselves: the message names the field, its value and what is allowed."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import pytest

from hf_strategies.options import Options, option
from hf_strategies.rollout.options import RolloutOptions

NAN, INF = math.nan, math.inf


@dataclass
class Sizes(Options):
    """Three checks."""

    width: float = option(0.5, "In [0, 1].")
    count: int = option(2, "At least 1.")

    def validate(self) -> None:
        super().validate()
        self.require_number("width", 0.0, 1.0)
        self.require_integer("count", 1)


@dataclass
class Shapes(Options):
    """One check."""

    shape: str = option("round", "round or square.")
    weight: float = option(1.0, "> 0 and <= 2.")

    def validate(self) -> None:
        super().validate()
        self.require_one_of("shape", ("round", "square"))
        self.require_number("weight", high=2.0, above=0.0)


@dataclass
class Both(Sizes, Shapes):
    """Combined by inheritance."""


def message(text: str) -> str:
    return f"^{re.escape(text)}$"


@pytest.mark.parametrize("value", [-0.1, 1.1, NAN, INF, -INF, True, "0.5", None, [0.5]])
def test_numbers(value: object) -> None:
    with pytest.raises(ValueError, match=message(f"width={value!r}: allowed is a number >= 0.0 and <= 1.0")):
        Sizes(width=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0, 0.0, 1, 1.0, 1e-300])
def test_bounds_are_allowed(value: float) -> None:
    assert Sizes(width=value).width == value


@pytest.mark.parametrize("value", [0, 0.0, -1, 2.1, NAN, INF, False])
def test_open_bounds(value: object) -> None:
    with pytest.raises(ValueError, match=message(f"weight={value!r}: allowed is a number > 0.0 and <= 2.0")):
        Shapes(weight=value)  # type: ignore[arg-type]
    assert Shapes(weight=1e-300).weight == 1e-300
    assert Shapes(weight=2).weight == 2


@pytest.mark.parametrize(
    ("bounds", "text"), [({}, "any finite number"), ({"low": -1.5}, ">= -1.5"), ({"above": 3}, "> 3")]
)
def test_bounds_that_are_not_there_are_not_named(bounds: dict, text: str) -> None:
    sizes = Sizes()
    sizes.width = NAN
    with pytest.raises(ValueError, match=message(f"width=nan: allowed is a number {text}")):
        sizes.require_number("width", **bounds)
    sizes.width = 1e300
    sizes.require_number("width", **bounds)


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "2", None, NAN])
def test_whole_numbers(value: object) -> None:
    with pytest.raises(ValueError, match=message(f"count={value!r}: allowed is a whole number >= 1")):
        Sizes(count=value)  # type: ignore[arg-type]
    assert Sizes(count=1).count == 1


@pytest.mark.parametrize("value", ["oval", "Round", None, 1, ["round"]])
def test_enumerations(value: object) -> None:
    with pytest.raises(ValueError, match=message(f"shape={value!r}: allowed are 'round', 'square'")):
        Shapes(shape=value)  # type: ignore[arg-type]
    assert Shapes(shape="square").shape == "square"


def test_bounds_that_must_not_be_reached() -> None:
    sizes = Sizes()
    sizes.require_number("width", 0.0, below=1.0)
    sizes.width, sizes.count = 1.0, 3
    with pytest.raises(ValueError, match=message("width=1.0: allowed is a number >= 0.0 and < 1.0")):
        sizes.require_number("width", 0.0, below=1.0)
    sizes.require_integer("count", 1, 3)
    with pytest.raises(ValueError, match=message("count=3: allowed is a whole number >= 1 and <= 2")):
        sizes.require_integer("count", 1, 2)


@dataclass
class Foreign:
    """Another library's options, which it reads on construction."""

    rate: float = 1.0
    steps: int | None = None

    def __post_init__(self) -> None:
        self.half = self.rate / 2


@dataclass
class Typed(Options, Foreign):
    """One option of each plain type, and one that is not plain."""

    on: bool = option(False, "A switch.")
    name: str | None = option(None, "A text.")
    words: list[str] | None = option(None, "Texts.")
    weights: list[float] | None = option(None, "Numbers.")
    extra: dict[str, int] | str | None = option(None, "Anything.")


@pytest.mark.parametrize(
    ("name", "values", "allowed"),
    [
        ("rate", ("1e-5", None, True, [1.0]), "a number"),
        ("steps", ("3", 1.5, True), "a whole number or None"),
        ("on", ("yes", 1, None), "True or False"),
        ("name", (3, ["a"], True), "a text or None"),
        ("words", ("abc", [1], ["a", None], 3), "a list of texts or None"),
        ("weights", (1.0, "1", ["x"], [True]), "a list of numbers or None"),
    ],
)
def test_types(name: str, values: tuple, allowed: str) -> None:
    """A text where a number belongs, as YAML gives it, is found before anything computes with it."""
    for value in values:
        with pytest.raises(ValueError, match=message(f"{name}={value!r}: allowed is {allowed}")):
            Typed(**{name: value})


def test_types_that_fit() -> None:
    Typed(rate=1, steps=3, on=True, name="a", words=["a"], weights=(1, 0.5), extra={"a": 1})  # type: ignore[arg-type]
    Typed(rate=np.float32(1), steps=np.int64(3), name=Path("a"), words=[], weights=[])  # type: ignore[arg-type]
    assert Typed(extra=object()).half == 0.5  # type: ignore[arg-type]


def test_combined_options_are_all_checked() -> None:
    assert (Both().width, Both().shape) == (0.5, "round")
    for bad in ({"width": 2.0}, {"count": 0}, {"shape": "oval"}, {"weight": 0.0}):
        with pytest.raises(ValueError, match=f"^{next(iter(bad))}="):
            Both(**bad)


def test_options_beside_another_dataclass() -> None:
    """A config is another library's arguments and options: both get their turn after construction."""

    @dataclass
    class Arguments:
        rate: float = 1.0

        def __post_init__(self) -> None:
            self.half = self.rate / 2

    @dataclass
    class Config(Sizes, Arguments):
        pass

    assert Config(rate=3.0).half == 1.5
    with pytest.raises(ValueError, match=r"^width="):
        Config(width=-1.0)


def test_fields_document_themselves() -> None:
    @dataclass
    class Local(Options):
        count: int = option(2, "At least 1.", kind="whole")
        names: list = option(["a"], "Several.")
        table: dict = option({"b": 1}, "By name.")

    by_name = {f.name: f for f in fields(Local)}
    assert {name: dict(f.metadata) for name, f in by_name.items()} == {
        "count": {"help": "At least 1.", "kind": "whole"},
        "names": {"help": "Several."},
        "table": {"help": "By name."},
    }
    assert vars(Local()) == {"count": 2, "names": ["a"], "table": {"b": 1}}
    # Lists and dicts are nobody else's.
    first = Local()
    first.names.append("b")
    first.table["c"] = 2
    assert vars(Local()) == {"count": 2, "names": ["a"], "table": {"b": 1}}


WHOLE = "a whole number >= "


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("num_generations", 0, f"is {WHOLE}1"),
        ("num_generations_eval", 0, f"is {WHOLE}1"),
        ("steps_per_generation", 0, f"is {WHOLE}1"),
        ("num_completions_to_print", 0, f"is {WHOLE}1"),
        ("max_completion_length", 0, f"is {WHOLE}1"),
        ("num_iterations", 0, f"is {WHOLE}1"),
        ("rollout_batch_size", 0.5, f"is {WHOLE}1"),
        ("top_k", -1, f"is {WHOLE}0"),
        ("min_new_tokens", -1, f"is {WHOLE}0"),
        ("max_policy_lag", -1, f"is {WHOLE}0"),
        ("min_new_tokens", 513, "is at most max_completion_length=512"),
        ("temperature", 0.0, "is a number > 0.0"),
        ("temperature", -1.0, "is a number > 0.0"),
        ("temperature_eval", -0.1, "is a number >= 0.0"),
        ("top_p", 0.0, "is a number > 0.0 and <= 1.0"),
        ("top_p", 1.1, "is a number > 0.0 and <= 1.0"),
        ("min_p", 1.1, "is a number >= 0.0 and <= 1.0"),
        ("repetition_penalty", 0.0, "is a number > 0.0"),
        ("rollout_engine", "magic", "are 'auto', 'stream', 'generate'"),
        ("stop_strings", ["a", ""], "are texts that are not empty"),
        ("rollout_dtype", "fp8", "are None, 'float32', 'bfloat16', 'float16'"),
    ],
)
def test_rollout_options(name: str, value: object, allowed: str) -> None:
    """Pitfalls A-12, A-22: temperature 0 and impossible sizes are refused when the config is built."""
    with pytest.raises(ValueError, match=message(f"{name}={value!r}: allowed {allowed}")):
        RolloutOptions(**{name: value})  # type: ignore[arg-type]


def test_sampling_says_everything() -> None:
    """Pitfall A-13: every field comes from the options, none from the model's own defaults."""
    options = RolloutOptions(
        max_completion_length=9,
        min_new_tokens=2,
        temperature=0.7,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        repetition_penalty=1.2,
        temperature_eval=0.0,
        stop_strings=["\n\n"],
    )
    train, evaluation = options.sampling(), options.eval_sampling()
    shared = {
        "max_new_tokens": 9, "min_new_tokens": 2, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2,
        "stop_strings": ("\n\n",),
    }  # fmt: skip
    assert vars(train) == {**shared, "temperature": 0.7, "greedy": False}
    assert vars(evaluation) == {**shared, "temperature": 1.0, "greedy": True}
    assert RolloutOptions(temperature=0.7).eval_sampling() == RolloutOptions(temperature=0.7).sampling()
    assert RolloutOptions(temperature_eval=0.3).eval_sampling().temperature == 0.3
