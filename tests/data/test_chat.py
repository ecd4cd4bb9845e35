"""Prompts: what a completion is conditioned on, and that no answer is in it."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import BOS, EOS, VOCAB, make_tokenizer
from datasets import Dataset
from tokenizers.processors import TemplateProcessing

from hf_strategies.data.chat import as_messages, is_conversation, prompt_of
from hf_strategies.data.encoding import Encoder
from hf_strategies.data.formats import encode_prompts

A, B, C = (VOCAB[c] for c in "abc")
USER, ASSISTANT = VOCAB["<user>"], VOCAB["<assistant>"]


def chat(*turns: str) -> list[dict[str, str]]:
    """User and assistant in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]


def tokenizer_with_bos() -> Any:
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    return tokenizer


@pytest.mark.parametrize(
    ("value", "expected"),
    [("text", False), ([], False), ([1, 2], False), (["a"], False), ([{"text": "a"}], False), (chat("a"), True)],
)
def test_what_is_a_conversation(value: Any, expected: bool) -> None:
    assert is_conversation(value) is expected


def test_texts_become_messages() -> None:
    assert as_messages("a", "user") == chat("a")
    assert as_messages(chat("a", "b"), "user") == chat("a", "b")


@pytest.mark.parametrize(
    ("example", "expected"),
    [
        ({"prompt": "a", "completion": "gold"}, "a"),
        ({"prompt": chat("a"), "answer": "gold"}, chat("a")),
        ({"messages": chat("a", "gold")}, chat("a")),
        ({"messages": chat("a", "b", "c", "gold")}, chat("a", "b", "c")),
        ({"messages": chat("a", "b", "c")}, chat("a", "b", "c")),
        ({"prompt": "a", "messages": chat("b", "gold")}, "a"),
        ({"prompt": None, "messages": chat("b", "gold")}, chat("b")),
        ({"instruction": "do", "input": "this", "output": "gold"}, "do\n\nthis"),
        ({"instruction": "do", "input": "", "output": "gold"}, "do"),
        ({"instruction": "do", "input": None, "output": "gold"}, "do"),
        ({"instruction": "do", "output": "gold"}, "do"),
    ],
)
def test_no_gold_answer_in_the_prompt(example: dict[str, Any], expected: Any) -> None:
    given = {key: list(value) if isinstance(value, list) else value for key, value in example.items()}
    assert prompt_of(example) == expected
    assert example == given, "the caller's row stays as it is"


def test_answers_travel_to_the_rewards() -> None:
    """Pitfall A-42: also the one that was taken off the prompt."""
    data = Dataset.from_list([{"messages": chat("ab", "c"), "answer": "c", "level": 3}])
    encoded, longest = encode_prompts(data, make_tokenizer())
    (row,) = encoded
    assert row["prompt_ids"] == [USER, A, B, EOS, ASSISTANT]
    assert row["prompt"] == chat("ab")
    assert (row["messages"], row["answer"], row["level"]) == (chat("ab", "c"), "c", 3)
    assert longest == 5
    instructions = Dataset.from_list([{"instruction": "a", "input": "b", "output": "c"}])
    encoded, _ = encode_prompts(instructions, make_tokenizer())
    assert VOCAB["c"] not in encoded[0]["prompt_ids"]
    assert encoded[0]["output"] == "c"


def test_longest_prompt() -> None:
    data = Dataset.from_list([{"prompt": "a" * n} for n in (3, 7, 2)])
    assert encode_prompts(data, make_tokenizer())[1] == 7


def test_prompts_that_cannot_be_used() -> None:
    tokenizer = make_tokenizer()
    with pytest.raises(ValueError, match=r"prompt '' has no tokens"):
        Encoder(tokenizer).prompt("")
    with pytest.raises(ValueError, match="prompt: got int, allowed are a text or a list of messages"):
        Encoder(tokenizer).prompt(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the prompt ends with an assistant turn"):
        Encoder(tokenizer).prompt(chat("a", "b"))
    with pytest.raises(KeyError, match=r"a row needs a 'prompt', 'messages' or 'instruction' column; it has \['q'\]"):
        prompt_of({"q": "x"})
    data = Dataset.from_list([{"prompt": "a"}, {"prompt": ""}])
    with pytest.raises(ValueError, match="dataset row 1: prompt '' has no tokens"):
        encode_prompts(data, tokenizer)


def test_conversations_need_a_template() -> None:
    """Pitfall F-92: the message says what to do; plain text needs none."""
    bare = make_tokenizer(chat=False)
    for call in (
        lambda: Encoder(bare).prompt(chat("a")),
        lambda: Encoder(bare).conversation(chat("a", "b"), generation_prompt=False),
    ):
        with pytest.raises(
            ValueError, match=r"no chat_template: set tokenizer.chat_template or chat_template_path, use an instr"
        ):
            call()
    assert Encoder(bare).prompt("a") == [A]


def test_special_tokens_of_texts_and_conversations() -> None:
    """A text gets what the tokenizer adds; a conversation has what its template writes, once."""
    tokenizer = tokenizer_with_bos()
    assert Encoder(tokenizer).prompt("a") == [BOS, A]
    assert Encoder(tokenizer).text("a", begins=False) == [A]
    assert Encoder(tokenizer).prompt(chat("a")) == [USER, A, EOS, ASSISTANT]
    tokenizer.chat_template = "<bos>" + tokenizer.chat_template
    assert Encoder(tokenizer).prompt(chat("a")) == [BOS, USER, A, EOS, ASSISTANT]


def test_generation_prompt() -> None:
    tokenizer = make_tokenizer()
    encoder = Encoder(tokenizer)
    assert encoder.conversation(chat("a"), generation_prompt=True) == [USER, A, EOS, ASSISTANT]
    assert encoder.conversation(chat("a"), generation_prompt=False) == [USER, A, EOS]
    assert encoder.conversation(chat("a", "b"), generation_prompt=False) == [
        USER,
        A,
        EOS,
        ASSISTANT,
        B,
        EOS,
    ]


def test_template_arguments_reach_the_template() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template += "{% if think %}a{% endif %}"
    assert Encoder(tokenizer, {"think": True}).conversation(chat("c"), generation_prompt=True) == [
        USER,
        C,
        EOS,
        ASSISTANT,
        A,
    ]
    assert Encoder(tokenizer, {"think": True}).prompt(chat("c")) == [USER, C, EOS, ASSISTANT, A]
    assert Encoder(tokenizer).prompt(chat("c")) == [USER, C, EOS, ASSISTANT]


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ({"prompt": [{"role": "user", "content": None}]}, r"prompt\[0\]\['content'\]=None: allowed is a text"),
        ({"messages": "a"}, "messages='a': allowed is a list of messages"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "nothing is left of it as a prompt"),
        ({"instruction": 5}, "instruction=5: allowed is a text"),
        ({"instruction": "a", "input": 5}, "input=5: allowed is a text"),
        ({"prompt": None, "answer": "a"}, r"it has \['answer', 'prompt'\], of which None are \['prompt'\]"),
    ],
)
def test_prompts_of_another_type(example: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^eval dataset row 0: .*{message}"):
        encode_prompts(Dataset.from_list([example]), make_tokenizer(), "eval dataset")
