"""Tokens as people see them: nothing hidden, nothing joined, trained ones told apart with and without colours."""

from __future__ import annotations

import pytest
from conftest import make_tokenizer
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_strategies.reporting.tokens import Token, histogram, token_lines, token_texts, tokens_of


def bytes_tokenizer() -> PreTrainedTokenizerFast:
    """A token per byte, as byte-level BPE has them for what it has not seen."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate([*alphabet, "<eos>"])}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")


def spaced_tokenizer() -> PreTrainedTokenizerFast:
    """Words with a mark in front, whose decoder drops the space at the beginning of a text, as SentencePiece does."""
    core = Tokenizer(models.WordLevel({"▁a": 0, "▁b": 1, "<unk>": 2}, unk_token="<unk>"))
    core.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<unk>")


def plain(tokens: list[Token], width: int = 80, limit: int | None = None) -> list[str]:
    return [line.plain for line in token_lines(tokens, width, limit)]


def test_a_character_of_several_tokens() -> None:
    tokenizer = bytes_tokenizer()
    ids = tokenizer("é🙂a")["input_ids"]
    assert len(ids) == 2 + 4 + 1
    assert token_texts(tokenizer, ids) == ["é", "◦", "🙂", "◦", "◦", "◦", "a"]
    # Cut in the middle, and bytes that never make a character.
    assert token_texts(tokenizer, ids[:4]) == ["é", "◦", "\ufffd", "\ufffd"]
    assert token_texts(tokenizer, [*ids[:1], *tokenizer("ab")["input_ids"]]) == ["\ufffd", "a", "b"]


def test_spaces_stay_with_their_token() -> None:
    assert token_texts(spaced_tokenizer(), [0, 1, 1]) == ["a", " b", " b"]


def test_lines_hold_trained_tokens_or_none() -> None:
    r"""``a\nb`` is context, ``c`` and the end train: a line ends where that changes, and after a line break."""
    tokenizer = make_tokenizer()
    ids = tokenizer("<user>a\nbc<eos>")["input_ids"]
    tokens = tokens_of(tokenizer, ids, [False, False, False, False, True, True])
    assert [token.special for token in tokens] == [True, False, False, False, False, True]
    assert plain(tokens) == [
        "        <user>¦a¦⏎¦",
        "        b¦",
        "  train c¦<eos>¦",
    ]


def test_long_lines_and_long_tokens_are_folded() -> None:
    """Room for 20 cells beside the margin of 8: three tokens of 5 with their ends are 18; one of 45 is cut at 19."""
    words = [Token("aaaaa", True, False)] * 4
    assert plain(words, 28) == ["  train aaaaa¦aaaaa¦aaaaa¦", "  train aaaaa¦"]
    assert plain([Token("b" * 45, False, False)], 28) == [
        "        " + "b" * 19,
        "        " + "b" * 19,
        "        bbbbbbb¦",
    ]


def test_the_middle_is_left_out_and_counted() -> None:
    tokens = [Token(str(i), i > 1, False) for i in range(7)]
    assert plain(tokens, limit=3) == [
        "        0¦1¦",
        "        ... 4 tokens not shown ...",
        "  train 6¦",
    ]
    assert plain(tokens, limit=7) == plain(tokens)


def test_control_characters_do_nothing_to_the_terminal() -> None:
    assert plain([Token("\x1b[31m\ta\r\u200b", False, False)]) == ["        \\x1b[31m⇥a\\r\\u200b¦"]
    # Brackets are no markup.
    assert plain([Token("[bold]", False, False)]) == ["        [bold]¦"]


@pytest.mark.parametrize("colour", [True, False])
def test_colours_go_with_the_terminal(colour: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same text either way; NO_COLOR takes the colours, and the mark of trained lines stays."""
    monkeypatch.setenv("NO_COLOR", "" if colour else "1")
    console = Console(force_terminal=True, color_system="standard", width=60, highlight=False)
    with console.capture() as captured:
        for line in token_lines([Token("a", False, False), Token("b", True, False), Token("<e>", True, True)], 60):
            console.print(line)
    green, magenta = "\x1b[1;32m", "\x1b[1;35m"
    assert (f"{green}b" in captured.get()) is (f"{magenta}<e>" in captured.get()) is colour
    assert "train" in captured.get()


def test_histogram() -> None:
    """Lengths 1 to 12 in 8 bins are bins of 2, of which 6 are needed; the longest bar is that of 3 and 4."""
    assert histogram([1, 3, 3, 3, 4, 12], bins=8, width=4) == [
        " 1 to  2 1 █",
        " 3 to  4 4 ████",
        " 5 to  6 0",
        " 7 to  8 0",
        " 9 to 10 0",
        "11 to 12 1 █",
    ]
    assert histogram([5, 5]) == ["5 to 5 2 " + "█" * 40]
