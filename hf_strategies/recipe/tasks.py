"""What a recipe trains on: the dataset that was named, or an embedded one."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from datasets import Dataset

from hf_strategies.cli import RewardArguments
from hf_strategies.data.arguments import DataArguments
from hf_strategies.data.demo import Task, demo_task
from hf_strategies.data.reasoning import PREFIX, AccuracyReward, format_reward
from hf_strategies.data.sources import load_rows

BUILT_IN = {"accuracy": AccuracyReward(), "format": format_reward}


def online_task(data: DataArguments, rewards: RewardArguments, seed: int) -> Task:
    """Prompts and rewards of an online recipe.

    Raises:
        ValueError: a dataset without rewards, or a reward that cannot be imported.
    """
    functions = [_reward(name) for name in rewards.reward_funcs] if rewards.reward_funcs else None
    if data.is_embedded:
        task = held_out(demo_task(seed), data.held_out_rows)
        return replace(task, rewards=functions) if functions else task
    if functions is None:
        if any(not path.startswith(PREFIX) for path in data.paths):
            raise ValueError(f"{data.label} needs reward_funcs: nothing says what a good answer is")
        functions = [AccuracyReward(), format_reward]
    train, heldout = load_rows(data, seed)
    return Task(data.label, train, heldout, heldout, functions)


def offline_task(data: DataArguments, seed: int, embedded: Callable[[int], Task]) -> Task:
    """Rows of an offline recipe.

    Args:
        data: which dataset.
        seed: of the split into training and held-out rows.
        embedded: makes the default task from the seed.

    Raises:
        ValueError: a task of prompts alone, or a split that does not exist.
    """
    if data.is_embedded:
        return held_out(embedded(seed), data.held_out_rows)
    for path in data.paths:
        if path.startswith(PREFIX):
            field = "path" if data.datasets else "dataset_name"
            raise ValueError(
                f"{field}={path!r} holds prompts without answers to train on: allowed are a Hub id, a local file or a "
                "folder"
            )
    return Task(data.label, *load_rows(data, seed))


def held_out(task: Task, count: int) -> Task:
    """A task that is measured by its first held-out rows and problems alone, by none with a count of 0."""

    def first(rows: Dataset | None) -> Dataset | None:
        return rows.select(range(min(count, len(rows)))) if rows is not None and count else None

    return replace(task, heldout=first(task.heldout), problems=first(task.problems))


def _reward(name: str) -> Any:
    if name in BUILT_IN:
        return BUILT_IN[name]
    module, _, attribute = name.rpartition(".")
    if not module or "/" in name:
        near = difflib.get_close_matches(name, BUILT_IN, n=1)
        if near and not Path(name).exists():
            raise ValueError(f"reward_funcs: {name!r} is unknown, did you mean {near[0]!r}?")
        return name  # a model id
    sys.path.insert(0, str(Path.cwd()))
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"reward_funcs: cannot import {name!r} ({error}); built in are {', '.join(BUILT_IN)}"
        ) from error
    finally:
        sys.path.pop(0)
