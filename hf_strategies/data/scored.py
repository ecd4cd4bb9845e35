"""Rows that carry rewards: pairs and scored groups."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hf_strategies.batch import Row
from hf_strategies.data.answers import encode_completion, split_pair
from hf_strategies.data.chat import is_conversation
from hf_strategies.data.encoding import Encoder

# Half precision may round the logarithm of a probability of 1 a little above 0.
LARGEST_LOGPROB = 1e-2


def read_pair(example: dict[str, Any], encoder: Encoder, *, has_prompt: bool) -> tuple[Any, list[Row]]:
    """Prompt and rows of a pair, chosen first, rewards 1 and 0.

    Args:
        example: ``chosen``, ``rejected``.
        encoder: see `Encoder`.
        has_prompt: whether the row has a prompt.

    Raises:
        ValueError: see `split_pair` and `encode_completion`.
    """
    pair = example
    if not has_prompt and "prompt" in example:
        # Without the column both answers hold the prompt; a row that lacks it is another thing.
        raise ValueError("prompt=None: allowed are a text or a list of messages, or no such column in the dataset")
    if not has_prompt or (isinstance(example["prompt"], str) and _opens(example["chosen"])):
        pair = split_pair(example["chosen"], example["rejected"])
    return pair["prompt"], _rows(
        pair["prompt"], [pair["chosen"], pair["rejected"]], ("chosen", "rejected"), (1.0, 0.0), None, encoder
    )


def read_group(example: dict[str, Any], encoder: Encoder) -> list[Row]:
    """Rows of a scored group: ``prompt``, ``completions``, ``rewards``, and ``old_logprobs`` where it is there.

    Raises:
        ValueError: lists that do not fit together, or rewards and log-probabilities that are none.
    """
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
    names = [f"completions[{i}]" for i in range(len(completions))]
    scores = [float("nan") if reward is None else float(reward) for reward in rewards]
    return _rows(example["prompt"], completions, names, scores, example.get("old_logprobs"), encoder)


def _rows(
    prompt: Any, answers: Sequence[Any], names: Sequence[str], rewards: Sequence[float], old: Any, encoder: Encoder
) -> list[Row]:
    prompt_ids = encoder.prompt(prompt)
    encoded = [
        encode_completion(encoder, prompt, prompt_ids, answer, name)
        for answer, name in zip(answers, names, strict=True)
    ]
    # Where a template takes something of the opened turn back, one prompt stands before all answers: the shortest.
    shared = min((kept for kept, _ in encoded), key=len, default=prompt_ids)
    ids = [[*kept[len(shared) :], *tokens] for kept, tokens in encoded]
    if old is not None:
        _check_old_logprobs(old, ids)
    return [
        Row(shared, tokens, reward=rewards[i], old_logprobs=None if old is None else old[i])
        for i, tokens in enumerate(ids)
    ]


def _opens(answer: Any) -> bool:
    """Whether an answer is a whole conversation, beginning with the prompt."""
    return is_conversation(answer) and answer[0]["role"] != "assistant"


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
