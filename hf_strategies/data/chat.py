"""Messages and prompts of dataset rows: checked, and brought to one form."""

from __future__ import annotations

import json
from typing import Any

Messages = list[dict[str, Any]]

# Speakers of conversations in the ShareGPT form.
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "bot": "assistant",
    "chatbot": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}


# Columns of a row that may hold conversations.
CONVERSATIONS = ("prompt", "completion", "completions", "chosen", "rejected", "messages", "conversations")
# What a chat template is called with; not for anyone else to set.
RESERVED = (
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "messages",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "tokenize",
)


def check_template_kwargs(given: Any, name: str = "chat_template_kwargs") -> None:
    """Raise where arguments of a chat template are those of the call itself.

    Raises:
        ValueError: such an argument.
    """
    for key in sorted(given.keys() & set(RESERVED)):
        raise ValueError(f"{name}[{key!r}]: not for the template, rows are rendered with a value of their own")


def is_conversation(value: Any) -> bool:
    """Whether a column value is a list of chat messages."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and "role" in value[0]


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
        if not (isinstance(content, str) or (content is None and message.get("tool_calls"))):
            raise ValueError(f"{where}['content']={content!r}: allowed is a text, or a list of parts of type text")


def check_text(value: Any, name: str) -> str:
    """The text of a column.

    Raises:
        ValueError: something else; a tokenizer would take a list for several texts.
    """
    if not isinstance(value, str):
        raise ValueError(f"{name}={value!r}: allowed is a text")
    return value


def check_answer(answer: Any, name: str) -> None:
    """Raise unless a column holds a text or messages."""
    if is_conversation(answer):
        check_messages(answer, name)
    else:
        check_text(answer, name)


def as_messages(value: Any, role: str) -> Messages:
    """A conversation as it is, a text as a single message."""
    return value if is_conversation(value) else [{"role": role, "content": value}]


def normalised(example: dict[str, Any]) -> dict[str, Any]:
    """A row with every conversation in one form, as chat templates of texts read it.

    Lists of ``from`` and ``value`` become messages, and a column ``conversations`` counts as ``messages``. A content
    in parts becomes their text. Keys without a value are left out: columns of a table have the same keys in every row.
    The caller's row stays as it is.

    Raises:
        ValueError: a speaker that is not known (the message lists those that are).
    """
    converted = {name: _converted(value, name) if name in CONVERSATIONS else value for name, value in example.items()}
    if "conversations" in converted and converted.get("messages") is None:
        converted["messages"] = converted.pop("conversations")
    return converted


def _converted(value: Any, name: str) -> Any:
    if not isinstance(value, list) or not value:
        return value
    if isinstance(value[0], list):
        return [_converted(each, f"{name}[{i}]") for i, each in enumerate(value)]
    if not isinstance(value[0], dict):
        return value
    if "role" in value[0] or not {"from", "value"} <= set(value[0]):
        return [_with_text(_without_none(message)) for message in value]
    for i, turn in enumerate(value):
        if not isinstance(turn, dict) or turn.get("from") not in ROLES:
            given = f"['from']={turn.get('from')!r}" if isinstance(turn, dict) else f"={turn!r}"
            raise ValueError(f"{name}[{i}]{given}: allowed are {', '.join(ROLES)}")
    return [{"role": ROLES[turn["from"]], "content": turn.get("value")} for turn in value]


def _with_text(message: Any) -> Any:
    """A message whose content, where it is given in parts of text, is their text."""
    parts = message.get("content") if isinstance(message, dict) else None
    if not isinstance(parts, list) or not parts:
        return message
    texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    return {**message, "content": "".join(texts)} if len(texts) == len(parts) else message


def template_arguments(example: dict[str, Any]) -> dict[str, Any]:
    """What a row's columns ``tools`` and ``chat_template_kwargs`` hand to the chat template; either may be JSON.

    Raises:
        ValueError: tools that are no list, or arguments that are no dict.
    """
    arguments: dict[str, Any] = {}
    for name, kind, allowed in (("chat_template_kwargs", dict, "a dict"), ("tools", list, "a list of tools")):
        given = example.get(name)
        value = given
        if isinstance(given, str):
            try:
                value = json.loads(given)
            except json.JSONDecodeError as error:
                raise ValueError(f"{name}={given!r} is no JSON: {error}") from None
        if not value:
            continue
        if not isinstance(value, kind):
            raise ValueError(f"{name}={given!r}: allowed is {allowed}")
        # Columns of a table have the same keys in every row, None where a row did not have them.
        clean = _without_none(value)
        if name == "chat_template_kwargs":
            check_template_kwargs(clean)
        arguments |= clean if name == "chat_template_kwargs" else {"tools": clean}
    return arguments


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


def prompt_of(example: dict[str, Any]) -> str | Messages:
    """The prompt of a dataset row, without any gold answer.

    ``prompt`` (text or messages), ``messages`` without a closing assistant turn, or ``instruction`` with ``input``.

    Raises:
        KeyError: none of these columns; the message lists those there are.
        ValueError: a column that holds neither a text nor messages.
    """
    example = normalised(example)
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
