"""Mixtures: shares by hand, every row once, and datasets that do not fit together."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hf_strategies.data.arguments import DataArguments, DatasetConfig
from hf_strategies.data.sources import load_rows


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def texts(path: Path, letter: str, count: int) -> str:
    return write(path, [{"text": f"{letter}{i}"} for i in range(count)])


def mixture(*sources: dict[str, Any], **options: Any) -> list[str]:
    """Texts of the training rows, in their order."""
    data = DataArguments(datasets=list(sources), **{"held_out_rows": 0, **options})
    return [row["text"] for row in load_rows(data, seed=0)[0]]


@pytest.fixture
def a(tmp_path: Path) -> str:
    return texts(tmp_path / "a.jsonl", "a", 8)


@pytest.fixture
def b(tmp_path: Path) -> str:
    return texts(tmp_path / "b.jsonl", "b", 3)


def test_without_fractions_every_row_is_there_once(a: str, b: str) -> None:
    everything = [f"a{i}" for i in range(8)] + [f"b{i}" for i in range(3)]
    assert mixture({"path": a}, {"path": b}) == everything
    streamed = mixture({"path": a}, {"path": b}, streaming=True, shuffle_buffer_size=1)
    # They take turns, and the longer one goes on alone.
    assert streamed == ["a0", "b0", "a1", "b1", "a2", "b2", "a3", "a4", "a5", "a6", "a7"]


def test_fractions_are_exact_and_repeat_nothing(a: str, b: str, caplog: pytest.LogCaptureFixture) -> None:
    """Shares 1/3 and 2/3: of the 3 rows of b all, so 4.5 rows in all, of which a has 1.5, rounded to 2."""
    mixed = mixture({"path": a, "fraction": 1}, {"path": b, "fraction": 2})
    assert mixed == ["a0", "a1", "b0", "b1", "b2"]
    assert f"mixture: 2 of the 8 rows of datasets[0] ({a}), by its fraction" in caplog.text
    # Shares 4/5 and 1/5: of the 8 rows of a all, so 10 in all, of which b has 2.
    assert Counter(text[0] for text in mixture({"path": a, "fraction": 0.8}, {"path": b, "fraction": 0.2})) == {
        "a": 8,
        "b": 2,
    }


def test_fractions_of_streams_are_probabilities(tmp_path: Path) -> None:
    """Of 3 to 1, the stream ends with the first dataset that does; each keeps its own order."""
    a, b = texts(tmp_path / "a.jsonl", "a", 600), texts(tmp_path / "b.jsonl", "b", 600)
    sources = {"path": a, "fraction": 3}, {"path": b, "fraction": 1}
    mixed = mixture(*sources, streaming=True, shuffle_buffer_size=1)
    of_a, of_b = ([text for text in mixed if text[0] == letter] for letter in "ab")
    assert of_a == [f"a{i}" for i in range(600)]
    assert of_b == [f"b{i}" for i in range(len(of_b))]
    # 600 rows of a make 200 of b: the deviation of a negative binomial is sqrt(600 * 0.25) / 0.75 = 16.
    assert abs(len(of_b) - 200) < 3 * 16
    assert mixture(*sources, streaming=True) != mixed
    assert mixture(*sources, streaming=True) == mixture(*sources, streaming=True)


def test_columns_and_splits_are_of_each_dataset(a: str, tmp_path: Path) -> None:
    noted = write(tmp_path / "noted.jsonl", [{"text": "n0", "note": 1}])
    with pytest.raises(ValueError, match=r"a mixture needs the same columns in all.*\[0\] .* has text; .* text, note"):
        mixture({"path": a}, {"path": noted})
    assert mixture({"path": a, "split": "train[:1]"}, {"path": noted, "columns": ["text"]}) == ["a0", "n0"]
    assert mixture({"path": "json", "data_files": str(tmp_path / "n*.jsonl"), "columns": ["text"]}) == ["n0"]


def test_columns_of_different_types(a: str, tmp_path: Path) -> None:
    other = write(tmp_path / "other.jsonl", [{"text": [{"role": "user", "content": "x"}]}])
    for streaming in (False, True):
        with pytest.raises(ValueError, match=r"column 'text' is Value\('string'\) in datasets\[0\] .* and List"):
            mixture({"path": a}, {"path": other}, streaming=streaming)


def test_held_out_rows_of_a_mixture(a: str, b: str) -> None:
    data = DataArguments(datasets=[{"path": a}, {"path": b}], held_out_rows=4)
    train, held_out = load_rows(data, seed=0)
    assert (len(train), len(held_out)) == (7, 4)
    assert len({*train["text"], *held_out["text"]}) == 11


def test_generated_tasks_can_be_mixed() -> None:
    data = DataArguments(
        datasets=[{"path": "reasoning_gym:gcd"}, {"path": "reasoning_gym:lcm"}], task_size=3, held_out_rows=0
    )
    assert load_rows(data, seed=0)[0]["task"][:] == ["gcd"] * 3 + ["lcm"] * 3


@pytest.mark.parametrize(
    ("datasets", "message"),
    [
        ([{"path": "x", "fraction": 0}], r"datasets\[0\].fraction=0: allowed is a number > 0.0"),
        ([{"path": "x", "fraction": -1.0}], r"datasets\[0\].fraction=-1.0: allowed is a number > 0.0"),
        ([{"path": "x", "fraction": "half"}], r"datasets\[0\].fraction='half': allowed is a number"),
        ([{"path": "x", "fraction": 1}, {"path": "y"}], r"fraction=\[1, None\] of datasets: allowed is one for every"),
        ([{"path": "x"}, {"path": " "}], r"datasets\[1\].path=' ': allowed is a Hub id"),
        ([{"name": "x"}], r"datasets\[0\].path='': allowed is a Hub id"),
        ([{"path": "x", "colums": ["a"]}], r"datasets\[0\] has no option 'colums', did you mean 'columns'\?"),
        ([{"path": "x", "columns": "text"}], r"datasets\[0\].columns='text': allowed is a list of texts"),
        ([{"path": "x", "data_files": 3}], r"datasets\[0\].data_files=3: allowed is a text, a list or a mapping"),
        (["x"], r"datasets\[0\]='x': allowed is a mapping with path"),
        ("x", "datasets='x': allowed is a list of datasets"),
    ],
)
def test_bad_options(datasets: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataArguments(datasets=datasets)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset_name": "x"}, "dataset_name='x' beside datasets: allowed is one of the two"),
        ({"dataset_train_split": "x"}, "dataset_train_split='x' has no effect: datasets have name, split and columns"),
        ({"dataset_columns": ["x"]}, r"dataset_columns=\['x'\] has no effect: datasets have"),
    ],
)
def test_options_of_a_single_dataset(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataArguments(datasets=[DatasetConfig("y")], **options)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"path": "none.jsonl"}, r"datasets\[1\].path='none.jsonl': no such file"),
        ({"path": "json"}, r"datasets\[1\].path='json' names a format: data_files or data_dir is needed"),
        ({"split": "test"}, r"datasets\[1\].split='test': allowed are train"),
        ({"columns": ["txt"]}, r"datasets\[1\].columns: txt not found, the dataset has text"),
        ({"name": "x"}, r"datasets\[1\].name='x': a local file has no configurations"),
        ({"fraction": 1e-9}, r"datasets\[1\] .*: its share of 1e-09 is less than a row of a mixture of 8"),
    ],
)
def test_messages_name_the_dataset(source: dict[str, Any], message: str, a: str, b: str) -> None:
    first = {"path": a, "fraction": 1} if "fraction" in source else {"path": a}
    with pytest.raises(ValueError, match=message):
        mixture(first, {"path": b} | source)


def test_a_generated_task_is_no_stream(a: str) -> None:
    with pytest.raises(ValueError, match=r"datasets\[1\].path='reasoning_gym:gcd': allowed with streaming"):
        mixture({"path": a}, {"path": "reasoning_gym:gcd"}, streaming=True)
