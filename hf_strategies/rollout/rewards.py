"""Scoring completions: TRL's reward-function interface, checked.

A reward is a function, an async function, a callable object or a sequence-classification model. It is called with
keywords: ``prompts``, ``completions``, ``completion_ids``, every further dataset column (a list aligned with the
completions; one of these names is not handed on), ``trainer_state``, ``log_extra(column, values)`` and
``log_metric(name, value)``; a function without ``**kwargs`` gets only what it declares. It returns one number, or None
for "does not apply", per completion.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

# Squared errors of a critic must fit into float32.
LARGEST = 1e18

# What every reward is offered besides the dataset's columns, see `Rewards.score`.
PROVIDED = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")

RewardFunction = Callable[..., Any]
Text = str | list[dict[str, str]]


class RewardError(ValueError):
    """A reward raised, or returned something that is no list of numbers."""


@dataclass
class Scores:
    """Rewards of N completions.

    Attributes:
        total: [N] float64, weighted sum over the rewards that apply; NaN where none does.
        by_name: per reward, [N] float64, NaN where it does not apply.
        extra: further columns for the completions table, as logged by the rewards.
        metrics: scalars logged by the rewards.
    """

    total: Tensor
    by_name: dict[str, Tensor]
    extra: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, list[float]] = field(default_factory=dict)


class ModelReward:
    """A sequence-classification model with one label as a reward.

    Args:
        model: the model; moved to evaluation mode.
        tokenizer: the model's *own* tokenizer: the text is encoded again with it, policy ids never reach the model.
        batch_size: texts per forward pass.
    """

    def __init__(self, model: Any, tokenizer: Any, batch_size: int = 16) -> None:
        num_labels = getattr(model.config, "num_labels", 1)
        if num_labels != 1:
            raise ValueError(f"reward model {model.config._name_or_path!r} has {num_labels} labels, allowed is 1")
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        if model.config.pad_token_id is None:
            model.config.pad_token_id = tokenizer.pad_token_id
        self.batch_size = batch_size
        self.__name__ = (model.config._name_or_path or type(model).__name__).rstrip("/").split("/")[-1]

    @torch.no_grad()
    def __call__(self, prompts: Sequence[Text], completions: Sequence[Text], **kwargs: Any) -> list[float]:
        """Score prompt + completion texts; conversations go through the tokenizer's chat template."""
        texts = [self._text(p, c) for p, c in zip(prompts, completions, strict=True)]
        # A chat template writes the special tokens itself.
        special_tokens = not texts or isinstance(prompts[0], str)
        device = next(self.model.parameters()).device
        scores: list[float] = []
        for start in range(0, len(texts), self.batch_size):
            inputs = self.tokenizer(
                texts[start : start + self.batch_size],
                return_tensors="pt",
                padding=True,
                padding_side="right",
                add_special_tokens=special_tokens,
            )
            logits = self.model(**inputs.to(device)).logits
            scores += logits[:, 0].float().tolist()
        return scores

    def _text(self, prompt: Text, completion: Text) -> str:
        if isinstance(prompt, str) and isinstance(completion, str):
            return prompt + completion
        messages = [*prompt, *completion]
        return self.tokenizer.apply_chat_template(messages, tokenize=False)


def reward_name(reward: RewardFunction) -> str:
    """Name of a reward in metrics and messages."""
    while isinstance(reward, partial):
        reward = reward.func
    return getattr(reward, "name", None) or getattr(reward, "__name__", None) or type(reward).__name__


