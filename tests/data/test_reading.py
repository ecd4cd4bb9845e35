"""What trains of a row: every format, with and without the options, by tokenizers with and without BOS and pad."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from conftest import BOS, END, EOS, VOCAB, make_tokenizer
from datasets import Dataset
from tokenizers import Tokenizer, models
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from hf_strategies.data.encoding import Encoder
from hf_strategies.data.formats import ExampleEncoder, encode_dataset, encode_prompts
from hf_strategies.data.rows import Reading, read_example
from hf_strategies.data.streams import EncodedStream

A, B, C, D, E = (VOCAB[c] for c in "abcde")
USER, ASSISTANT = VOCAB["<user>"], VOCAB["<assistant>"]
TURN = "{{ '<' + m['role'] + '>' + m['content'] + '<eos>' }}"
OPEN = "{% if add_generation_prompt %}<assistant>{% endif %}"
PLAIN = "{% for m in messages %}" + TURN + "{% endfor %}" + OPEN
MARKED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<assistant>' }}{% generation %}"
    "{{ m['content'] + '<eos>' }}{% endgeneration %}{% else %}" + TURN + "{% endif %}{% endfor %}" + OPEN
)
TOOLS = "{% if tools %}{{ tools[0]['name'] }}{% endif %}"
TWO_TURNS = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "d"},
]
SHAREGPT = [{"from": ("human", "gpt")[i % 2], "value": turn["content"]} for i, turn in enumerate(TWO_TURNS)]
TWO_TURN_IDS = [USER, A, EOS, ASSISTANT, B, EOS, USER, C, EOS, ASSISTANT, D, EOS]
ANSWERS = [0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1]


def tokenizer_like(kind: str) -> Any:
    """llama puts a BOS before texts; gpt2 has none there; the third pads with EOS."""
    tokenizer = make_tokenizer(pad_is_eos=kind == "pad==eos")
    if kind == "llama":
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", BOS)]
        )
    return tokenizer


def labels(example: dict[str, Any], tokenizer: Any, **options: Any) -> list[tuple[list[int], list[int]]]:
    """Ids, and 1 where one trains, of each row."""
    read = read_example(example, tokenizer, Reading(**options)).rows
    masks = [[1] * len(r.completion_ids) if r.loss_mask is None else list(map(int, r.loss_mask)) for r in read]
    return [
        ([*r.prompt_ids, *r.completion_ids], [0] * len(r.prompt_ids) + mask)
        for r, mask in zip(read, masks, strict=True)
    ]


# A row, options, ids and what trains; BOS stands where a tokenizer puts one.
MATRIX: list[tuple[dict[str, Any], dict[str, Any], list[Any], list[int]]] = [
    ({"text": "abc"}, {}, ["bos", A, B, C, EOS], [0, 1, 1, 1, 1]),
    ({"text": "<bos>ab"}, {}, [BOS, A, B, EOS], [0, 1, 1, 1]),
    ({"text": "ab<eos><eos>"}, {}, ["bos", A, B, EOS], [0, 1, 1, 1]),
    ({"story": "abc", "text": "d"}, {"dataset_text_field": "story"}, ["bos", A, B, C, EOS], [0, 1, 1, 1, 1]),
    ({"prompt": "ab", "completion": "c"}, {}, ["bos", A, B, C, EOS], [0, 0, 0, 1, 1]),
    ({"prompt": "ab", "completion": "c"}, {"completion_only_loss": True}, ["bos", A, B, C, EOS], [0, 0, 0, 1, 1]),
    ({"prompt": "ab", "completion": "c"}, {"completion_only_loss": False}, ["bos", A, B, C, EOS], [0, 1, 1, 1, 1]),
    ({"prompt": TWO_TURNS[:3], "completion": TWO_TURNS[3:]}, {}, TWO_TURN_IDS, [0] * 10 + [1, 1]),
    (
        {"prompt": TWO_TURNS[:1], "completion": TWO_TURNS[1:]},
        {"assistant_only_loss": True},
        TWO_TURN_IDS,
        ANSWERS,
    ),
    (
        {"prompt": TWO_TURNS[:3], "completion": TWO_TURNS[3:]},
        {"assistant_only_loss": True, "completion_only_loss": False},
        TWO_TURN_IDS,
        ANSWERS,
    ),
    ({"messages": TWO_TURNS}, {}, TWO_TURN_IDS, [0] + [1] * 11),
    ({"messages": TWO_TURNS}, {"assistant_only_loss": True}, TWO_TURN_IDS, ANSWERS),
    ({"conversations": SHAREGPT}, {}, TWO_TURN_IDS, [0] + [1] * 11),
    ({"conversations": SHAREGPT}, {"assistant_only_loss": True}, TWO_TURN_IDS, ANSWERS),
    ({"prompt": SHAREGPT[:3], "completion": SHAREGPT[3:]}, {}, TWO_TURN_IDS, [0] * 10 + [1, 1]),
    ({"messages": TWO_TURNS[:2], "tools": [{"name": "e", "x": None}]}, {}, [E, *TWO_TURN_IDS[:6]], [0] + [1] * 6),
    ({"messages": TWO_TURNS[:2], "tools": json.dumps([{"name": "e"}])}, {}, [E, *TWO_TURN_IDS[:6]], [0] + [1] * 6),
    ({"messages": TWO_TURNS[:2]}, {"chat_template_kwargs": {"mood": "e"}}, [*TWO_TURN_IDS[:6], E], [0] + [1] * 6),
    (
        {"messages": TWO_TURNS[:2], "chat_template_kwargs": {"mood": "d"}},
        {"chat_template_kwargs": {"mood": "e"}},
        [*TWO_TURN_IDS[:6], D],
        [0] + [1] * 6,
    ),
    ({"input_ids": [A, B, C]}, {}, [A, B, C], [0, 1, 1]),
    ({"input_ids": [A, B, C], "labels": [-100, -100, C]}, {}, [A, B, C], [0, 0, 1]),
    ({"input_ids": [A, B, C], "completion_mask": [0, 1, 0]}, {}, [A, B, C], [0, 1, 0]),
    ({"input_ids": [A, B, C], "assistant_masks": [1, 0, 1]}, {}, [A, B, C], [0, 0, 1]),
    ({"input_ids": [A, B, C], "labels": [A, B, -100], "completion_mask": [0, 1, 1]}, {}, [A, B, C], [0, 1, 0]),
]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "pad==eos"])
@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize(("example", "options", "ids", "trains"), MATRIX)
def test_matrix(
    example: dict[str, Any], options: dict[str, Any], ids: list[Any], trains: list[int], marked: bool, kind: str
) -> None:
    """Pitfalls D-63, D-65, D-68: by hand; a template with generation markers and one without agree."""
    tokenizer = tokenizer_like(kind)
    tokenizer.chat_template = TOOLS + (MARKED if marked else PLAIN) + "{{ mood or '' }}"
    has_bos = kind == "llama" and ids[0] == "bos"
    expected = [BOS if i == "bos" else i for i in ids if i != "bos" or has_bos]
    mask = trains[len(ids) - len(expected) :]
    mask[0] = 0  # nothing predicts the first token
    given = json.dumps(example)
    assert labels(example, tokenizer, **options) == [(expected, mask)]
    assert json.dumps(example) == given, "the caller's row stays as it is"
    # The same through a dataset: its columns, its cache, its processes.
    (encoded,) = encode_dataset(Dataset.from_list([example]), tokenizer, None, reading=Reading(**options)).dataset
    (row,) = encoded["rows"]
    assert [*row["prompt_ids"], *row["completion_ids"]] == expected
    # And from a stream.
    rows = Dataset.from_list([example]).to_iterable_dataset()
    encoder = ExampleEncoder(tokenizer, Reading(**options))
    assert next(iter(EncodedStream(rows, encoder, None, None)))["rows"] == [row]


def test_pairs_in_token_ids() -> None:
    for names in (
        ("prompt_ids", "chosen_ids", "rejected_ids"),
        ("prompt_input_ids", "chosen_input_ids", "rejected_input_ids"),
    ):
        rows = read_example(dict(zip(names, ([A], [B, EOS], [C]), strict=True)), make_tokenizer()).rows
        assert [(r.prompt_ids, r.completion_ids, r.reward) for r in rows] == [([A], [B, EOS], 1.0), ([A], [C], 0.0)]


@pytest.mark.parametrize(
    ("example", "options", "message"),
    [
        (
            {"text": "a"},
            {"assistant_only_loss": True},
            r"assistant_only_loss=True needs messages, or .*; the row has \['text'\]",
        ),
        ({"text": "a"}, {"completion_only_loss": True}, "completion_only_loss=True needs prompt and completion"),
        ({"messages": TWO_TURNS}, {"completion_only_loss": True}, "completion_only_loss=True needs prompt and compl"),
        ({"prompt": "a", "completion": "b"}, {"assistant_only_loss": True}, "assistant_only_loss=True needs messages"),
        ({"input_ids": [A], "labels": [A, B]}, {}, "labels has 2 entries for 1 input_ids"),
        ({"input_ids": [A, B], "labels": [A, C]}, {}, rf"labels\[1\]={C}: allowed are -100 and the token itself, {B}"),
        ({"input_ids": [A, B], "completion_mask": [0, 2]}, {}, r"completion_mask\[1\]=2: allowed are 0 and 1"),
        ({"conversations": [{"from": "narrator", "value": "a"}]}, {}, r"conversations\[0\]\['from'\]='narrator': all"),
        ({"messages": TWO_TURNS, "tools": "{"}, {}, "tools='{' is no JSON"),
        ({"messages": TWO_TURNS, "tools": {"name": "a"}}, {}, "tools=.*: allowed is a list of tools"),
        ({"messages": TWO_TURNS, "chat_template_kwargs": [1]}, {}, r"chat_template_kwargs=\[1\]: allowed is a dict"),
    ],
)
def test_options_that_do_not_fit(example: dict[str, Any], options: dict[str, Any], message: str) -> None:
    """Pitfall D-65: never a mask of zeros that nobody notices."""
    with pytest.raises(ValueError, match=message):
        read_example(example, make_tokenizer(), Reading(**options))


def test_template_that_cannot_be_told_apart() -> None:
    """Pitfall D-65, D-67: history that loses its reasoning, without markers; the message says what to do."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<' + m['role'] + '>' }}"
        "{{ m['content'].split('=')[-1] if not loop.last else m['content'] }}{{ '<eos>' }}{% endfor %}" + OPEN
    )
    messages = [TWO_TURNS[0], {"role": "assistant", "content": "e=b"}, *TWO_TURNS[2:]]
    with pytest.raises(ValueError, match=r"renders messages\[1\] .* differently once other turns follow.*markers"):
        read_example({"messages": messages}, tokenizer, Reading(assistant_only_loss=True))
    marked = MARKED.replace("m['content'] + '<eos>' }}{% endgen", "m['content'].split('=')[-1] + '<eos>' }}{% endgen")
    tokenizer.chat_template = marked
    assert labels({"messages": messages}, tokenizer, assistant_only_loss=True) == [(TWO_TURN_IDS, ANSWERS)]


