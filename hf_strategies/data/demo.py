"""The embedded default task: sums of two numbers, generated and scored by reasoning-gym's ``chain_sum``.

A solved example in the conversation shows the form of an answer. The numbers are divided once: no number of a held-out
problem occurs in any training problem, so a right held-out answer is not remembered.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from datasets import Dataset
from scipy.stats import binomtest, sem, t

from hf_strategies.data.reasoning import (
    AccuracyReward,
    create_task,
    format_reward,
    generator_seed,
    problem_row,
)

TASK = "chain_sum"
LOW, HIGH = 10, 99
HELD_OUT_NUMBERS = 20
TRAIN_PROBLEMS, HELD_OUT_PROBLEMS = 2000, 256
# The division into training and held-out numbers never changes, so that runs can be compared.
DIVISION_SEED = 20


@dataclass
class Task:
    """What an online recipe trains on.

    Attributes:
        name: for messages.
        train: prompts with reward columns.
        heldout: the same for evaluation, or None.
        rewards: reward functions.
        context: messages that open every prompt; whoever talks to the trained model opens with them too.
    """

    name: str
    train: Dataset
    heldout: Dataset | None
    rewards: list[Any]
    context: list[dict[str, str]] = field(default_factory=list)


CONTEXT = [
    {"role": "system", "content": "You are a calculator."},
    {"role": "user", "content": "12 + 7"},
    {"role": "assistant", "content": "12 + 7 = 19\nAnswer: 19"},
]


def messages(question: str) -> list[dict[str, str]]:
    """The conversation of a problem: one solved example, then the question."""
    return [*CONTEXT, {"role": "user", "content": question}]


def divided_numbers() -> tuple[list[int], list[int]]:
    """Training numbers and held-out numbers; together all from `LOW` to `HIGH`, and disjoint."""
    numbers = list(range(LOW, HIGH + 1))
    random.Random(DIVISION_SEED).shuffle(numbers)
    return sorted(numbers[HELD_OUT_NUMBERS:]), sorted(numbers[:HELD_OUT_NUMBERS])


def demo_task(seed: int, train_problems: int = TRAIN_PROBLEMS, held_out_problems: int = HELD_OUT_PROBLEMS) -> Task:
    """Training and held-out sums.

    Args:
        seed: of the training problems and their order; the held-out problems are always the same.
        train_problems: distinct problems to train on.
        held_out_problems: distinct problems to evaluate on.

    Raises:
        ValueError: more problems than there are pairs of numbers.
    """
    train_numbers, held_out_numbers = divided_numbers()
    train = _problems(train_numbers, train_problems, seed)
    heldout = _problems(held_out_numbers, held_out_problems, DIVISION_SEED)
    return Task(
        "sums of two numbers (reasoning_gym:chain_sum), one solved example in the prompt",
        Dataset.from_list([problem_row(TASK, entry, messages(_expression(entry))) for entry in train]),
        Dataset.from_list([problem_row(TASK, entry, messages(_expression(entry))) for entry in heldout]),
        [AccuracyReward(), format_reward],
        CONTEXT,
    )


def _expression(entry: dict[str, Any]) -> str:
    return entry["metadata"]["expression"]


def _problems(numbers: Sequence[int], count: int, seed: int) -> list[dict[str, Any]]:
    """Distinct problems of the generator whose two numbers are all among ``numbers``."""
    allowed = set(numbers)
    if count > len(allowed) ** 2:
        raise ValueError(f"{count} problems asked for, {len(allowed)} numbers make only {len(allowed) ** 2}")
    found: dict[str, dict[str, Any]] = {}
    first = generator_seed(seed)
    while len(found) < count:
        # The generator draws from all two-digit numbers; those with a number of the other side are passed over.
        for entry in create_task(TASK, size=4000, seed=first, min_terms=2, max_terms=2, min_digits=2, max_digits=2):
            left, operator, right = _expression(entry).split()
            if operator == "+" and int(left) in allowed and int(right) in allowed:
                found.setdefault(_expression(entry), entry)
        first += 4000
    return list(found.values())[:count]


def mean_interval(scores: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the mean of independent scores: Wilson's for zeros and ones, Student's t for other numbers."""
    if all(score in (0.0, 1.0) for score in scores):
        interval = binomtest(int(sum(scores)), len(scores)).proportion_ci(confidence_level=0.95, method="wilson")
        return interval.low, interval.high
    mean, error = float(np.mean(scores)), float(sem(scores))
    low, high = t.interval(0.95, len(scores) - 1, loc=mean, scale=error) if error else (mean, mean)
    return float(low), float(high)
