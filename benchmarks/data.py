"""Prompts and completions of exact token counts, the same for both sides."""

from __future__ import annotations

import random
from typing import Any

from benchmarks.cases import Case


class Texts:
    """Texts of which the tokenizer makes exactly so many tokens.

    Args:
        tokenizer: the model's.
        seed: of the choice of words.
    """

    def __init__(self, tokenizer: Any, seed: int = 0) -> None:
        self.tokenizer = tokenizer
        self.random = random.Random(seed)
        words = [tokenizer.decode([i]) for i in range(2000, 12000)]
        self.words = [
            word for word in words if word[:1] == " " and word[1:].isalpha() and word.isascii() and word.islower()
        ]

    def __call__(self, tokens: int) -> str:
        """A text of ``tokens`` tokens."""
        text = "".join(self.random.choice(self.words) for _ in range(tokens))
        assert len(self.tokenizer(text, add_special_tokens=False)["input_ids"]) == tokens
        return text


def lengths(case: Case, count: int, seed: int = 1) -> list[int]:
    """``count`` completion lengths with the case's longest and mean."""
    if case.ragged == 1.0:
        return [case.completion] * count
    source = random.Random(seed)
    # A mixture of short ones and a few long ones; the mean is right up to rounding.
    wanted = case.ragged * case.completion
    drawn = [max(1, min(case.completion, round(source.expovariate(1 / wanted)))) for _ in range(count)]
    drawn[0] = case.completion
    scale = (wanted * count - case.completion) / max(1, sum(drawn[1:]))
    return [drawn[0]] + [max(1, min(case.completion, round(length * scale))) for length in drawn[1:]]


def rewards_of(case: Case, group: int) -> list[float]:
    """Rewards of one group: different ones, or all equal for the tied share of groups."""
    tied = group < round(case.tied * case.prompts)
    return [0.5] * case.group if tied else [float(j % 2) for j in range(case.group)]