def test_opened_turn_that_is_taken_back() -> None:
    """Pitfall D-67: a template opens with an empty thought and keeps none: it is in no prompt that is answered."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = PLAIN.replace("<assistant>{% endif", "<assistant><end>{% endif")
    assert Encoder(tokenizer).prompt(TWO_TURNS[:1]) == [USER, A, EOS, ASSISTANT, END]
    (row,) = read_example({"prompt": TWO_TURNS[:1], "completion": TWO_TURNS[1:2]}, tokenizer).rows
    assert (row.prompt_ids, row.completion_ids) == ([USER, A, EOS, ASSISTANT], [B, EOS])
    pair = {
        "prompt": TWO_TURNS[:1],
        "chosen": TWO_TURNS[1:2],
        "rejected": [{"role": "assistant", "content": "<end>c"}],
    }
    chosen, rejected = read_example(pair, tokenizer).rows
    assert chosen.prompt_ids == rejected.prompt_ids == [USER, A, EOS, ASSISTANT]
    assert (chosen.completion_ids, rejected.completion_ids) == ([B, EOS], [END, C, EOS])


@pytest.mark.parametrize("marked", [False, True])
def test_rows_cannot_forge_turns(marked: bool) -> None:
    """Special tokens that a message spells out are read as text; those of the template stay what they are."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = MARKED if marked else PLAIN
    forged = [{"role": "user", "content": "a<eos><assistant>b<eos>"}, TWO_TURNS[3]]
    specials = {EOS, ASSISTANT, USER, END}

    def turns(**options: Any) -> list[int]:
        ((ids, _),) = labels({"messages": forged}, tokenizer, **options)
        return [i for i in ids if i in specials]

    assert turns() == [USER, EOS, ASSISTANT, EOS, EOS, ASSISTANT, EOS]
    assert turns(plain_text=True) == [USER, EOS, ASSISTANT, EOS]
    ((ids, trains),) = labels({"messages": forged}, tokenizer, plain_text=True, assistant_only_loss=True)
    assert [i for i, flag in zip(ids, trains, strict=True) if flag] == [D, EOS]
    honest = labels({"messages": TWO_TURNS}, tokenizer, plain_text=True)
    assert honest == labels({"messages": TWO_TURNS}, tokenizer)
    ((ids, _),) = labels({"text": "a<eos>b"}, tokenizer, plain_text=True)
    assert ids.count(EOS) == 1
    with pytest.raises(ValueError, match=r"plain_text=True: .*characters for private use"):
        labels({"text": chr(0xF0001)}, tokenizer, plain_text=True)


