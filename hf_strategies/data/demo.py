"""The data that every recipe runs on when none is named.

Sums of two numbers, generated and scored by reasoning-gym's ``chain_sum``, as prompts, as solved examples, as pairs,
and as scored groups; for pretraining, the chapters of the Python language reference that Python itself carries.

A solved example in the conversation shows the form of an answer. The numbers are divided once: no number of a held-out
problem occurs in any training problem, so a right held-out answer is not remembered.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset

from hf_strategies.data.mixtures import Rows
from hf_strategies.data.reasoning import (
    AccuracyReward,
    create_task,
    format_reward,
    generator_seed,
    problem_row,
)

TASK = "chain_sum"
SUMS = "sums of two numbers (reasoning_gym:chain_sum) after one solved example"
LOW, HIGH = 10, 99
HELD_OUT_NUMBERS = 20
TRAIN_PROBLEMS, HELD_OUT_PROBLEMS = 2000, 256
HELD_OUT_DOCUMENTS = 12
# The division into training and held-out numbers never changes, so that runs can be compared.
DIVISION_SEED = 20


@dataclass
class Task:
    """What a recipe trains on, and what it is measured by.

    Attributes:
        name: for messages.
        train: rows to train on, in memory or a stream.
        heldout: the same for evaluation, or None.
        problems: prompts with reward columns that are sampled and scored before and after; for an online task these
            are ``heldout``. None: nothing is sampled.
        rewards: reward functions that score them.
        context: messages that open every prompt; whoever talks to the trained model opens with them too.
    """

    name: str
    train: Rows
    heldout: Dataset | None
    problems: Dataset | None = None
    rewards: list[Any] = field(default_factory=list)
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
    """Sums as prompts with reward columns, for online strategies.

    Args:
        seed: of the training problems and their order; the held-out problems are always the same.
        train_problems: distinct problems to train on.
        held_out_problems: distinct problems to evaluate on.

    Raises:
        ValueError: more problems than there are pairs of numbers.
    """
    train, heldout = (
        Dataset.from_list([problem_row(TASK, entry, messages(_expression(entry))) for entry in entries])
        for entries in _divided_problems(seed, train_problems, held_out_problems)
    )
    return Task(f"{SUMS}, to be solved", train, heldout, heldout, [AccuracyReward(), format_reward], CONTEXT)


def demo_solutions(seed: int) -> Task:
    """Sums with their solutions, columns ``prompt`` and ``completion``, for supervised fine-tuning."""
    return _offline(
        seed,
        "as solved examples",
        lambda expression, total, noise: {"completion": [_solution(expression, total)]},
    )


def demo_pairs(seed: int) -> Task:
    """Sums with a right and a wrong solution, columns ``prompt``, ``chosen``, ``rejected``, for DPO."""
    return _offline(
        seed,
        "as pairs of a right and a wrong solution",
        lambda expression, total, noise: {
            "chosen": [_solution(expression, total)],
            "rejected": [_solution(expression, _wrong(total, noise))],
        },
    )


def demo_groups(seed: int) -> Task:
    """Sums with four scored solutions, columns ``prompt``, ``completions``, ``rewards``, for offline GRPO.

    One is right, two have a wrong sum (reward 0.2: the form is right), one is the bare sum without the form (0).
    """

    def group(expression: str, total: int, noise: random.Random) -> dict[str, Any]:
        solutions = [_solution(expression, value) for value in (total, _wrong(total, noise), _wrong(total, noise))]
        bare = {"role": "assistant", "content": str(total)}
        return {"completions": [[turn] for turn in (*solutions, bare)], "rewards": [1.0, 0.2, 0.2, 0.0]}

    return _offline(seed, "as scored groups", group)


def demo_documents(seed: int) -> Task:
    """Chapters of the Python language reference, column ``text``, for continued pretraining.

    Args:
        seed: of the order of the training documents; the held-out ones are always the same.
    """
    from pydoc_data.topics import topics

    # Chapters are filed under several names, and some are parts of others.
    texts = sorted(set(topics.values()))
    texts = [text for text in texts if not any(text in other for other in texts if other is not text)]
    random.Random(DIVISION_SEED).shuffle(texts)
    heldout, train = texts[:HELD_OUT_DOCUMENTS], texts[HELD_OUT_DOCUMENTS:]
    random.Random(seed).shuffle(train)
    return Task(
        "the Python language reference, as pydoc carries it",
        Dataset.from_list([{"text": text} for text in train]),
        Dataset.from_list([{"text": text} for text in heldout]),
    )


def _offline(seed: int, form: str, answers: Callable[[str, int, random.Random], dict[str, Any]]) -> Task:
    """Rows of prompt and answers for training and evaluation, and the held-out problems to sample.

    Args:
        seed: see `demo_task`.
        form: for the task's name.
        answers: the columns beside ``prompt``, from expression, sum, and a source of noise.
    """
    parts = []
    for entries, noise in zip(
        _divided_problems(seed, TRAIN_PROBLEMS, HELD_OUT_PROBLEMS), (seed, DIVISION_SEED), strict=True
    ):
        source, rows = random.Random(noise), []
        for entry in entries:
            expression = _expression(entry)
            rows.append({"prompt": messages(expression)} | answers(expression, int(entry["answer"]), source))
        parts.append(Dataset.from_list(rows))
    online = demo_task(seed, train_problems=1)
    return Task(f"{SUMS}, {form}", parts[0], parts[1], online.problems, online.rewards, CONTEXT)


def _solution(expression: str, total: int) -> dict[str, str]:
    return {"role": "assistant", "content": f"{expression} = {total}\nAnswer: {total}"}


def _wrong(total: int, noise: random.Random) -> int:
    """A sum that is off by a slip, a unit or two or a ten, and has as many digits: its length tells nothing."""
    sums = (total + slip for slip in (-10, -2, -1, 1, 2, 10))
    return noise.choice([value for value in sums if len(str(value)) == len(str(total))])


def _divided_problems(seed: int, train: int, heldout: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    train_numbers, held_out_numbers = divided_numbers()
    return _problems(train_numbers, train, seed), _problems(held_out_numbers, heldout, DIVISION_SEED)


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
