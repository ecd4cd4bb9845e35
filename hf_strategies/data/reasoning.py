"""Verifiable tasks: any generator of `reasoning-gym` as a dataset, with its own scorer as the reward."""

from __future__ import annotations

import difflib
import json
import random
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from datasets import Dataset

PREFIX = "reasoning_gym:"
ANSWER_LINE = re.compile(r"^\s*Answer:\s*(.+?)\s*$")
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
# Where an entry keeps the options of its task: some scorers read them.
CONFIG_KEY = "task_config"
INSTRUCTION = "Think if you need to. End with one line of the form 'Answer: <answer>'."


def _reasoning_gym() -> Any:
    try:
        import reasoning_gym
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("tasks of reasoning_gym need an extra: pip install 'hf-strategies[demo]'") from error
    return reasoning_gym


def create_task(task: str, **config: Any) -> Any:
    """A reasoning-gym dataset object by the task's name.

    Raises:
        ValueError: unknown task (naming near ones), or a configuration the task refuses.
        ModuleNotFoundError: reasoning-gym is not installed.
    """
    gym = _reasoning_gym()
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=3)
        hint = f"; near: {', '.join(near)}" if near else ""
        raise ValueError(f"reasoning_gym has no task {task!r} ({len(DATASETS)} known{hint})")
    try:
        return gym.create_dataset(task, **config)
    except (AssertionError, TypeError) as error:
        raise ValueError(f"reasoning_gym task {task!r} refuses {config}: {error}") from error


def generator_seed(seed: int) -> int:
    """A seed far from those of neighbouring runs: reasoning-gym seeds problem i with seed + i."""
    return random.Random(seed).randrange(2**31)


def load_reasoning_gym(spec: str, size: int, seed: int, **config: Any) -> Dataset:
    """Problems of a reasoning-gym task as prompts.

    Args:
        spec: ``reasoning_gym:<task>``.
        size: number of problems, >= 1.
        seed: of the generator.
        **config: options of the task, in types that JSON knows.

    Returns:
        Columns ``prompt`` (chat messages), ``answer`` (text), ``task`` and ``entry`` (JSON, what the scorer reads).

    Raises:
        ValueError: see `create_task`; or a task whose right answers cannot be given on one line.
    """
    task = spec.removeprefix(PREFIX)
    rows = []
    for entry in create_task(task, size=size, seed=generator_seed(seed), **config):
        row = problem_row(task, entry, config=config)
        # Tasks that have many right answers may give none; what they do give must count as right.
        if entry["answer"] is not None:
            answer = strict_answer(f"Answer: {row['answer']}")
            if score_answer(task, answer, row["entry"]) != 1.0:
                raise ValueError(
                    f"reasoning_gym task {task!r} cannot be used: an answer is read from one line, and this right one "
                    f"scores less than 1 there: {row['answer']!r}"
                )
        rows.append(row)
    return Dataset.from_list(rows)


def problem_row(
    task: str,
    entry: dict[str, Any],
    messages: list[dict[str, str]] | None = None,
    config: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A dataset row of one problem.

    Args:
        task: name of the task.
        entry: the problem, as the task made it.
        messages: its prompt; when left out, the question and a request for a last line ``Answer: ...``.
        config: options the task was made with, for its scorer.
    """
    prompt = messages or [{"role": "user", "content": f"{entry['question']}\n\n{INSTRUCTION}"}]
    scored = json.dumps(entry | ({CONFIG_KEY: config} if config else {}), default=str)
    return {"prompt": prompt, "answer": str(entry["answer"]), "task": task, "entry": scored}


def completion_text(completion: str | Sequence[dict[str, str]]) -> str:
    """Text of a completion, plain or conversational."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def strict_answer(text: str) -> str | None:
    """The answer, if the last line that is not empty has the form ``Answer: <answer>``."""
    lines = [line for line in text.splitlines() if line.strip()]
    match = ANSWER_LINE.match(lines[-1]) if lines else None
    return match.group(1) if match else None


def lenient_answer(text: str) -> str | None:
    """The answer of the last ``Answer:`` line anywhere, else the last number of the text."""
    matches = [match for line in text.splitlines() if (match := ANSWER_LINE.match(line))]
    if matches:
        return matches[-1].group(1)
    numbers = NUMBER.findall(text)
    return numbers[-1] if numbers else None


@cache
def _scorer(task: str, config: str) -> Any:
    return create_task(task, size=1, seed=0, **json.loads(config))


def score_answer(task: str, answer: str | None, entry: str) -> float:
    """The task's own score of an answer, in [0, 1]; 0 for no answer, and for one that the scorer cannot read."""
    if answer is None:
        return 0.0
    problem = json.loads(entry)
    scorer = _scorer(task, json.dumps(problem.pop(CONFIG_KEY, {}), sort_keys=True))
    try:
        return float(scorer.score_answer(answer=answer, entry=problem))
    except Exception:
        # Some scorers raise whatever it may be on text they cannot parse (prime_factorization: a word). That a scorer
        # can read the problem was seen when it was loaded.
        return 0.0


class AccuracyReward:
    """1 for a right answer on a last line ``Answer: <answer>``, else 0.

    Args:
        lenient: take the answer from anywhere in the text (see `lenient_answer`).
        name: name of the reward in metrics.
    """

    def __init__(self, lenient: bool = False, name: str | None = None) -> None:
        self.lenient = lenient
        self.name = name or ("lenient_accuracy" if lenient else "accuracy")

    def __call__(
        self, completions: Sequence[Any], task: Sequence[str], entry: Sequence[str], **kwargs: Any
    ) -> list[float]:
        """Exact correctness of each completion; partial credit of the task's scorer counts as 0."""
        parse = lenient_answer if self.lenient else strict_answer
        return [
            float(score_answer(name, parse(completion_text(completion)), problem) == 1.0)
            for completion, name, problem in zip(completions, task, entry, strict=True)
        ]


def format_reward(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    """1 where the last line has the form ``Answer: <answer>``, else 0."""
    return [float(strict_answer(completion_text(completion)) is not None) for completion in completions]
