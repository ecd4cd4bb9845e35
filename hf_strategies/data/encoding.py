"""From texts and conversations to token ids."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hf_strategies.data.chat import Messages, check_messages, is_conversation

NAME = re.compile(r"[\w .-]+")
# Characters for private use: they stand for added tokens that are to be read as plain text.
FIRST_PLACEHOLDER, LAST_PLACEHOLDER = 0xF0000, 0xFFFFD


def require_chat_template(tokenizer: Any) -> None:
    """Raise unless the tokenizer can render conversations.

    Raises:
        ValueError: no chat template.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError(
            "the dataset holds conversations, but the tokenizer has no chat_template: set tokenizer.chat_template or "
            "chat_template_path, use an instruction-tuned model, or give plain text"
        )


@dataclass(frozen=True)
class Encoder:
    """A tokenizer with what its chat template is given.

    Attributes:
        tokenizer: the model's tokenizer.
        template_kwargs: arguments of the chat template, ``tools`` among them.
        plain_text: special tokens spelled out in texts and in the contents of messages are text like any other, so
            that a row cannot forge a turn or an end.
    """

    tokenizer: Any
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    plain_text: bool = False

    def text(self, text: str, *, begins: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            text: the text.
            begins: it is the beginning of a row: exactly one beginning-of-sequence token stands before it if the
                tokenizer puts one there.
        """
        ids = self.ids(self._protected(text))
        if not begins:
            return ids
        bos = self.tokenizer.bos_token_id
        adds = bos is not None and list(self.tokenizer("")["input_ids"][:1]) == [bos]
        return [bos, *ids] if adds and ids[:1] != [bos] else ids

    def with_eos(self, token_ids: list[int]) -> list[int]:
        """Token ids that end with exactly one end-of-sequence token, if the tokenizer has one."""
        eos = self.tokenizer.eos_token_id
        if eos is None:
            return token_ids
        end = len(token_ids)
        while end and token_ids[end - 1] == eos:
            end -= 1
        return [*token_ids[:end], eos]

    def conversation(self, messages: Messages, *, generation_prompt: bool) -> list[int]:
        """Token ids of messages under the chat template; with ``generation_prompt`` the assistant's turn is opened.

        Raises:
            ValueError: no chat template.
        """
        return self.ids(self.rendered(messages, generation_prompt=generation_prompt))

    def rendered(self, messages: Messages, *, generation_prompt: bool) -> str:
        """Text of messages under the chat template, as `ids` reads it.

        Raises:
            ValueError: no chat template.
        """
        require_chat_template(self.tokenizer)
        for role in (message["role"] for message in messages if self.plain_text):
            if not NAME.fullmatch(role):
                raise ValueError(f"plain_text=True: role {role!r}: allowed are letters, digits and {' _.-'!r}")
        return self.tokenizer.apply_chat_template(
            self.protected(messages),
            # Rendered and then encoded, so that the return type does not depend on the transformers version.
            tokenize=False,
            add_generation_prompt=generation_prompt,
            **self.template_kwargs,
        )

    def prompt(self, prompt: str | Messages) -> list[int]:
        """Token ids a completion is conditioned on; a conversation ends with the opening of the assistant's turn.

        Raises:
            ValueError: an empty prompt, a conversation without a chat template, or one that is answered already.
        """
        if is_conversation(prompt):
            check_messages(prompt, "prompt")
            if prompt[-1]["role"] == "assistant":  # type: ignore[index]
                raise ValueError(
                    "the prompt ends with an assistant turn: leave it out, or give it in another column if it is an "
                    "answer"
                )
            ids = self.conversation(prompt, generation_prompt=True)  # type: ignore[arg-type]
        elif isinstance(prompt, str):
            ids = self.text(prompt)
        else:
            raise ValueError(f"prompt: got {type(prompt).__name__}, allowed are a text or a list of messages")
        if not ids:
            raise ValueError(f"prompt {prompt!r} has no tokens")
        return ids

    def forges(self, messages: Messages) -> bool:
        """Whether contents spell out special tokens that are to be read as text."""
        return self.protected(messages) != messages

    def protected(self, value: Any) -> Any:
        """Messages, tools or arguments in whose texts special tokens stand as placeholders, if they are to be text."""
        if not self.plain_text:
            return value
        if isinstance(value, str):
            return self._protected(value)
        if isinstance(value, Mapping):
            return {self.protected(key): self.protected(item) for key, item in value.items()}
        return [self.protected(item) for item in value] if isinstance(value, list) else value

    @cached_property
    def _added_tokens(self) -> list[str]:
        added = set(self.tokenizer.get_added_vocab()) | set(self.tokenizer.all_special_tokens)
        return sorted(added, key=lambda token: (-len(token), token))[: LAST_PLACEHOLDER - FIRST_PLACEHOLDER]

    @cached_property
    def _spelled_out(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self._added_tokens)) or "(?!)")

    def _protected(self, text: str) -> str:
        if not self.plain_text:
            return text
        if any(FIRST_PLACEHOLDER <= ord(character) <= LAST_PLACEHOLDER for character in text):
            raise ValueError(
                f"plain_text=True: {text!r} holds characters for private use (U+F0000 and further), which stand for "
                "special tokens here"
            )
        place = {token: chr(FIRST_PLACEHOLDER + i) for i, token in enumerate(self._added_tokens)}
        return self._spelled_out.sub(lambda match: place[match[0]], text)

    def ids(self, text: str) -> list[int]:
        """Token ids of a rendered text, nothing added."""
        if not self.plain_text:
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        parts = re.split(f"([{chr(FIRST_PLACEHOLDER)}-{chr(LAST_PLACEHOLDER)}])", text)
        ids: list[int] = []
        for i, part in enumerate(parts):
            if i % 2:
                ids += self._as_text(self._added_tokens[ord(part) - FIRST_PLACEHOLDER])
            elif part:
                ids += self.tokenizer(part, add_special_tokens=False)["input_ids"]
        return ids

    def _as_text(self, token: str) -> list[int]:
        # Without its first character it is no longer the token, whatever the tokenizer makes of added tokens.
        return [i for part in (token[:1], token[1:]) if part for i in self._split(part)]

    def _split(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])
