"""Dataset shapes to token ids, written out by hand."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import EOS, PAD, VOCAB, golden_case, make_tokenizer
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from hf_strategies.data.answers import split_pair
from hf_strategies.data.chat import check_messages
from hf_strategies.data.encoding import Encoder
from hf_strategies.data.formats import collate, encode_dataset
from hf_strategies.data.rows import Reading, read_example, shape_of
from hf_strategies.modeling.stream import Stream

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
        # A pair without a prompt column: the prompt is what both begin with.
        ({"chosen": "abc", "rejected": "abd"}, [([A, B], [C, EOS], 1.0), ([A, B], [D, EOS], 0.0)]),
        (
            {"chosen": chat("a", "b"), "rejected": chat("a", "c")},
            [([USER, A, EOS, ASSISTANT], [B, EOS], 1.0), ([USER, A, EOS, ASSISTANT], [C, EOS], 0.0)],
        ),
        # Conversations that hold the prompt which a text column repeats: it is asked once.
        (
            {"prompt": "a", "chosen": chat("a", "b"), "rejected": chat("a", "c")},
            [([USER, A, EOS, ASSISTANT], [B, EOS], 1.0), ([USER, A, EOS, ASSISTANT], [C, EOS], 0.0)],
        ),
        (
            {"prompt": "a", "completions": ["b", "c"], "rewards": [0.5, 2]},
            [([A], [B, EOS], 0.5), ([A], [C, EOS], 2.0)],
        ),
        (
            {"prompt": chat("a"), "completions": [chat("", "b")[1:], chat("", "cd")[1:]], "rewards": [1.0, -1.0]},
            [([USER, A, EOS, ASSISTANT], [B, EOS], 1.0), ([USER, A, EOS, ASSISTANT], [C, D, EOS], -1.0)],
        ),
        # A text answers a conversation; a conversation of several turns is one prompt.
        ({"prompt": chat("a"), "completion": "b"}, [([USER, A, EOS, ASSISTANT], [B, EOS], None)]),
        (
            {"prompt": [*chat("a", "b"), *chat("c")], "completion": chat("", "d")[1:]},
            [([USER, A, EOS, ASSISTANT, B, EOS, USER, C, EOS, ASSISTANT], [D, EOS], None)],
        ),
        # The end is there exactly once where the text has it already.
        ({"prompt": "a", "completion": "b<eos>"}, [([A], [B, EOS], None)]),
        ({"prompt": "a", "completion": ""}, [([A], [EOS], None)]),
        # Columns that say nothing in this row are not there.
        ({"prompt": "a", "completion": "b", "chosen": None, "rejected": None}, [([A], [B, EOS], None)]),
    ],
)
def test_shapes(example: dict[str, Any], expected: list[tuple], pad_is_eos: bool) -> None:
    """Pitfalls C-54, D-63, D-68: the prompt is a prefix and does not train; exactly one end token does.

    Also when it is the pad token.
    """
    got = read_example(example, make_tokenizer(pad_is_eos)).rows
    assert [(list(r.prompt_ids), list(r.completion_ids), r.reward) for r in got] == expected
    batch = collate([{"rows": [vars(r) for r in got]}], PAD)["batch"]
    assert batch.loss_mask.sum(dim=1).tolist() == [len(completion) for _, completion, _ in expected]
    assert batch.prompt_mask.sum(dim=1).tolist() == [len(prompt) for prompt, _, _ in expected]
    trained = [batch.completion_ids[i][batch.loss_mask[i]].tolist() for i in range(batch.num_rows)]
    assert trained == [completion for _, completion, _ in expected]
    if expected[0][1][-1] == EOS and "messages" not in example:
        assert [row.count(EOS) for row in trained] == [1] * len(trained)


def test_prompt_of_a_pair_ends_before_the_space() -> None:
    """The space goes to the answers, where a prompt column would leave it: "a b" and "a c" are "a" and " b", " c"."""
    assert split_pair("a b", "a c") == {"prompt": "a", "chosen": " b", "rejected": " c"}


@pytest.mark.parametrize(
    ("chosen", "rejected"),
    [
        ("ab", "cb"),
        (" a", " b"),
        (chat("a", "b"), chat("c", "b")),
        (chat("a"), chat("a", "b")),
        (chat("a"), chat("a")),
    ],
)
def test_pair_without_a_prompt(chosen: Any, rejected: Any) -> None:
    """Nothing in common."""
    with pytest.raises(ValueError, match="must begin with the same prompt"):
        split_pair(chosen, rejected)


@pytest.mark.parametrize("turned", [False, True])
def test_one_answer_begins_with_the_other(turned: bool) -> None:
    """The shorter text says no more than its end; of conversations the shorter one's last message is its answer."""
    short, long = {"chosen": "ab", "rejected": "abc"}, {"chosen": chat("a", "b"), "rejected": chat("a", "b", "c", "d")}
    rows = [dict(zip(row, reversed(list(row.values())), strict=True)) if turned else row for row in (short, long)]
    texts, messages = (read_example(row, make_tokenizer()).rows[:: -1 if turned else 1] for row in rows)
    assert [[*row.prompt_ids, *row.completion_ids] for row in texts] == [
        [VOCAB["a"], VOCAB["b"], EOS],
        [VOCAB["a"], VOCAB["b"], VOCAB["c"], EOS],
    ]
    assert [len(row.completion_ids) for row in texts] == [1, 2]
    split = split_pair(long["chosen"], long["rejected"])
    assert split == {"prompt": chat("a"), "chosen": chat("a", "b")[1:], "rejected": chat("a", "b", "c", "d")[1:]}
    assert len(messages[0].completion_ids) < len(messages[1].completion_ids)
    assert list(messages[0].prompt_ids) == list(messages[1].prompt_ids)


