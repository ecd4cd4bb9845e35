"""Rows as people have them: what is read as it stands, what is an error that says which row and why."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import EOS, PAD, VOCAB, make_tokenizer
from datasets import Dataset, IterableDataset
from harness import build

from hf_strategies import SFTConfig
from hf_strategies.cli.arguments import ModelArguments
from hf_strategies.data.arguments import DataArguments
from hf_strategies.data.chat import normalised
from hf_strategies.data.formats import encode_dataset, encode_prompts
from hf_strategies.data.rows import Reading, read_example
from hf_strategies.data.sources import load_rows

A, B, C, D, E = (VOCAB[c] for c in "abcde")
USER, ASSISTANT = VOCAB["<user>"], VOCAB["<assistant>"]
CALLS = (
    "{% for m in messages %}<{{ m.role }}>{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}"
    "{% endfor %}{{ m.content or '' }}{{ m.reasoning_content or '' }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def stream(rows: Callable[[], Iterator[Any]]) -> IterableDataset:
    return IterableDataset.from_generator(rows)


def trained(example: dict[str, Any], tokenizer: Any = None, **options: Any) -> tuple[list[int], list[int]]:
    """Ids of the one row, and 1 where one trains."""
    (row,) = read_example(example, tokenizer or make_tokenizer(), Reading(**options)).rows
    mask = [1] * len(row.completion_ids) if row.loss_mask is None else list(map(int, row.loss_mask))
    return [*row.prompt_ids, *row.completion_ids], [0] * len(row.prompt_ids) + mask


# ---- token ids ----


def test_padding_is_left_out() -> None:
    """As `tokenizer(padding="max_length")` leaves it, on either side; masks are cut with it."""
    ids = {"input_ids": [PAD, PAD, A, B, C, PAD], "attention_mask": [0, 0, 1, 1, 1, 0]}
    assert trained(ids) == ([A, B, C], [0, 1, 1])
    assert trained({**ids, "labels": [-100, -100, -100, -100, C, -100]}) == ([A, B, C], [0, 0, 1])
    with pytest.raises(ValueError, match="attention_mask has 2 entries for 3 input_ids"):
        trained({"input_ids": [A, B, C], "attention_mask": [1, 1]})
    with pytest.raises(ValueError, match=r"attention_mask\[1\]=2: allowed are 0 and 1"):
        trained({"input_ids": [A, B], "attention_mask": [1, 2]})


def test_masks_of_token_ids_and_the_options_about_them() -> None:
    ids = {"input_ids": [A, B, C]}
    with pytest.raises(ValueError, match="assistant_only_loss=True needs messages, or input_ids with assistant_masks"):
        trained(ids, assistant_only_loss=True)
    assert trained({**ids, "assistant_masks": [0, 0, 1]}, assistant_only_loss=True) == ([A, B, C], [0, 0, 1])
    assert trained({**ids, "completion_mask": [0, 0, 1]}) == ([A, B, C], [0, 0, 1])
    assert trained({**ids, "completion_mask": [0, 0, 1]}, completion_only_loss=False) == ([A, B, C], [0, 1, 1])


@pytest.mark.parametrize("name", ["labels", "completion_mask", "assistant_masks", "attention_mask"])
def test_a_mask_that_one_row_lacks(name: str) -> None:
    """Not the whole row: who gives masks means them."""
    rows = [{"input_ids": [A, B], name: [1, B if name == "labels" else 1]}, {"input_ids": [A, B], name: None}]
    rows[0][name][0] = A if name == "labels" else 1
    with pytest.raises(ValueError, match=f"row 1: {name} has None entries for 2 input_ids"):
        encode_dataset(Dataset.from_list(rows), make_tokenizer(), None)


# ---- messages ----


def test_nothing_is_added_to_the_arguments_of_tool_calls() -> None:
    """Tables give every row the keys of all rows; memory and stream train the same tokens."""

    def call(**arguments: str) -> dict[str, Any]:
        made = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"arguments": arguments}}]}
        return {"messages": [{"role": "user", "content": "a"}, made]}

    tokenizer = make_tokenizer()
    tokenizer.chat_template = CALLS
    rows = [call(a="b"), call(c="d")]
    expected = [[USER, A, EOS, ASSISTANT, A, B, EOS], [USER, A, EOS, ASSISTANT, C, D, EOS]]  # of {"a": "b"}
    table = Dataset.from_list(rows)
    assert table[0]["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"a": "b", "c": None}
    for given in (*rows, *table):
        known = {number for ids in expected for number in ids}
        ids = [token for token in trained(given, tokenizer)[0] if token in known]
        assert ids in expected
    conversation = [{"role": "user", "content": "a", "name": None}]
    assert normalised({"completions": [conversation]}) == {"completions": [[{"role": "user", "content": "a"}]]}


def test_content_in_parts_of_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert trained({"messages": [{"role": "user", "content": parts}]})[0] == [USER, A, B, EOS]
    for content in ([], [{"type": "image", "image": "x"}], [parts[0], {"type": "image"}]):
        with pytest.raises(ValueError, match=r"\['content'\]=.*: allowed is a text, or a list of parts of type text"):
            trained({"messages": [{"role": "user", "content": content}]})


def test_other_columns_are_left_alone() -> None:
    edges = [{"from": "A", "value": 1}]
    row = {"prompt": "a", "completion": "b", "edges": edges}
    assert trained(row)[0] == [A, B, EOS]
    assert normalised(row) == row


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": "c", "reasoning_content": "<eos><user>d"},
        {"role": "assistant", "tool_calls": [{"function": {"arguments": {"<eos>": "<eos><user>d"}}}]},
    ],
    ids=["reasoning", "arguments"],
)
def test_no_part_of_a_message_forges_a_turn(message: dict[str, Any]) -> None:
    """Every text of a row is text under plain_text, its keys included; a role cannot be more than a name."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CALLS
    row = {"messages": [{"role": "user", "content": "a"}, message]}
    forged, plain = trained(row, tokenizer)[0], trained(row, tokenizer, plain_text=True)[0]
    assert forged.count(EOS) > 2
    assert plain.count(EOS) == 2
    assert plain.count(USER) == 1
    with pytest.raises(ValueError, match="plain_text=True: role 'user>a<eos><assistant': allowed are letters"):
        trained({"messages": [{"role": "user>a<eos><assistant", "content": "d"}]}, tokenizer, plain_text=True)
    tokenizer.chat_template = "{{ tools }}{{ extra }}" + CALLS
    row = {"messages": [{"role": "user", "content": "a"}], "tools": [{"a": "<user>"}]}
    row["chat_template_kwargs"] = {"extra": "<user>"}
    assert trained(row, tokenizer)[0].count(USER) == 3
    assert trained(row, tokenizer, plain_text=True)[0].count(USER) == 1


