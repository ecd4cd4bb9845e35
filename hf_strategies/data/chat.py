"""From texts and conversations to token ids."""

from __future__ import annotations

from typing import Any

Messages = list[dict[str, Any]]


def is_conversation(value: Any) -> bool:
    """Whether a column value is a list of chat messages."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and "role" in value[0]


def require_chat_template(tokenizer: Any) -> None:
    """Raise unless the tokenizer can render conversations.

    Raises:
        ValueError: no chat template.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError(
            "the dataset holds conversations, but the tokenizer has no chat_template: set tokenizer.chat_template, "
            "use an instruction-tuned model, or give plain text"
        )


def encode_text(tokenizer: Any, text: str, *, special_tokens: bool = True) -> list[int]:
    """Token ids of a text; with ``special_tokens`` the tokenizer adds its beginning-of-sequence token."""
    return list(tokenizer(text, add_special_tokens=special_tokens)["input_ids"])


def render(
    tokenizer: Any,
    messages: Messages,
    *,
    generation_prompt: bool,
    **template_kwargs: Any,
) -> list[int]:
    """Token ids of a conversation under the tokenizer's chat template."""
    require_chat_template(tokenizer)
    # Rendered and then encoded, so that the return type does not depend on the transformers version.
    text = tokenizer.apply_chat_template(
        messages,
        tokenize=False,
        add_generation_prompt=generation_prompt,
        **template_kwargs,
    )
    return encode_text(tokenizer, text, special_tokens=False)


def as_messages(value: Any, role: str) -> Messages:
    """A conversation as it is, a text as a single message."""
    return value if is_conversation(value) else [{"role": role, "content": value}]


def prompt_of(example: dict[str, Any]) -> str | Messages:
    """The prompt of a dataset row, without any gold answer.

    ``prompt`` (text or messages), ``messages`` without a closing assistant turn, or ``instruction`` with ``input``.

    Raises:
        KeyError: none of these columns; the message lists those there are.
    """
    if example.get("prompt") is not None:
        return example["prompt"]
    if example.get("messages") is not None:
        messages = example["messages"]
        return messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages
    if example.get("instruction") is not None:
        extra = example.get("input")
        return f"{example['instruction']}\n\n{extra}" if extra else example["instruction"]
    raise KeyError(f"a row needs a 'prompt', 'messages' or 'instruction' column; it has {sorted(example)}")


def encode_prompt(tokenizer: Any, prompt: str | Messages, **template_kwargs: Any) -> list[int]:
    """Token ids a completion is conditioned on; a conversation ends with the opening of the assistant's turn.

    Raises:
        ValueError: an empty prompt, a conversation without a chat template, or one that is answered already.
    """
    if is_conversation(prompt):
        if prompt[-1]["role"] == "assistant":  # type: ignore[index]
            raise ValueError(
                "the prompt ends with an assistant turn: leave it out, or give it in another column if it is an answer"
            )
        ids = render(tokenizer, prompt, generation_prompt=True, **template_kwargs)  # type: ignore[arg-type]
    elif isinstance(prompt, str):
        ids = encode_text(tokenizer, prompt)
    else:
        raise ValueError(f"prompt: got {type(prompt).__name__}, allowed are a text or a list of messages")
    if not ids:
        raise ValueError(f"prompt {prompt!r} has no tokens")
    return ids


def completion_messages(text: str) -> Messages:
    """A sampled text as the assistant's turn."""
    return [{"role": "assistant", "content": text}]