def test_a_users_turn_is_no_answer() -> None:
    turns = [*chat("a", "b"), *chat("c")]
    with pytest.raises(ValueError, match="must be answers, not a user's turn"):
        split_pair(turns, [*turns, {"role": "assistant", "content": "d"}])


def test_equal_answers_are_counted() -> None:
    """As with a prompt column: left out, and said."""
    good = {"chosen": "ab", "rejected": "ac"}
    encoded = encode_dataset(
        Dataset.from_list([good, {"chosen": "ab", "rejected": "ab"}]), make_tokenizer(), 8, min_rows=2
    )
    assert encoded.dropped == {"equal_completions": 1}


def test_conversation_does_not_answer_a_text() -> None:
    with pytest.raises(ValueError, match="the prompt is a text and its answer a conversation"):
        read_example({"prompt": "a", "completion": chat("", "b")[1:]}, make_tokenizer())


def test_no_token_spans_the_boundary() -> None:
    """Pitfalls A-17, C-54: with a merge of a and b, "ca" + "b" stays [c, a] + [b]."""
    vocab = {"<eos>": 0, "a": 1, "b": 2, "c": 3, "ab": 4}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<eos>")
    assert tokenizer("cab")["input_ids"] == [3, 4]
    chosen, rejected = read_example({"prompt": "ca", "chosen": "b", "rejected": "c"}, tokenizer).rows
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


@pytest.mark.parametrize("packing", ["bfd", "bfd_split", "wrapped", "pieces", None])
def test_packing_loses_nothing_or_says_what(packing: str | None) -> None:
    """Of 11 tokens (the last is the end) a cut at 6 loses 5, where it does not make pieces."""
    texts = ["abcdefghij", "ab", "abc", "a"]
    data = Dataset.from_list([{"text": text} for text in texts])
    encoded = encode_dataset(data, make_tokenizer(), max_length=6, packing=packing)
    trained = sorted(token for e in encoded.dataset for r in e["rows"] for token in r["completion_ids"])
    kept = texts if packing not in (None, "bfd") else ["abcdef", *texts[1:]]
    ends = 4 if kept is texts else 3
    assert trained == sorted([EOS] * ends + [VOCAB[c] for text in kept for c in text[1:]])
    assert (encoded.trained_tokens, encoded.lost_tokens) == (len(trained), 16 - len(trained))
    assert encoded.lost_tokens == (0 if kept is texts else 5)
    assert all(sum(1 + len(r["completion_ids"]) for r in e["rows"]) <= 6 for e in encoded.dataset)
    examples = {"bfd": 3, "bfd_split": 4, "wrapped": 4, "pieces": 5, None: 4}[packing]
    assert len(encoded.dataset) == examples


