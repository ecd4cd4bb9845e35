"""From what a user writes as ``reward_funcs`` to callables, checked against the dataset's columns."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hf_strategies.rollout.callback import PROMPT_COLUMNS
from hf_strategies.rollout.rewards import (
    PROVIDED,
    ModelReward,
    RewardFunction,
    Rewards,
    reward_name,
)


def resolve_rewards(
    reward_funcs: Any,
    weights: Sequence[float] | None,
    processing_classes: Any,
    columns: Mapping[str, Sequence[str]],
) -> Rewards:
    """Callables for one or several rewards.

    Args:
        reward_funcs: function, sequence-classification model or its id or path; one or a list.
        weights: one per reward, or None.
        processing_classes: tokenizers of reward models, one per reward (None for functions); None loads them by name.
        columns: columns of each dataset by its name, to check that every reward finds what it asks for.

    Raises:
        ValueError: a required parameter that is no column, or a wrong number of tokenizers.
    """
    given = list(reward_funcs) if isinstance(reward_funcs, list | tuple) else [reward_funcs]
    if processing_classes is None:
        tokenizers: list[Any] = [None] * len(given)
    else:
        tokenizers = list(processing_classes) if isinstance(processing_classes, list | tuple) else [processing_classes]
    if len(tokenizers) != len(given):
        raise ValueError(f"reward_processing_classes has {len(tokenizers)} entries, reward_funcs {len(given)}")
    # Columns first: no reward model is loaded for a run that cannot start.
    for function in given:
        if callable(function) and not isinstance(function, nn.Module):
            for dataset, names in columns.items():
                _check_columns(function, dataset, names)
    return Rewards([_as_function(f, t) for f, t in zip(given, tokenizers, strict=True)], weights)


def _as_function(reward: Any, tokenizer: Any) -> RewardFunction:
    if isinstance(reward, str):
        try:
            model = AutoModelForSequenceClassification.from_pretrained(reward, num_labels=1)
            return ModelReward(model, tokenizer or AutoTokenizer.from_pretrained(reward))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"reward_funcs: {reward!r} cannot be loaded as a sequence-classification model: {error}"
            ) from error
    if isinstance(reward, nn.Module):
        model = cast(Any, reward)
        if getattr(model, "can_generate", bool)():
            raise TypeError(
                f"reward_funcs: {type(model).__name__} gives no score, allowed is a sequence-classification model"
            )
        if tokenizer is None and not model.config._name_or_path:
            raise ValueError(
                f"reward_processing_classes is needed: {type(model).__name__} does not say which tokenizer is its own"
            )
        return ModelReward(model, tokenizer or AutoTokenizer.from_pretrained(model.config._name_or_path))
    return reward


def _check_columns(function: RewardFunction, dataset: str, columns: Sequence[str]) -> None:
    travelling = [name for name in columns if name not in PROMPT_COLUMNS]
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # of some types written in C
        raise TypeError(
            f"reward_funcs: {function!r} does not say which parameters it takes, allowed are functions"
        ) from None
    for name, parameter in parameters.items():
        if parameter.kind in (
            inspect.Parameter.VAR_KEYWORD,
            inspect.Parameter.VAR_POSITIONAL,
        ):
            continue
        if parameter.default is inspect.Parameter.empty and name not in PROVIDED and name not in travelling:
            raise ValueError(
                f"reward {reward_name(function)!r} asks for the column {name!r}; the {dataset} dataset has "
                f"{sorted(travelling)} beside the prompt, and every reward is offered {', '.join(sorted(PROVIDED))}"
            )
