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


def check_messages(messages: Any, name: str) -> None:
    """Raise unless a conversation can be rendered: templates write a missing content as ``None``, or fail deep inside.

    Args:
        messages: what stands in the column.
        name: of the column, for the message.

    Raises:
        ValueError: no list of messages, or one without a role or a content.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{name}={messages!r}: allowed is a list of messages that is not empty")
    for i, message in enumerate(messages):
        where = f"{name}[{i}]"
        if not isinstance(message, dict):
            raise ValueError(f"{where}={message!r}: allowed is a message, a dict with role and content")
        if not isinstance(message.get("role"), str):
            raise ValueError(f"{where}['role']={message.get('role')!r}: allowed is a text")
        content = message.get("content")
        parts = isinstance(content, list) and all(isinstance(part, dict) for part in content)
        if not (isinstance(content, str) or parts or (content is None and message.get("tool_calls"))):
            raise ValueError(f"{where}['content']={content!r}: allowed is a text")


def check_text(value: Any, name: str) -> str:
    """The text of a column.

    Raises:
        ValueError: something else; a tokenizer would take a list for several texts.
    """
    if not isinstance(value, str):
        raise ValueError(f"{name}={value!r}: allowed is a text")
    return value


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
        ValueError: a column that holds neither a text nor messages.
    """
    if example.get("prompt") is not None:
        return example["prompt"]
    if example.get("messages") is not None:
        messages = example["messages"]
        check_messages(messages, "messages")
        prompt = messages[:-1] if messages[-1]["role"] == "assistant" else messages
        if not prompt:
            raise ValueError(f"messages={messages!r}: nothing is left of it as a prompt without its last turn")
        return prompt
    if example.get("instruction") is not None:
        instruction, extra = check_text(example["instruction"], "instruction"), example.get("input")
        return f"{instruction}\n\n{check_text(extra, 'input')}" if extra else instruction
    raise KeyError(f"a row needs a 'prompt', 'messages' or 'instruction' column; it has {described(example)}")


def described(example: dict[str, Any]) -> str:
    """Columns of a dataset row, and which of them are empty."""
    empty = sorted(name for name, value in example.items() if value is None)
    return f"{sorted(example)}" + (f", of which None are {empty}" if empty else "")


def encode_prompt(tokenizer: Any, prompt: str | Messages, **template_kwargs: Any) -> list[int]:
    """Token ids a completion is conditioned on; a conversation ends with the opening of the assistant's turn.

    Raises:
        ValueError: an empty prompt, a conversation without a chat template, or one that is answered already.
    """
    if is_conversation(prompt):
        check_messages(prompt, "prompt")
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
