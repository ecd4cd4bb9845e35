"""Which tokens of a conversation the assistant wrote."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

from hf_strategies.data.chat import Messages
from hf_strategies.data.encoding import Encoder, require_chat_template

MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
ADVICE = "use a chat template with {% generation %} markers (chat_template_path), or rows of prompt and completion"


def assistant_tokens(encoder: Encoder, messages: Messages) -> tuple[list[int], list[bool]]:
    """Token ids of a conversation, and of each whether it belongs to an answer.

    By the template's generation markers where it has them. Without markers every answer is found by rendering the
    conversation up to it and including it: what an answer adds to the opened turn is its own, its end-of-sequence
    token included. Both renderings must be beginnings of the whole one.

    Raises:
        ValueError: a template without markers that renders an earlier turn differently once others follow.
    """
    require_chat_template(encoder.tokenizer)
    if MARKERS.search(_template_of(encoder)) and not encoder.forges(messages):
        encoded = encoder.tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **encoder.template_kwargs
        )
        return list(encoded["input_ids"]), [bool(flag) for flag in encoded["assistant_masks"]]
    whole = encoder.rendered(messages, generation_prompt=False)
    bounds = [0]  # where what is not an answer ends, where an answer does, and so on
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        opened = _rendered(encoder, messages[:i], generation_prompt=True)
        answered = _rendered(encoder, messages[: i + 1], generation_prompt=False)
        if opened is None or answered is None or not whole.startswith(opened) or not whole.startswith(answered):
            raise ValueError(
                f"assistant_only_loss=True: the chat template renders messages[{i}] or what precedes it differently "
                f"once other turns follow, so its answer cannot be told apart: {ADVICE}"
            )
        bounds += [len(opened), len(answered)]
    ids, mask = [], []
    for i, piece in enumerate(_pieces(encoder, whole, [*bounds, len(whole)])):
        trained = answer_length(encoder, piece) if i % 2 else 0
        ids += piece
        mask += [True] * trained + [False] * (len(piece) - trained)
    return ids, mask


def _pieces(encoder: Encoder, text: str, bounds: list[int]) -> list[list[int]]:
    """Token ids of the parts of a text, which no token spans: those of the whole text where none does."""
    parts = list(pairwise(bounds))
    whole, heads = encoder.ids(text), [encoder.ids(text[:end]) for _, end in parts]
    if all(whole[: len(head)] == head for head in heads):
        return [whole[low:high] for low, high in pairwise([0, *map(len, heads)])]
    return [encoder.ids(text[low:high]) for low, high in parts]


def answer_length(encoder: Encoder, answer: list[int]) -> int:
    """Tokens of a rendered answer up to its last end-of-sequence token.

    Templates put a newline after the closing token; the model is never asked for it.
    """
    eos = encoder.tokenizer.eos_token_id
    return len(answer) - answer[::-1].index(eos) if eos in answer else len(answer)


def _rendered(encoder: Encoder, messages: Messages, *, generation_prompt: bool) -> str | None:
    """None where the template refuses a part of a conversation, as one that begins with an answer."""
    if not messages:
        return None
    try:
        return encoder.rendered(messages, generation_prompt=generation_prompt)
    except Exception:  # a template raises what it likes
        return None


def _template_of(encoder: Encoder) -> str:
    tokenizer: Any = encoder.tokenizer
    return tokenizer.get_chat_template(None, tools=encoder.template_kwargs.get("tools"))
