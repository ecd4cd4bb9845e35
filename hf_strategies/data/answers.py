"""Completions in token ids, and prompts that are given twice."""

from __future__ import annotations

from typing import Any

from hf_strategies.data.chat import as_messages, check_answer, is_conversation
from hf_strategies.data.encoding import Encoder
from hf_strategies.data.masks import answer_length


def encode_completion(
    encoder: Encoder, prompt: Any, prompt_ids: list[int], completion: Any, name: str = "completion"
) -> tuple[list[int], list[int]]:
    """Token ids of a completion, encoded on its own so that no token spans the boundary to its prompt.

    A conversational completion is what the chat template appends to the prompt; a text gets an end-of-sequence token.
    A template that opens a turn with more than it keeps of it once it is answered (an empty thought, say) leaves the
    difference out of the prompt.

    Args:
        encoder: see `Encoder`.
        prompt: text or messages.
        prompt_ids: the prompt in token ids.
        completion: text or messages.
        name: of the completion's column, for messages.

    Returns:
        Token ids of the prompt as it stands before this completion, and of the completion.

    Raises:
        ValueError: a completion that is neither text nor messages, a conversation that answers a text, or a template
            that renders the prompt's own messages differently once an answer follows.
    """
    check_answer(completion, name)
    if not (is_conversation(prompt) or is_conversation(completion)):
        return prompt_ids, encoder.with_eos(encoder.text(completion, begins=False))
    if isinstance(prompt, str):
        raise ValueError(
            f"the prompt is a text and its answer a conversation: give both as texts or both as messages ({prompt!r})"
        )
    text = encoder.rendered(prompt + as_messages(completion, "assistant"), generation_prompt=False)
    opened = encoder.rendered(prompt, generation_prompt=True)
    whole = encoder.ids(text)
    if whole[: len(prompt_ids)] == prompt_ids:
        answer = whole[len(prompt_ids) :]
    elif text.startswith(opened):
        # An answer that begins with a space makes one token with the opened turn; a model that answers cannot.
        answer = encoder.ids(text[len(opened) :])
    else:
        prompt_ids = _kept_prompt(encoder, prompt, prompt_ids, whole)
        answer = whole[len(prompt_ids) :]
    return prompt_ids, answer[: answer_length(encoder, answer)]


def _kept_prompt(encoder: Encoder, prompt: Any, prompt_ids: list[int], whole: list[int]) -> list[int]:
    same = next((i for i, (a, b) in enumerate(zip(prompt_ids, whole, strict=False)) if a != b), len(whole))
    messages = encoder.conversation(prompt, generation_prompt=False)
    # Something of the opened turn must be left, or the assistant's role would be part of the answer.
    if prompt_ids[: len(messages)] != messages or same <= len(messages):
        raise ValueError(
            "the chat template renders the prompt differently when an answer follows: prompt and completion cannot "
            f"be told apart (prompt: {prompt!r})"
        )
    return prompt_ids[:same]


def generation_prompt_length(encoder: Encoder, prompt: Any, prompt_ids: list[int]) -> int:
    """Tokens at the end of a prompt that open the answer, which is never cut off; 1 for a text."""
    if isinstance(prompt, str):
        return 1
    messages = encoder.conversation(prompt, generation_prompt=False)
    return max(1, len(prompt_ids) - len(messages)) if prompt_ids[: len(messages)] == messages else len(prompt_ids)


def split_pair(chosen: Any, rejected: Any) -> dict[str, Any]:
    """``prompt``, ``chosen`` and ``rejected`` of a pair that holds its prompt twice.

    Two conversations are divided before the first message that differs, two texts before the first character; a space
    before it belongs to the answers. Where one conversation is the beginning of the other, its last message is its
    answer; of two such texts, the shorter one says no more than its end.

    Raises:
        ValueError: they begin differently.
    """
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        check_answer(answer, name)
    same = 0
    while same < min(len(chosen), len(rejected)) and chosen[same] == rejected[same]:
        same += 1
    texts = isinstance(chosen, str)
    same -= chosen[same - 1 : same] == " " if texts else same == min(len(chosen), len(rejected))
    if same > 0 and not texts and any(answer[same]["role"] == "user" for answer in (chosen, rejected)):
        raise ValueError(
            "without a prompt column, what follows the messages that chosen and rejected begin with must be answers, "
            f"not a user's turn (chosen: {chosen!r}, rejected: {rejected!r})"
        )
    if same <= 0:
        raise ValueError(
            "without a prompt column, chosen and rejected must begin with the same prompt "
            f"(chosen: {chosen!r}, rejected: {rejected!r})"
        )
    return {"prompt": chosen[:same], "chosen": chosen[same:], "rejected": rejected[same:]}