def test_golden_plan_of_packing() -> None:
    """Bins, what fills them and positions of the tokens, with the document of 11 tokens cut at 8."""
    case = golden_case("bfd_packing_plan")
    lengths, capacity = case["inputs"]["lengths"], case["inputs"]["max_packed_len"]
    data = Dataset.from_list([{"input_ids": [number] * length} for number, length in enumerate(lengths)])
    encoded = encode_dataset(data, make_tokenizer(), capacity, packing="bfd")
    bins = [[r["prompt_ids"][0] for r in e["rows"]] for e in encoded.dataset]
    assert bins == case["right"]["bins"]
    streams = [Stream.of(collate([example], PAD)["batch"]) for example in encoded.dataset]
    assert [stream.num_tokens for stream in streams] == case["right"]["fill"]
    assert [stream.position_ids[0].tolist() for stream in streams] == case["right"]["position_ids"]
    assert (encoded.lost_tokens, dict(encoded.dropped)) == (3, {})


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
        ({"old_logprobs": [[-1.0, None], [-1.0, -1.0]]}, r"old_logprobs must be finite: old_logprobs\[0\]\[1\]=None"),
        (
            {"old_logprobs": [[-1.0, -1.0], None]},
            r"row 0: old_logprobs\[1\]=None: allowed is a list, one number per tok",
        ),
        ({"old_logprobs": [[-1.0, -1.0]]}, r"row 0: old_logprobs=\[\[.*: allowed is a list of 2 lists"),
        ({"old_logprobs": [-1.0, -1.0]}, r"row 0: old_logprobs\[0\]=-1.0: allowed is a list, one number per token"),
        (
            {"old_logprobs": [[-1.0, 0.5], [-1.0, -1.0]]},
            r"row 0: old_logprobs\[0\]\[1\]=0.5: allowed is a number <= 0",
        ),
        ({"rewards": 1.0}, r"row 0: rewards=1.0: allowed is a list, one entry per completion"),
        ({"rewards": ["1", "0"]}, r"row 0: rewards\[0\]='1': allowed is a number or None"),
        ({"completions": "bc"}, r"row 0: completions='bc': allowed is a list, one entry per completion"),
        ({"completions": ["b", None]}, r"row 0: completions\[1\]=None: allowed is a text"),
        ({"rewards": [None, None]}, r"no row of the dataset can train \(1 rows, dropped: \{'no_reward': 1\}\)"),
    ],
)
def test_scored_groups_are_checked(changes: dict[str, Any], message: str) -> None:
    example = {"prompt": "a", "completions": ["b", "c"], "rewards": [1.0, 0.0], **changes}
    with pytest.raises(ValueError, match=message):
        encode_dataset(Dataset.from_list([example]), make_tokenizer(), None)


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ({"text": 5}, "text=5: allowed is a text"),
        ({"text": ["a", "b"]}, r"text=\['a', 'b'\]: allowed is a text"),
        ({"prompt": 5, "completion": "b"}, "prompt: got int, allowed are a text or a list of messages"),
        ({"prompt": "a", "completion": 5}, "completion=5: allowed is a text"),
        ({"prompt": "a", "completion": ["b"]}, r"completion=\['b'\]: allowed is a text"),
        ({"prompt": "a", "completion": []}, r"completion=\[\]: allowed is a text"),
        (
            {"prompt": chat("a"), "completion": [{"role": "assistant"}]},
            r"completion\[0\]\['content'\]=None: allowed is a",
        ),
        ({"prompt": [{"role": "user"}], "completion": "b"}, r"prompt\[0\]\['content'\]=None: allowed is a text"),
        ({"messages": "a"}, "messages='a': allowed is a list of messages"),
        ({"messages": []}, r"messages=\[\]: allowed is a list of messages that is not empty"),
        ({"messages": [{"role": None, "content": "a"}]}, r"messages\[0\]\['role'\]=None: allowed is a text"),
        ({"messages": [{"role": "user", "content": 5}]}, r"messages\[0\]\['content'\]=5: allowed is a text"),
        ({"messages": [{"role": "user", "content": None}]}, r"messages\[0\]\['content'\]=None: allowed is a text"),
        ({"input_ids": 5}, "input_ids=5: allowed is a list of token ids"),
        ({"input_ids": "abc"}, "input_ids='abc': allowed is a list of token ids"),
        ({"input_ids": [1, -1]}, r"input_ids\[1\]=-1: allowed is a whole number >= 0"),
        ({"input_ids": [1.0, 2.0]}, r"input_ids\[0\]=1.0: allowed is a whole number >= 0"),
        ({"input_ids": [True, False]}, r"input_ids\[0\]=True: allowed is a whole number"),
    ],
)
@pytest.mark.parametrize("packing", [None, "bfd_split"])
def test_columns_of_another_type(example: dict[str, Any], message: str, packing: str | None) -> None:
    """Tokenizers take a list for several texts, and templates write None: both would train on something else."""
    good = {"text": "a", "prompt": chat("a"), "completion": "b", "messages": chat("a"), "input_ids": [1, 2]}
    if "content" not in str(example) and isinstance(example.get("prompt"), str):
        good["prompt"] = "a"
    with pytest.raises(ValueError, match=f"^dataset row 0: {message}"):
        encode_dataset(
            Dataset.from_list([example]), make_tokenizer(), None, packing=packing, reading=Reading(scored=False)
        )
    whole = Dataset.from_list([{name: good[name] for name in example}])
    encode_dataset(whole, make_tokenizer(), None, packing=packing)