class Rewards:
    """Several weighted rewards.

    Args:
        functions: the rewards; at least one.
        weights: one per reward; all 1 when left out.

    Raises:
        ValueError: no reward, two of one name, or a wrong number of weights.
        TypeError: a reward that cannot be called.
    """

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        weights: Sequence[float] | None = None,
    ) -> None:
        if not functions:
            raise ValueError("reward_funcs is empty: give at least one reward")
        for function in functions:
            if not callable(function):
                raise TypeError(f"reward_funcs: {function!r} cannot be called")
        self.functions = list(functions)
        self.names = [reward_name(function) for function in functions]
        twice = {name for name in self.names if self.names.count(name) > 1}
        if twice:
            raise ValueError(f"reward_funcs: names must differ, got {sorted(twice)} twice; set a `name` attribute")
        self.weights = [1.0] * len(functions) if weights is None else [float(w) for w in weights]
        if len(self.weights) != len(functions):
            raise ValueError(f"reward_weights has {len(self.weights)} entries, reward_funcs {len(functions)}")
        if not all(math.isfinite(w) for w in self.weights):
            raise ValueError(f"reward_weights={self.weights!r}: allowed are finite numbers")
        if not any(self.weights):
            raise ValueError(f"reward_weights={self.weights!r}: all are 0, nothing would be learned")

    def score(
        self,
        prompts: Sequence[Text],
        completions: Sequence[Text],
        completion_ids: Sequence[list[int]],
        columns: dict[str, list[Any]],
        trainer_state: Any = None,
    ) -> Scores:
        """Score N completions.

        Args:
            prompts: N texts or conversations, the prompt of each completion.
            completions: N texts or conversations.
            completion_ids: N lists of sampled token ids.
            columns: further dataset columns, each with N entries.
            trainer_state: handed through.

        Raises:
            RewardError: a reward raised, or returned the wrong number of values, an infinite one or no number; the
                message names the reward and the row.
        """
        n = len(completions)
        scores = Scores(torch.full((n,), float("nan"), dtype=torch.float64), {})

        def log_extra(column: str, values: Sequence[Any]) -> None:
            if len(values) != n:
                raise ValueError(f"log_extra({column!r}, ...): got {len(values)} values for {n} completions")
            scores.extra[column] = list(values)

        def log_metric(name: str, value: float) -> None:
            number = float(value)
            if not math.isnan(number):  # as for rewards: nothing to say
                scores.metrics.setdefault(name, []).append(number)

        inputs: dict[str, list[Any]] = {
            **columns,
            "prompts": list(prompts),
            "completions": list(completions),
            "completion_ids": list(completion_ids),
        }
        helpers = {
            "trainer_state": trainer_state,
            "log_extra": log_extra,
            "log_metric": log_metric,
        }
        outcomes = _outcomes(self.functions, inputs | helpers)
        for name, function, outcome in zip(self.names, self.functions, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                row = _failing_row(function, inputs, helpers, n)
                where = f" on row {row} (completion {inputs['completions'][row]!r})" if row is not None else ""
                raise RewardError(f"reward {name!r} raised {type(outcome).__name__}{where}: {outcome}") from outcome
            scores.by_name[name] = _checked(name, outcome, n)
        stacked = torch.stack([scores.by_name[name] for name in self.names])
        weights = torch.tensor(self.weights, dtype=torch.float64).unsqueeze(1)
        applies = ~stacked.isnan()
        total = torch.where(applies, stacked * weights, torch.zeros_like(stacked)).sum(dim=0)
        scores.total = torch.where(applies.any(dim=0), total, torch.full_like(total, float("nan")))
        return scores


def _outcomes(functions: Sequence[RewardFunction], available: dict[str, Any]) -> list[Any]:
    """Result of each reward, or the exception it raised; asynchronous ones run at the same time."""
    outcomes: list[Any] = []
    for function in functions:
        try:
            outcomes.append(function(**_accepted(function, available)))
        except Exception as error:  # raised again by the caller, with the reward's name
            outcomes.append(error)
    waiting = [i for i, outcome in enumerate(outcomes) if inspect.isawaitable(outcome)]
    if waiting:
        for i, result in zip(waiting, _run(_together([outcomes[i] for i in waiting])), strict=True):
            outcomes[i] = result
    return outcomes


def _failing_row(
    function: RewardFunction, inputs: dict[str, list[Any]], helpers: dict[str, Any], n: int
) -> int | None:
    """First row on which the reward raises when it sees that row alone."""
    silent = {name: lambda *args, **kwargs: None for name in ("log_extra", "log_metric")}
    for row in range(n):
        alone = {name: [values[row]] for name, values in inputs.items()}
        (outcome,) = _outcomes([function], alone | helpers | silent)
        if isinstance(outcome, BaseException):
            return row
    return None


async def _together(awaitables: Sequence[Awaitable[Any]]) -> list[Any]:
    return await asyncio.gather(*awaitables, return_exceptions=True)


def _run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Result of a coroutine; in a notebook a loop runs already in this thread, so it gets another one."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(asyncio.run, coroutine).result()


def _accepted(function: RewardFunction, available: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return available
    return {name: value for name, value in available.items() if name in parameters}


def _checked(name: str, result: Any, n: int) -> Tensor:
    if hasattr(result, "tolist"):  # tensors, arrays, series
        result = result.tolist()
    if not isinstance(result, list | tuple):
        raise RewardError(f"reward {name!r} returned {type(result).__name__}, expected a list of {n} numbers")
    if len(result) != n:
        raise RewardError(f"reward {name!r} returned {len(result)} values for {n} completions")
    values = []
    for row, value in enumerate(result):
        if value is None:
            values.append(float("nan"))
            continue
        try:
            if isinstance(value, str):
                raise TypeError("a text is no number")
            number = float(value)
        except (TypeError, ValueError):
            raise RewardError(f"reward {name!r} returned {value!r} for row {row}, expected a number or None") from None
        if math.isinf(number):
            raise RewardError(f"reward {name!r} returned {number} for row {row}: rewards must be finite")
        if abs(number) > LARGEST:
            raise RewardError(f"reward {name!r} returned {number} for row {row}: allowed is at most {LARGEST:g}")
        values.append(number)
    return torch.tensor(values, dtype=torch.float64)
