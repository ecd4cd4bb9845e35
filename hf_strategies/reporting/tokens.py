"""Token ids as text for people: every token visible, and which of them train."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len, chop_cells
from rich.text import Text

BOUNDARY = "¦"
CONTINUED = "◦"
LEGEND = (
    f"Lines marked 'train' hold trained tokens. {BOUNDARY} ends a token, ⏎ is a line break, ⇥ a tab, {CONTINUED} a "
    "token that goes on with the character before it."
)
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# A character has four bytes at most, so that many tokens may share one.
MOST_TOKENS_OF_A_CHARACTER = 4
GUTTERS = {True: "  train ", False: "        "}


@dataclass(frozen=True)
class Token:
    """One token to show.

    Attributes:
        text: what it stands for.
        trained: whether the loss counts it.
        special: whether it is one of the tokenizer's special tokens.
    """

    text: str
    trained: bool
    special: bool


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Text of every token where it stands, so that the texts joined are the text of all.

    A character that several tokens share is the text of the first of them; the others are `CONTINUED`. Bytes that make
    no character are the `REPLACEMENT` for one.

    Args:
        tokenizer: the model's tokenizer.
        ids: token ids.
    """

    def decode(part: Sequence[int]) -> str:
        return str(tokenizer.decode(list(part), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def text_of(start: int, count: int) -> str:
        # The token before goes along: some tokenizers drop the space that a text begins with.
        context, part = ids[max(start - 1, 0) : start], ids[start : start + count]
        before, whole = decode(context), decode([*context, *part])
        return whole[len(before) :] if whole.startswith(before) else decode(part)

    texts: list[str] = []
    while (start := len(texts)) < len(ids):
        text, count = text_of(start, 1), 1
        if text.endswith(REPLACEMENT) or not text:
            for longer in range(2, min(MOST_TOKENS_OF_A_CHARACTER, len(ids) - start) + 1):
                character = text_of(start, longer)
                if character and REPLACEMENT not in character:
                    text, count = character, longer
                    break
        texts.append(text or REPLACEMENT)
        texts.extend([CONTINUED] * (count - 1))
    return texts


def tokens_of(tokenizer: Any, ids: Sequence[int], mask: Sequence[bool]) -> list[Token]:
    """Tokens to show.

    Args:
        tokenizer: the model's tokenizer.
        ids: token ids.
        mask: per token, True where it trains.
    """
    special = set(tokenizer.all_special_ids)
    texts = token_texts(tokenizer, ids)
    return [Token(text, trained, number in special) for text, trained, number in zip(texts, mask, ids, strict=True)]


def token_lines(tokens: Sequence[Token], width: int, limit: int | None = None) -> Iterator[Text]:
    """Lines of at most ``width`` cells; a line holds only trained tokens or none, and says so at its beginning.

    Args:
        tokens: what to show.
        width: of the terminal.
        limit: most tokens shown; the middle of more is left out.
    """
    if limit is not None and len(tokens) > limit:
        head, tail = tokens[: limit - limit // 2], tokens[len(tokens) - limit // 2 :]
        yield from token_lines(head, width)
        yield Text(f"{GUTTERS[False]}... {len(tokens) - limit} tokens not shown ...", "italic")
        yield from token_lines(tail, width)
        return
    room = max(width - len(GUTTERS[True]), 20)
    line, trained, ends = Text(), False, True
    for token in tokens:
        shown = _visible(token.text) + BOUNDARY
        if line and (ends or token.trained != trained or line.cell_len + cell_len(shown) > room):
            yield _line(line, trained)
            line = Text()
        trained = token.trained
        *full, rest = chop_cells(shown[:-1], room - 1) or [""]
        for part in full:
            yield _line(line + Text(part, _style(token)), trained)
            line = Text()
        line = line + Text(rest, _style(token)) + Text(BOUNDARY, "dim")
        ends = token.text.endswith("\n")
    if line:
        yield _line(line, trained)


def histogram(values: Sequence[int], bins: int = 8, width: int = 40) -> list[str]:
    """Lines of a histogram of whole numbers: from, to, how many, and a bar of at most ``width`` cells."""
    low, high = min(values), max(values)
    size = max(-(-(high - low + 1) // bins), 1)
    counts = [0] * -(-(high - low + 1) // size)
    for value in values:
        counts[(value - low) // size] += 1
    digits, most = len(f"{high:,}"), max(counts)
    lines = []
    for i, count in enumerate(counts):
        first, last = low + i * size, min(low + (i + 1) * size - 1, high)
        bar = "█" * max(round(width * count / most), 1 if count else 0)
        lines.append(f"{first:>{digits},} to {last:>{digits},} {count:>{len(f'{most:,}')},} {bar}".rstrip())
    return lines


def _line(line: Text, trained: bool) -> Text:
    return Text(GUTTERS[trained], "bold green" if trained else "dim") + line


def _style(token: Token) -> str:
    return ("bold " if token.trained else "") + (
        "magenta" if token.special else "green" if token.trained else "default"
    )


def _visible(text: str) -> str:
    """Line breaks, tabs and control characters as something that can be seen and does nothing to a terminal."""
    text = text.replace("\n", "⏎").replace("\t", "⇥")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
