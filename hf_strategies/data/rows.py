"""Dataset rows in TRL's shapes -> training rows in token ids.

The columns decide; a strategy that learns from rewards reads the first three shapes, any other one the rest:

    prompt, chosen, rejected        a pair: two rows of one prompt, chosen first, rewards 1 and 0
    prompt, completions, rewards    a scored group (optionally old_logprobs, one list per completion)
    chosen, rejected                a pair whose prompt is what both begin with; also where a text column ``prompt``
                                    repeats the first turn of two conversations

    prompt, completion              the completion trains
    messages                        a conversation; all of it trains
    text                            a document; all of it trains
    input_ids                       a document in token ids
"""

from __future__ import annotations

import math
from typing import Any

from hf_strategies.batch import Row
from hf_strategies.data.chat import (
    as_messages,
    check_messages,
    check_text,
    described,
    encode_prompt,
    encode_text,
    is_conversation,
    render,
)

SCORED_SHAPES: tuple[tuple[str, ...], ...] = (
    ("prompt", "chosen", "rejected"),
    ("prompt", "completions", "rewards"),
    ("chosen", "rejected"),
)
PLAIN_SHAPES: tuple[tuple[str, ...], ...] = (
    ("prompt", "completion"),
    ("messages",),
    ("text",),
    ("input_ids",),
)


# Half precision may round the logarithm of a probability of 1 a little above 0.
LARGEST_LOGPROB = 1e-2


def shape_of(columns: list[str], scored: bool | None = None) -> tuple[str, ...]:
    """The first known shape whose columns are all there.

    Args:
        columns: columns that hold something.
        scored: whether the rows must carry rewards (else they must not); None takes either.

    Raises:
        ValueError: none is; the message lists columns and shapes.
    """
    known = {None: SCORED_SHAPES + PLAIN_SHAPES, True: SCORED_SHAPES, False: PLAIN_SHAPES}[scored]
    for shape in known:
        if set(shape) <= set(columns):
            return shape
    shapes = "; ".join(", ".join(shape) for shape in known)
    prompts = scored and "prompt" in columns and not {"chosen", "completions"} & set(columns)
    hint = " (prompts alone are for an online strategy, with reward_funcs)" if prompts else ""
    raise ValueError(f"the dataset has columns {sorted(columns)}; one of these sets is needed: {shapes}{hint}")


def read_rows(example: dict[str, Any], tokenizer: Any, scored: bool | None = None) -> list[Row]:
    """Token rows of one dataset row.

    Args:
        example: the dataset row.
        tokenizer: the model's tokenizer.
        scored: see `shape_of`.

    Raises:
        ValueError: the row's columns do not fit together (lengths of a scored group, a prompt that is no prefix, ...).
    """
    present = [name for name, value in example.items() if value is not None]
    try:
        shape = shape_of(present, scored)
    except ValueError:
        if len(present) < len(example):
            shape = shape_of(list(example), scored)  # what the dataset has, if the row had it too
            raise ValueError(
                f"one of {', '.join(shape)} is missing: the row has columns {described(example)}; all of them are "
                "needed"
            ) from None
        raise
    if "chosen" in shape:
        pair = example
        if "prompt" not in shape and "prompt" in example:
            # Without the column both answers hold the prompt; a row that lacks it is another thing.
            raise ValueError("prompt=None: allowed are a text or a list of messages, or no such column in the dataset")
        if "prompt" not in shape or (isinstance(example["prompt"], str) and _opens(example["chosen"])):
            pair = split_pair(example["chosen"], example["rejected"])
        prompt_ids = encode_prompt(tokenizer, pair["prompt"])
        return [
            Row(prompt_ids, encode_completion(tokenizer, pair["prompt"], prompt_ids, pair[side], side), reward=reward)
            for side, reward in (("chosen", 1.0), ("rejected", 0.0))
        ]
    if "completions" in shape:
        return _read_group(example, tokenizer)
    if "completion" in shape:
        prompt_ids = encode_prompt(tokenizer, example["prompt"])
        return [
            Row(
                prompt_ids,
                encode_completion(tokenizer, example["prompt"], prompt_ids, example["completion"]),
            )
        ]
    if "messages" in shape:
        check_messages(example["messages"], "messages")
        ids = render(tokenizer, example["messages"], generation_prompt=False)
    elif "text" in shape:
        ids = with_eos(tokenizer, encode_text(tokenizer, check_text(example["text"], "text")))
    else:
        ids = _check_ids(example["input_ids"])
    return [document_row(ids)] if ids else []


def split_pair(chosen: Any, rejected: Any) -> dict[str, Any]:
    """``prompt``, ``chosen`` and ``rejected`` of a pair that holds its prompt twice.

    Two conversations are divided before the first message that differs, two texts before the first character; a space
    before it belongs to the answers.

    Raises:
        ValueError: they begin differently, or one of them is no answer to what both begin with.
    """
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        _check_answer(answer, name)
    same = 0
    while same < min(len(chosen), len(rejected)) and chosen[same] == rejected[same]:
        same += 1
    if isinstance(chosen, str) and chosen[same - 1 : same] == " ":
        same -= 1
    if same == 0 or same == min(len(chosen), len(rejected)):
        raise ValueError(
            "without a prompt column, chosen and rejected must begin with the same prompt and go on differently "
            f"(chosen: {chosen!r}, rejected: {rejected!r})"
        )
    return {"prompt": chosen[:same], "chosen": chosen[same:], "rejected": rejected[same:]}