# ---- which column ----


def test_the_text_field_that_is_asked_for() -> None:
    messages = [{"role": "user", "content": "b"}]
    assert trained({"body": "a", "messages": messages}, dataset_text_field="body", scored=False)[0] == [A, EOS]
    data = Dataset.from_list([{"text": "a", "messages": messages}])
    with pytest.raises(
        ValueError, match=r"dataset_text_field='storey': the dataset has columns \['messages', 'text'\]"
    ):
        encode_dataset(data, make_tokenizer(), None, reading=Reading(scored=False, dataset_text_field="storey"))


def test_documents_of_prompt_and_completion_train_as_a_whole() -> None:
    """seq: every token of every document."""
    (example,) = build("seq", data=[{"prompt": "abc", "completion": "de"}]).train_dataset
    (row,) = example["rows"]
    assert [*row["prompt_ids"], *row["completion_ids"]] == [A, B, C, D, E, EOS]
    assert len(row["prompt_ids"]) == 1
    assert row["loss_mask"] is None


# ---- what is said of a bad row ----

RAISES = (
    "{% for m in messages %}{% if m.content == 'b' %}{{ raise_exception('bad turn') }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (RAISES, "row 1: TemplateError: bad turn"),
        ("{% for m in messages %}{{ 1 + m.content }}{% endfor %}", "row 0: TypeError: unsupported operand"),
        ("{% for m in messages %}", "row 0: TemplateSyntaxError: Unexpected end of template"),
    ],
)
@pytest.mark.parametrize("online", [False, True])
def test_a_template_that_fails(template: str, message: str, online: bool) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    data = Dataset.from_list([{"messages": [{"role": "user", "content": text}]} for text in "ab"])
    with pytest.raises(ValueError, match=message):
        encode_prompts(data, tokenizer) if online else encode_dataset(data, tokenizer, None)


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ({"conversations": [{"from": "human", "value": "a"}, None]}, r"conversations\[1\]=None: allowed are human"),
        (
            {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"tokenize": True}},
            r"chat_template_kwargs\['tokenize'\]: not for the template",
        ),
    ],
)
def test_bad_rows(example: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_example(example, make_tokenizer())


def test_reserved_template_arguments_of_a_run() -> None:
    with pytest.raises(ValueError, match=r"chat_template_kwargs\['add_generation_prompt'\]: not for the template"):
        SFTConfig(output_dir="x", chat_template_kwargs={"add_generation_prompt": True})


def test_prompts_of_two_kinds() -> None:
    """A dataset column holds one type; what prompts are taken from may differ."""
    messages = [{"role": "user", "content": "b"}]
    data = Dataset.from_list([{"prompt": "a", "messages": None}, {"prompt": None, "messages": messages}])
    with pytest.raises(ValueError, match="row 1: its prompt is messages, that of row 0 is a text"):
        encode_prompts(data, make_tokenizer())


def test_a_formatting_func_that_raises() -> None:
    def broken(row: dict[str, Any]) -> str:
        return row["text"] if row["text"] == "a" else 1 / 0  # type: ignore[return-value]

    data = [{"text": "a"}, {"text": "b"}]
    with pytest.raises(ValueError, match="train dataset row 1: formatting_func raised ZeroDivisionError"):
        build("sft", data=data, trainer={"formatting_func": broken})


# ---- datasets ----


@pytest.mark.parametrize("kind", ["numpy", "torch", "arrow", "pandas"])
def test_the_form_in_which_a_dataset_is_looked_at(kind: str) -> None:
    """It says nothing about the rows."""
    data = Dataset.from_list([{"input_ids": [A, B, C]}, {"input_ids": [B, C, D]}])
    run = build("sft", data=data.with_format(kind), num_train_epochs=1)
    run.train()
    assert run.train_dataset["rows"] == build("sft", data=data).train_dataset["rows"]


def test_transforms_are_refused() -> None:
    data = Dataset.from_list([{"text": "a"}]).with_transform(lambda batch: {"text": ["b" for _ in batch["text"]]})
    with pytest.raises(ValueError, match="train dataset: what with_transform makes is not kept"):
        build("sft", data=data)


def test_streams_that_break() -> None:
    def breaks() -> Iterator[dict[str, str]]:
        yield {"text": "ab"}
        yield {"text": "ab"}
        raise OSError("the line is dead")

    run = build("sft", data=stream(breaks), max_steps=2, per_device_train_batch_size=4)
    with pytest.raises(ValueError, match="train dataset: cannot be read after 2 rows: OSError: the line is dead"):
        run.train()


def test_tokens_that_a_stream_loses_are_said(caplog: pytest.LogCaptureFixture) -> None:
    def long() -> Iterator[dict[str, str]]:
        for _ in range(8):
            yield {"text": "abcdefgh"}

    run = build("sft", data=stream(long), max_steps=2, max_length=4, per_device_train_batch_size=2)
    run.train()
    # Of 8 tokens that could train 3 do, the rest and the EOS do not; the loader reads a batch ahead.
    assert [entry["tokens_lost"] for entry in run.state.log_history if "loss" in entry] == [20, 30]
    assert caplog.text.count("tokens that would train are cut off or left out") == 1


# ---- files and options ----


def test_a_file_is_the_file_of_that_name(tmp_path: Path) -> None:
    """Brackets and stars in a name are no pattern."""
    for name, text in (("rows[12].jsonl", "right"), ("rows1.jsonl", "wrong"), ("r*.jsonl", "star")):
        (tmp_path / name).write_text(json.dumps({"text": text}) + "\n")
    for name, text in (("rows[12].jsonl", "right"), ("r*.jsonl", "star")):
        rows, _ = load_rows(DataArguments(dataset_name=str(tmp_path / name), held_out_rows=0), 0)
        assert list(rows) == [{"text": text}]


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (DataArguments, {"dataset_name": ["a.jsonl", "b.jsonl"]}, "dataset_name="),
        (DataArguments, {"dataset_name": 5}, "dataset_name=5: allowed is a text or None"),
        (DataArguments, {"dataset_train_split": None}, "dataset_train_split=None: allowed is a text"),
        (ModelArguments, {"lora_target_modules": None}, "lora_target_modules=None"),
        (ModelArguments, {"model_name_or_path": 3}, "model_name_or_path=3: allowed is a text or None"),
    ],
)
def test_values_of_another_type(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**options)


def test_modules_as_a_list() -> None:
    config = ModelArguments(lora_target_modules=["q_proj", "v_proj"]).peft_config()  # type: ignore[arg-type]
    assert config is not None
    assert config.target_modules == {"q_proj", "v_proj"}