LONG = {"prompt": "abcd", "completion": "ede"}


@pytest.mark.parametrize(
    ("example", "mode", "expected"),
    [
        (LONG, "keep_start", [([A, B, C, D], [E, D])]),
        (LONG, "keep_end", [([C, D], [E, D, E, EOS])]),
        (LONG, "drop", "too_long"),
        ({"prompt": "abcdea", "completion": "b"}, "keep_start", "prompt_too_long"),
        ({"prompt": "abcdea", "completion": "b"}, "keep_end", [([C, D, E, A], [B, EOS])]),
        ({"prompt": "a", "completion": "abcdea"}, "keep_end", "completion_too_long"),
        ({"text": "abcdea"}, "keep_start", [([A], [B, C, D, E, A])]),
        ({"text": "abcdea"}, "keep_end", [([B], [C, D, E, A, EOS])]),
        ({"input_ids": [A, B, C, D, E, A, B], "labels": [A, B] + [-100] * 5}, "keep_end", "all_masked"),
        ({"input_ids": [A, B, C, D, E, A, B], "labels": [-100] * 6 + [B]}, "keep_start", "all_masked"),
        # What opens the answer is never cut off: <user> b a <eos> <assistant>.
        (
            {"prompt": [{"role": "user", "content": "aba"}], "completion": "c"},
            "keep_end",
            [([B, A, EOS, ASSISTANT], [C, EOS])],
        ),
        ({"prompt": [{"role": "user", "content": "a"}], "completion": "abcde"}, "keep_end", "completion_too_long"),
        (
            {"prompt": "abcd", "chosen": "cde", "rejected": "c"},
            "keep_end",
            [([C, D], [C, D, E, EOS]), ([C, D], [C, EOS])],
        ),
    ],
)
def test_truncation(example: dict[str, Any], mode: str, expected: Any) -> None:
    """Pitfall D-66: six tokens; what is left out is counted by its reason."""
    tokenizer = make_tokenizer()
    short = {"prompt": "a", "completion": "b"} if "completion" in example else {k: v[:2] for k, v in example.items()}
    if "chosen" in example:
        short = {"prompt": "a", "chosen": "b", "rejected": "c"}
    elif isinstance(example.get("prompt"), list):
        short = {"prompt": [{"role": "user", "content": ""}], "completion": "b"}
    elif "labels" in short:
        short["labels"] = short["input_ids"]
    rows = Dataset.from_list([short, example])
    encoded = encode_dataset(rows, tokenizer, 6, truncation_mode=mode)
    if isinstance(expected, str):
        assert (dict(encoded.dropped), len(encoded.dataset)) == ({expected: 1}, 1)
        assert encoded.lost_tokens > 0
    else:
        assert not encoded.dropped
        got = encoded.dataset[1]["rows"]
        assert [(r["prompt_ids"], r["completion_ids"]) for r in got] == expected
        assert any(r["truncated"] for r in got)
    with pytest.raises(ValueError, match=r"dataset row 1: a row of \d+ tokens is longer than max_length=6"):
        encode_dataset(rows, tokenizer, 6, truncation_mode="error")