def _opens(answer: Any) -> bool:
    """Whether an answer is a whole conversation, beginning with the prompt."""
    return is_conversation(answer) and answer[0]["role"] != "assistant"


def _check_answer(answer: Any, name: str) -> None:
    if is_conversation(answer):
        check_messages(answer, name)
    else:
        check_text(answer, name)


def _check_ids(ids: Any) -> list[int]:
    if not isinstance(ids, list):
        raise ValueError(f"input_ids={ids!r}: allowed is a list of token ids")
    if set(map(type, ids)) - {int} or min(ids, default=0) < 0:
        i = next(i for i, token in enumerate(ids) if type(token) is not int or token < 0)
        raise ValueError(f"input_ids[{i}]={ids[i]!r}: allowed is a whole number >= 0")
    return ids


def document_row(token_ids: list[int]) -> Row:
    """A document as a row: its first token has nothing to be predicted from, every other one trains."""
    return Row(token_ids[:1], token_ids[1:])


def with_eos(tokenizer: Any, token_ids: list[int]) -> list[int]:
    """Token ids that end with exactly one end-of-sequence token, if the tokenizer has one."""
    eos = tokenizer.eos_token_id
    return token_ids if eos is None or (token_ids and token_ids[-1] == eos) else [*token_ids, eos]


def encode_completion(
    tokenizer: Any, prompt: Any, prompt_ids: list[int], completion: Any, name: str = "completion"
) -> list[int]:
    """Token ids of a completion, encoded on its own so that no token spans the boundary to its prompt.

    A conversational completion is what the chat template appends to the prompt; a text gets an end-of-sequence token.

    Args:
        tokenizer: the model's tokenizer.
        prompt: text or messages.
        prompt_ids: the prompt in token ids.
        completion: text or messages.
        name: of the completion's column, for messages.

    Raises:
        ValueError: a completion that is neither text nor messages, a conversation that answers a text, or a template
            that renders the prompt differently once an answer follows.
    """
    _check_answer(completion, name)
    if not (is_conversation(prompt) or is_conversation(completion)):
        return with_eos(tokenizer, encode_text(tokenizer, completion, special_tokens=False))
    if isinstance(prompt, str):
        raise ValueError(
            f"the prompt is a text and its answer a conversation: give both as texts or both as messages ({prompt!r})"
        )
    conversation = prompt + as_messages(completion, "assistant")
    whole = render(tokenizer, conversation, generation_prompt=False)
    if whole[: len(prompt_ids)] != prompt_ids:
        raise ValueError(
            "the chat template renders the prompt differently when an answer follows: prompt and completion cannot "
            f"be told apart (prompt: {prompt!r})"
        )
    answer = whole[len(prompt_ids) :]
    eos = tokenizer.eos_token_id
    # Templates put a newline after the closing token; the model is never asked for it.
    if eos in answer:
        answer = answer[: len(answer) - answer[::-1].index(eos)]
    return answer


def _read_group(example: dict[str, Any], tokenizer: Any) -> list[Row]:
    completions, rewards = example["completions"], example["rewards"]
    for name in ("completions", "rewards"):
        if not isinstance(example[name], list):
            raise ValueError(f"{name}={example[name]!r}: allowed is a list, one entry per completion")
    if len(rewards) != len(completions):
        raise ValueError(f"rewards has {len(rewards)} entries for {len(completions)} completions")
    for i, reward in enumerate(rewards):
        if reward is not None and not isinstance(reward, int | float):
            raise ValueError(f"rewards[{i}]={reward!r}: allowed is a number or None")
        if reward is not None and math.isinf(reward):
            raise ValueError(f"rewards[{i}]={reward!r}: rewards must be finite or None")
    prompt_ids = encode_prompt(tokenizer, example["prompt"])
    ids = [
        encode_completion(tokenizer, example["prompt"], prompt_ids, completion, f"completions[{i}]")
        for i, completion in enumerate(completions)
    ]
    old = example.get("old_logprobs")
    if old is not None:
        _check_old_logprobs(old, ids)
    return [
        Row(
            prompt_ids,
            tokens,
            reward=float("nan") if reward is None else float(reward),
            old_logprobs=None if old is None else old[i],
        )
        for i, (tokens, reward) in enumerate(zip(ids, rewards, strict=True))
    ]


def _check_old_logprobs(old: Any, ids: list[list[int]]) -> None:
    if not isinstance(old, list) or len(old) != len(ids):
        raise ValueError(f"old_logprobs={old!r}: allowed is a list of {len(ids)} lists, one per completion")
    for i, values in enumerate(old):
        if not isinstance(values, list):
            raise ValueError(f"old_logprobs[{i}]={values!r}: allowed is a list, one number per token")
    got, expected = [len(values) for values in old], [len(tokens) for tokens in ids]
    if got != expected:
        raise ValueError(
            f"old_logprobs shape must match completions: got {got}, expected {expected} (a text is followed by an "
            "end-of-sequence token)"
        )
    for i, values in enumerate(old):
        for j, value in enumerate(values):
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"old_logprobs must be finite: old_logprobs[{i}][{j}]={value!r}")
            if value > LARGEST_LOGPROB:
                raise ValueError(
                    f"old_logprobs[{i}][{j}]={value!r}: allowed is a number <= 0, the logarithm of a probability"
                )