def test_pairs_that_lack_their_prompt() -> None:
    """Without a column prompt a pair holds its prompt twice; a prompt that is missing in a row is not found there."""
    pairs = [{"prompt": prompt, "chosen": "ab", "rejected": "ac"} for prompt in ("a", None)]
    with pytest.raises(
        ValueError, match=r"^dataset row 1: prompt=None: allowed are a text or a list of messages, or no"
    ):
        encode_dataset(Dataset.from_list(pairs), make_tokenizer(), None, min_rows=2, reading=Reading(scored=True))
    for chosen, rejected in ((5, "a"), ("a", None), (["a"], ["b"])):
        with pytest.raises(ValueError, match=r"(chosen|rejected)=.*: allowed is a text"):
            split_pair(chosen, rejected)


def test_messages_of_tools_have_no_content() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    check_messages([{"role": "user", "content": "a"}, call], "messages")
    with pytest.raises(ValueError, match=r"messages\[0\]=None: allowed is a message, a dict with role and content"):
        check_messages([None], "messages")


def test_which_columns_count() -> None:
    """What learns from rewards never reads rows without them, and what does not never trains on a rejected answer."""
    every = ["prompt", "completion", "chosen", "rejected", "text"]
    assert shape_of(every) == shape_of(every, scored=True) == ("prompt", "chosen", "rejected")
    assert shape_of(every, scored=False) == ("prompt", "completion")
    assert shape_of(["rewards", "prompt", "completions", "text"], scored=True) == ("prompt", "completions", "rewards")
    with pytest.raises(
        ValueError, match=r"columns \['chosen', 'prompt', 'rejected'\]; .* needed: prompt, completion; "
    ):
        shape_of(["prompt", "chosen", "rejected"], scored=False)
    with pytest.raises(
        ValueError,
        match=r"columns \['prompt', 'text'\]; .* needed: prompt, chosen, rejected; .*with reward_funcs\)$",
    ):
        shape_of(["prompt", "text"], scored=True)
    pairs = Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}])
    with pytest.raises(ValueError, match="one of these sets is needed: prompt, completion"):
        encode_dataset(pairs, make_tokenizer(), None, reading=Reading(scored=False))
    with pytest.raises(
        ValueError, match=r"dataset row 1: one of prompt, completion is missing: .*of which None are \['completion'\]"
    ):
        encode_dataset(
            Dataset.from_list([{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": None}]),
            make_tokenizer(),
            None,
        )


def test_end_of_sequence_once() -> None:
    """Pitfall D-63."""
    tokenizer = make_tokenizer()
    assert Encoder(tokenizer).with_eos([A]) == Encoder(tokenizer).with_eos([A, EOS]) == [A, EOS]
    assert Encoder(tokenizer).with_eos([EOS, A]) == [EOS, A, EOS]
    assert Encoder(tokenizer).with_eos([]) == [EOS]
    tokenizer.eos_token = None
    assert Encoder(tokenizer).with_eos([A]) == [A]


def test_what_a_template_adds_after_the_end_is_not_trained() -> None:
    """ChatML ends every turn with the end token and a newline; the model is never asked for the newline."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("'<eos>'", "'<eos>\n'")
    (row,) = read_example({"prompt": chat("a"), "completion": chat("", "b")[1:]}, tokenizer).rows
    newline = VOCAB["\n"]
    assert row.prompt_ids == [USER, A, EOS, newline, ASSISTANT]
    assert row.completion_ids == [B, EOS]


def test_a_template_that_changes_the_prompt_once_it_is_answered() -> None:
    """Pitfall D-67: templates that drop or rewrite earlier turns; the row is named."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% if messages|length > 1 %}b{% endif %}" + tokenizer.chat_template
    data = Dataset.from_list([{"prompt": chat("a"), "completion": chat("", "c")[1:]}])
    with pytest.raises(
        ValueError, match="dataset row 0: the chat template renders the prompt differently when an answ"
    ):
        encode_dataset(data, tokenizer, None)
    # A thinking template that drops the reasoning of *earlier* turns keeps the prompt as it is.
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<' + m['role'] + '>' }}"
        "{{ m['content'].split('=')[-1] if not loop.last else m['content'] }}{{ '<eos>' }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    (row,) = read_example({"prompt": chat("a", "b=c") + chat("d"), "completion": chat("", "a=b")[1:]}, tokenizer).rows
    assert row.prompt_ids == [USER, A, EOS, ASSISTANT, C, EOS, USER, D, EOS, ASSISTANT]
    assert row.completion_ids == [A, VOCAB["="], B, EOS]


def test_conversations_need_a_template() -> None:
    """Pitfall F-92."""
    bare = make_tokenizer(chat=False)
    for example in ({"messages": chat("a", "b")}, {"prompt": chat("a"), "completion": chat("", "b")[1:]}):
        with pytest.raises(
            ValueError, match="dataset row 0: the dataset holds conversations, but the tokenizer has no"
        ):
            encode_dataset(Dataset.from_list([example]), bare, None)


def test_cut_completions() -> None:
    """Pitfall C-55: the cut row says so, and its recorded log-probabilities are cut with it."""
    example = {"prompt": "ab", "completions": ["abcd", "a"], "rewards": [1.0, 0.0]}
    example["old_logprobs"] = [[-1.0, -2.0, -3.0, -4.0, -5.0], [-6.0, -7.0]]
    encoded = encode_dataset(Dataset.from_list([example]), make_tokenizer(), 5, min_rows=2)
    long, short = encoded.dataset[0]["rows"]
    assert (long["completion_ids"], long["old_logprobs"], long["truncated"]) == ([A, B, C], [-1.0, -2.0, -3.0], True)
    assert (short["completion_ids"], short["old_logprobs"], short["truncated"]) == ([A, EOS], [-6.0, -7.0], False)
    assert (encoded.longest, dict(encoded.dropped)) == (5, {})


def test_every_reason_is_counted() -> None:
    """Pitfalls C-55, D-66: rows that train nothing."""
    tokenizer = make_tokenizer()
    documents = Dataset.from_list([{"input_ids": ids} for ids in ([], [A], [A, B], [A, B, C])])
    encoded = encode_dataset(documents, tokenizer, None)
    assert dict(encoded.dropped) == {"empty": 1, "empty_completion": 1}
    assert len(encoded.dataset) == 2
    packed = encode_dataset(documents, tokenizer, 2, packing="bfd_split")
    assert dict(packed.dropped) == {"empty": 1, "empty_completion": 1}
    assert len(packed.dataset) == 3  # of [A, B, C]: [A, B] and [B, C]
    tokenizer.eos_token = None
    pairs = Dataset.from_list(
        [
            {"prompt": "a", "chosen": "", "rejected": "c"},
            {"prompt": "a", "chosen": "b", "rejected": ""},
            {"prompt": "aaaa", "chosen": "b", "rejected": "c"},
            {"prompt": "a", "chosen": "b", "rejected": "c"},
        ]
    )
    encoded = encode_dataset(pairs, tokenizer, 4, min_rows=2)
    assert dict(encoded.dropped) == {"empty_completion": 2, "prompt_too_long": 1}
    assert len(encoded.dataset) == 1


def test_pairs_of_equal_completions() -> None:
    """Equal as given, or once they are cut: their gradients cancel."""
    pairs = [{"prompt": "a", "chosen": chosen, "rejected": "bbb"} for chosen in ("bbb", "bbbc", "bbc")]
    encoded = encode_dataset(Dataset.from_list(pairs), make_tokenizer(), 4, min_rows=2)
    assert (dict(encoded.dropped), len(encoded.dataset)) == ({"equal_completions": 2}, 1)
    group = {"prompt": "a", "completions": ["b", "b", "c"], "rewards": [1.0, 1.0, 0.0]}
    assert not encode_dataset(Dataset.from_list([group]), make_tokenizer(), 4, min_rows=2).dropped


def test_groups_keep_rows_that_cannot_be_scored() -> None:
    """Pitfall A-4: None stays NaN through encoding and collation; groups of a batch are told apart."""
    group = {"prompt": "a", "completions": ["b", "c", ""], "rewards": [0.5, None, 2.0]}
    encoded = encode_dataset(Dataset.from_list([group, group]), make_tokenizer(), None, min_rows=2)
    batch = collate(list(encoded.dataset), PAD)["batch"]
    assert batch.rewards.isnan().tolist() == [False, True, False] * 2
    assert batch.group.tolist() == [0, 0, 0, 1, 1, 1]
    assert batch.pad_token_id == PAD


def test_the_callers_rows_stay_as_they_are() -> None:
    example = {"prompt": chat("a"), "completion": chat("", "b")[1:]}
    given = {key: [dict(m) for m in value] for key, value in example.items()}
    read_example(example, make_tokenizer())
    assert example == given
