"""Files, folders, splits and columns: what is read, what is held out, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict, IterableDataset

from hf_strategies.data.arguments import DataArguments
from hf_strategies.data.sources import load_rows


def write(path: Path, names: str | list[str], column: str = "text") -> Path:
    """A jsonl of one column."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({column: name}) + "\n" for name in names))
    return path


def load(source: Any, **options: Any) -> tuple[Any, Any]:
    return load_rows(DataArguments(dataset_name=str(source), **{"held_out_rows": 0, **options}), seed=0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two splits, as on the Hub."""
    write(tmp_path / "folder" / "train.jsonl", "abcde")
    write(tmp_path / "folder" / "validation.jsonl", "xy")
    return tmp_path / "folder"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.jsonl", '{"text": "a"}\n{"text": "b c"}\n'),
        ("rows.json", '[{"text": "a"}, {"text": "b c"}]'),
        ("rows.csv", "text\na\nb c\n"),
        ("rows.txt", "a\nb c\n"),
    ],
)
def test_every_kind_of_file(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    for streaming in (False, True):
        train, held_out = load(tmp_path / name, streaming=streaming)
        assert isinstance(train, IterableDataset) is streaming
        assert [dict(row) for row in train] == [{"text": "a"}, {"text": "b c"}] or streaming
        assert sorted(row["text"] for row in train) == ["a", "b c"]
        assert held_out is None


def test_parquet(tmp_path: Path) -> None:
    Dataset.from_dict({"messages": [[{"role": "user", "content": "hi"}]]}).to_parquet(str(tmp_path / "rows.parquet"))
    assert load(tmp_path / "rows.parquet")[0][0] == {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.jsonl", None, "no such file"),
        ("empty.jsonl", "", "the file is empty"),
        ("broken.jsonl", '{"prompt": "a"\nxx', "cannot be read: "),
        ("rows.xlsx", "x", "allowed are files that end in .json, .jsonl, .parquet, .csv, .txt"),
        ("absent", None, "no such file or folder"),
    ],
)
def test_files_that_cannot_be_read(name: str, content: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=f"dataset_name='.*{name}'.* ?{message}"):
        load(path)


def test_a_file_that_is_not_there_is_no_hub_id() -> None:
    with pytest.raises(ValueError, match=r"dataset_name='none\.jsonl': no such file"):
        load("none.jsonl")


def test_a_stream_is_read_once_before_it_trains(tmp_path: Path) -> None:
    (tmp_path / "broken.jsonl").write_text("text")
    with pytest.raises(ValueError, match=r"dataset_name='.*broken.jsonl' cannot be read: "):
        load(tmp_path / "broken.jsonl", streaming=True)


def test_a_folder_without_data(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read: EmptyDatasetError"):
        load(tmp_path)


def test_a_file_has_no_configurations(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dataset_config='x': a local file has no configurations"):
        load(write(tmp_path / "rows.jsonl", "ab"), dataset_config="x")


def test_held_out_rows_are_no_training_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", "abcdef")
    train, held_out = load(path, held_out_rows=2)
    assert len(held_out) == 2
    assert sorted([*train["text"], *held_out["text"]]) == list("abcdef")
    with pytest.raises(ValueError, match="held_out_rows=6: allowed is less than the dataset's 6 rows"):
        load(path, held_out_rows=6)


def test_splits_of_a_folder(folder: Path) -> None:
    train, held_out = load(folder, dataset_test_split="validation")
    assert (train["text"][:], held_out["text"][:]) == (list("abcde"), ["x", "y"])
    # There is no split test, so held-out rows are taken from the training rows.
    train, held_out = load(folder, held_out_rows=1)
    assert sorted([*train["text"], *held_out["text"]]) == list("abcde")
    (folder / "validation.jsonl").rename(folder / "test.jsonl")
    assert load(folder, held_out_rows=1)[1]["text"][:] == ["x", "y"]
    # What is trained on is not held out.
    train, held_out = load(folder, dataset_train_split="test[:1]+train", held_out_rows=1)
    assert sorted([*train["text"], *held_out["text"]]) == list("abcdex")


def test_a_part_of_a_split(folder: Path) -> None:
    train, held_out = load(folder, dataset_train_split="train[:2]+validation", dataset_test_split="train[3:]")
    assert (train["text"][:], held_out["text"][:]) == (["a", "b", "x", "y"], ["d", "e"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset_train_split": "trian"}, "dataset_train_split='trian': allowed are train, validation"),
        ({"dataset_test_split": "test"}, "dataset_test_split='test': allowed are train, validation"),
        ({"dataset_train_split": "train+none"}, r"dataset_train_split='train\+none': allowed are train, validation"),
        ({"dataset_train_split": "train[x]"}, r"dataset_train_split='train\[x\]' is no part of a split"),
        (
            {"dataset_train_split": "train[:2]", "streaming": True},
            r"dataset_train_split='train\[:2\]': allowed are whole splits \(train, validation\)",
        ),
        ({"dataset_columns": ["txt", "text"]}, "dataset_columns: txt not found, the dataset has text"),
    ],
)
def test_splits_and_columns_that_are_not_there(options: dict[str, Any], message: str, folder: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load(folder, **options)


def test_columns(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "completion": "b", "note": "c"}\n' * 3)
    for streaming in (False, True):
        train, held_out = load(path, dataset_columns=["prompt", "completion"], held_out_rows=1, streaming=streaming)
        assert next(iter(train)) == held_out[0] == {"prompt": "a", "completion": "b"}


def test_saved_datasets(tmp_path: Path) -> None:
    rows = Dataset.from_dict({"text": ["a", "b"]})
    rows.save_to_disk(str(tmp_path / "one"))
    DatasetDict(train=rows, test=rows.select([1])).save_to_disk(str(tmp_path / "several"))
    assert load(tmp_path / "one")[0]["text"][:] == ["a", "b"]
    train, held_out = load(tmp_path / "several", streaming=True, held_out_rows=1)
    assert sorted(row["text"] for row in train) == ["a", "b"]
    assert held_out["text"][:] == ["b"]
    with pytest.raises(ValueError, match="allowed are whole splits"):
        load(tmp_path / "one", dataset_train_split="train[:1]")


def test_held_out_rows_of_a_stream_are_its_first(tmp_path: Path) -> None:
    """The rest comes in another order: the one that a buffer of three rows gives."""
    path = write(tmp_path / "rows.jsonl", "abcdefgh")
    train, held_out = load(path, streaming=True, held_out_rows=2, shuffle_buffer_size=1)
    assert held_out["text"][:] == ["a", "b"]
    assert [row["text"] for row in train] == list("cdefgh")
    train, _ = load(path, streaming=True, held_out_rows=2, shuffle_buffer_size=3)
    shuffled = [row["text"] for row in train]
    assert shuffled != list("cdefgh")
    assert sorted(shuffled) == list("cdefgh")
    with pytest.raises(ValueError, match="held_out_rows=9: allowed is less than the stream's 8 rows"):
        load(path, streaming=True, held_out_rows=9)


def test_what_the_hub_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="dataset_name='me/none' cannot be read: "):
        load("me/none")


def test_generated_problems() -> None:
    """As many as asked for; held-out ones are those of another seed."""
    train, held_out = load("reasoning_gym:gcd", task_size=5, held_out_rows=3)
    assert (len(train), len(held_out)) == (5, 3)
    assert set(train["task"]) == {"gcd"}
    with pytest.raises(ValueError, match=r"dataset_name='reasoning_gym:gdc': .* near: gcd"):
        load("reasoning_gym:gdc")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"streaming": True}, "streaming=True has no effect: it belongs to a dataset_name, which is unset"),
        ({"dataset_config": "x"}, "dataset_config='x' has no effect: it belongs to a dataset_name"),
        ({"dataset_name": "reasoning_gym:gcd", "streaming": True}, "streaming=True has no effect: problems of a task"),
        ({"dataset_name": "x", "dataset_columns": []}, r"dataset_columns=\[\]: allowed is a list of different names"),
        ({"dataset_name": "x", "dataset_columns": ["a", "a"]}, r"dataset_columns=\['a', 'a'\]: allowed is a list of"),
        ({"dataset_name": "x", "shuffle_buffer_size": 0}, "shuffle_buffer_size=0: allowed is a whole number >= 1"),
        ({"dataset_name": "x", "dataset_test_split": "train"}, "dataset_test_split='train' is dataset_train_split"),
    ],
)
def test_options_without_effect(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataArguments(**options)