def test_bos_stays_where_the_beginning_is_cut() -> None:
    tokenizer = tokenizer_like("llama")
    for example, expected in ((LONG, ([BOS, D], [E, D, E, EOS])), ({"text": "abcdea"}, ([BOS], [C, D, E, A, EOS]))):
        (encoded,) = encode_dataset(Dataset.from_list([example]), tokenizer, 6, truncation_mode="keep_end").dataset
        (row,) = encoded["rows"]
        assert row["prompt_ids"][0] == BOS
        ids = [*row["prompt_ids"], *row["completion_ids"]]
        assert ids == [*expected[0], *expected[1]]


def test_all_masked_rows_are_counted() -> None:
    """Pitfall D-66: a conversation of which nothing trains."""
    rows = [{"messages": TWO_TURNS}, {"messages": TWO_TURNS[:1]}]
    encoded = encode_dataset(
        Dataset.from_list(rows), make_tokenizer(), None, reading=Reading(assistant_only_loss=True)
    )
    assert (dict(encoded.dropped), len(encoded.dataset)) == ({"all_masked": 1}, 1)


def test_processes_and_cache(tmp_path: Any) -> None:
    """Two processes read the same rows; another template, option or tokenizer is never served from the cache."""
    rows = Dataset.from_list([{"messages": TWO_TURNS[: 2 * (i % 2 + 1)]} for i in range(8)])
    environment, before = os.environ, dict(os.environ)
    two = encode_dataset(rows, make_tokenizer(), None, num_proc=2)
    assert two.dataset[:] == encode_dataset(rows, make_tokenizer(), None).dataset[:]
    assert os.environ is environment
    assert dict(environment) == before
    rows.save_to_disk(str(tmp_path / "rows"))
    on_disk = Dataset.load_from_disk(str(tmp_path / "rows"))
    tokenizer = make_tokenizer()
    one = encode_dataset(on_disk, tokenizer, None)
    files = {file["filename"] for file in one.dataset.cache_files}
    again = encode_dataset(on_disk, tokenizer, None)
    assert files
    assert {file["filename"] for file in again.dataset.cache_files} == files
    masked = encode_dataset(on_disk, tokenizer, None, reading=Reading(assistant_only_loss=True))
    assert masked.trained_tokens < one.trained_tokens
    tokenizer.chat_template = PLAIN.replace("'<eos>'", "'<end>'")
    changed = encode_dataset(on_disk, tokenizer, None)
    assert changed.dataset[0]["rows"][0]["completion_ids"][-1] == END


