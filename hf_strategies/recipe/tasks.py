"""What a recipe trains on: the dataset that was named, or an embedded one."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from datasets import Dataset

from hf_strategies.cli import DataArguments, ModelArguments, load_rows
from hf_strategies.data.demo import Task, demo_task
from hf_strategies.data.reasoning import PREFIX, AccuracyReward, format_reward, load_reasoning_gym
from hf_strategies.modeling.embedded import embedded_model_path
from hf_strategies.options import Options, option

BUILT_IN = {"accuracy": AccuracyReward(), "format": format_reward}
# Held-out problems of a generated task come from another seed than any training seed in use.
HELD_OUT_SEED = 2_000_000_011


@dataclass
class RewardArguments(Options):
    """Which rewards."""

    reward_funcs: list[str] | None = option(
        None,
        "Rewards: accuracy, format (both for reasoning_gym tasks), module.function of your own, or the id of a "
        "sequence-classification model; unset: accuracy and format.",
    )


def policy_name(model: ModelArguments) -> str:
    """Id or path of the policy; the embedded model when none is named."""
    return model.model_name_or_path or str(embedded_model_path())


def online_task(data: DataArguments, rewards: RewardArguments, seed: int) -> Task:
    """Prompts and rewards of an online recipe.

    Raises:
        ValueError: a dataset without rewards, or a reward that cannot be imported.
    """
    functions = [_reward(name) for name in rewards.reward_funcs] if rewards.reward_funcs else None
    if data.dataset_name is None:
        task = held_out(demo_task(seed), data.held_out_rows)
    elif data.dataset_name.startswith(PREFIX):
        train = load_reasoning_gym(data.dataset_name, data.task_size, seed)
        heldout = (
            load_reasoning_gym(data.dataset_name, data.held_out_rows, HELD_OUT_SEED) if data.held_out_rows else None
        )
        task = Task(data.dataset_name, train, heldout, heldout, [AccuracyReward(), format_reward])
    else:
        if functions is None:
            raise ValueError(
                f"dataset_name={data.dataset_name!r} needs reward_funcs: nothing says what a good answer is"
            )
        train, heldout = load_rows(data, seed)
        task = Task(data.dataset_name, train, heldout, heldout, functions)
    if functions is not None:
        task.rewards = functions
    return task


def offline_task(data: DataArguments, seed: int, embedded: Callable[[int], Task]) -> Task:
    """Rows of an offline recipe.

    Args:
        data: which dataset.
        seed: of the split into training and held-out rows.
        embedded: makes the default task from the seed.

    Raises:
        ValueError: a task of prompts alone, or a split that does not exist.
    """
    if data.dataset_name is None:
        return held_out(embedded(seed), data.held_out_rows)
    if data.dataset_name.startswith(PREFIX):
        raise ValueError(
            f"dataset_name={data.dataset_name!r} holds prompts without answers to train on: allowed are a Hub id or a "
            "local file"
        )
    return Task(data.dataset_name, *load_rows(data, seed))


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
