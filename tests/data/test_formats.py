"""Dataset shapes to token ids, written out by hand."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import EOS, PAD, VOCAB, make_tokenizer
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from hf_strategies.data.chat import encode_prompt, prompt_of
from hf_strategies.data.formats import collate, encode_dataset, encode_prompts, read_rows

A, B, C, D = (VOCAB[c] for c in "abcd")
USER, ASSISTANT = VOCAB["<user>"], VOCAB["<assistant>"]


def chat(user: str, *assistant: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": user}, *({"role": "assistant", "content": a} for a in assistant)]


@pytest.mark.parametrize("pad_is_eos", [False, True])
@pytest.mark.parametrize(
    ("example", "expected"),
    [
        ({"text": "abc"}, [([A], [B, C, EOS], None)]),
        ({"text": "a<eos>"}, [([A], [EOS], None)]),
        ({"input_ids": [A, B]}, [([A], [B], None)]),
        ({"messages": chat("a", "b")}, [([USER], [A, EOS, ASSISTANT, B, EOS], None)]),
        ({"prompt": "ab", "completion": "cd"}, [([A, B], [C, D, EOS], None)]),
        ({"prompt": chat("a"), "completion": chat("", "b")[1:]}, [([USER, A, EOS, ASSISTANT], [B, EOS], None)]),
        ({"prompt": "a", "chosen": "b", "rejected": "cd"}, [([A], [B, EOS], 1.0), ([A], [C, D, EOS], 0.0)]),
        (
            {"prompt": chat("a"), "chosen": chat("", "b")[1:], "rejected": chat("", "c")[1:]},
            [([USER, A, EOS, ASSISTANT], [B, EOS], 1.0), ([USER, A, EOS, ASSISTANT], [C, EOS], 0.0)],
        ),
        (
            {"prompt": "a", "completions": ["b", "c"], "rewards": [0.5, 2]},
            [([A], [B, EOS], 0.5), ([A], [C, EOS], 2.0)],
        ),
    ],
)
def test_shapes(example: dict[str, Any], expected: list[tuple], pad_is_eos: bool) -> None:
    """Pitfalls C-54, D-63: the prompt is a prefix; exactly one end token, trained, also when it is the pad."""
    got = read_rows(example, make_tokenizer(pad_is_eos))
    assert [(list(r.prompt_ids), list(r.completion_ids), r.reward) for r in got] == expected
    batch = collate([{"rows": [vars(r) for r in got]}], PAD)["batch"]
    assert batch.loss_mask.sum(dim=1).tolist() == [len(completion) for _, completion, _ in expected]


def test_no_token_spans_the_boundary() -> None:
    """Pitfalls A-17, C-54: with a merge of a and b, "ca" + "b" stays [c, a] + [b]."""
    vocab = {"<eos>": 0, "a": 1, "b": 2, "c": 3, "ab": 4}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<eos>")
    assert tokenizer("cab")["input_ids"] == [3, 4]
    chosen, rejected = read_rows({"prompt": "ca", "chosen": "b", "rejected": "c"}, tokenizer)
    assert chosen.prompt_ids == rejected.prompt_ids == [3, 1]
    assert (chosen.completion_ids, rejected.completion_ids) == ([2, 0], [3, 0])


def test_rows_that_cannot_train_are_counted() -> None:
    """Pitfalls C-55, D-66: with the reason; completions are cut to fit."""
    tokenizer = make_tokenizer()
    data = Dataset.from_list([{"prompt": "a" * n, "completion": "b" * 5} for n in (2, 4, 6, 9)])
    encoded = encode_dataset(data, tokenizer, max_length=6)
    lengths = [(len(r["prompt_ids"]), len(r["completion_ids"])) for e in encoded.dataset for r in e["rows"]]
    assert lengths == [(2, 4), (4, 2)]
    assert encoded.dropped == {"prompt_too_long": 2}
    assert encoded.longest == 6
    with pytest.raises(
        ValueError, match=r"no row of the dataset can train \(1 rows, dropped: \{'prompt_too_long': 1\}"
    ):
        encode_dataset(data.select([3]), tokenizer, max_length=6)
    groups = Dataset.from_list([{"prompt": "a", "completions": ["b"], "rewards": [1.0]}] * 2)
    with pytest.raises(ValueError, match="'group_too_small': 2"):
        encode_dataset(groups, tokenizer, None, min_rows=2)


def test_packing_loses_nothing() -> None:
    tokenizer = make_tokenizer()
    texts = ["abcdefghij", "ab", "abc", "a"]
    encoded = encode_dataset(Dataset.from_list([{"text": t} for t in texts]), tokenizer, max_length=6, packed=True)
    pieces = [[*r["prompt_ids"], *r["completion_ids"]] for e in encoded.dataset for r in e["rows"]]
    whole = sorted(t for text in texts for t in [*(VOCAB[c] for c in text), EOS])
    assert sorted(t for piece in pieces for t in piece) == whole
    assert all(sum(1 + len(r["completion_ids"]) for r in e["rows"]) <= 6 for e in encoded.dataset)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": [1.0]}, "row 0: rewards has 1 entries for 2 completions"),
        ({"rewards": [1.0, float("inf")]}, r"row 0: rewards\[1\]=inf: rewards must be finite"),
        (
            {"old_logprobs": [[-1.0], [-1.0]]},
            r"row 0: old_logprobs shape must match completions: got \[1, 1\], expected \[2, 2\]",
        ),
        ({"old_logprobs": [[-1.0, float("nan")], [-1.0, -1.0]]}, "row 0: old_logprobs must be finite"),
    ],
)
def test_scored_groups_are_checked(changes: dict[str, Any], message: str) -> None:
    example = {"prompt": "a", "completions": ["b", "c"], "rewards": [1.0, 0.0], **changes}
    with pytest.raises(ValueError, match=message):
        encode_dataset(Dataset.from_list([example]), make_tokenizer(), None)


def test_no_gold_answer_in_the_prompt() -> None:
    assert prompt_of({"messages": chat("a", "gold")}) == chat("a")
    assert prompt_of({"instruction": "do", "input": "this", "output": "gold"}) == "do\n\nthis"
    assert prompt_of({"instruction": "do", "input": "", "output": "gold"}) == "do"
    with pytest.raises(KeyError, match=r"it has \['question'\]"):
        prompt_of({"question": "x"})
    encoded, longest = encode_prompts(
        Dataset.from_list([{"messages": chat("ab", "c"), "answer": "c"}]), make_tokenizer()
    )
    assert encoded[0]["prompt_ids"] == [USER, A, B, EOS, ASSISTANT]
    assert encoded[0]["answer"] == "c"
    assert longest == 5
    with pytest.raises(ValueError, match="has no tokens"):
        encode_prompt(make_tokenizer(), "")