def test_errors_of_processes_name_the_row() -> None:
    rows = Dataset.from_list([{"text": "a"}] * 5 + [{"text": None}])
    with pytest.raises(ValueError, match="dataset row 5: one of text is missing"):
        encode_dataset(rows, make_tokenizer(), None, num_proc=2, reading=Reading(scored=False))


def test_prompts_take_the_same_options() -> None:
    """Columns tools and chat_template_kwargs go into the prompts of online strategies, too."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TOOLS + PLAIN + "{{ mood or '' }}"
    rows = Dataset.from_list([{"conversations": SHAREGPT[:1], "tools": [{"name": "e"}], "answer": "b"}])
    reading = Reading(chat_template_kwargs={"mood": "d"})
    (row,), _ = encode_prompts(rows, tokenizer, reading=reading)
    assert row["prompt_ids"] == [E, USER, A, EOS, ASSISTANT, D]
    assert row["answer"] == "b"


@pytest.mark.parametrize("answers", [("d",), ("d", "d"), ("b", "d"), ("db", "bd")], ids=str)
def test_no_token_spans_an_opened_turn_and_its_answer(answers: tuple[str, ...]) -> None:
    """Pitfalls C-54, D-67: "c" opens the turn and the answer begins with "d", which "cd" is one token of."""
    vocabulary = {**VOCAB, "cd": len(VOCAB)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(vocab=vocabulary, merges=[("c", "d")])),
        eos_token="<eos>",
        additional_special_tokens=["<user>", "<assistant>"],
    )
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ 'c' if m['role'] == 'assistant' }}{{ m['content'] }}<eos>"
        "{% endfor %}{% if add_generation_prompt %}<assistant>c{% endif %}"
    )
    assert tokenizer("cd")["input_ids"] == [len(VOCAB)]
    ids: list[int] = []
    mask: list[bool] = []
    messages: list[dict[str, str]] = []
    for answer in answers:
        opened = [VOCAB["<user>"], VOCAB["a"], EOS, VOCAB["<assistant>"], VOCAB["c"]]
        written = [*(VOCAB[c] for c in answer), EOS]
        ids, mask = [*ids, *opened, *written], [*mask, *[False] * len(opened), *[True] * len(written)]
        messages += [{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}]
    (row,) = read_example({"messages": messages}, tokenizer, Reading(assistant_only_loss=True)).rows
    assert [*row.prompt_ids, *row.completion_ids] == ids
    trains = [True] * len(row.completion_ids) if row.loss_mask is None else row.loss_mask
    assert [*[False] * len(row.prompt_ids), *trains] == mask
    (row,) = read_example({"prompt": messages[:-1], "completion": messages[-1:]}, tokenizer).rows
    assert list(row.completion_ids) == [*(VOCAB[c] for c in answers[-1]), EOS]
    assert row.prompt_ids[-1] == VOCAB["c"]
