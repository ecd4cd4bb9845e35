"""What the recipes do around `train`: find the task, measure held-out problems before and after, say how to go on."""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from peft import PeftModel
from rich.console import Console

from hf_strategies.cli import DataArguments, ModelArguments, load_rows
from hf_strategies.data.demo import Task, demo_task, mean_interval
from hf_strategies.data.reasoning import (
    PREFIX,
    AccuracyReward,
    format_reward,
    lenient_answer,
    load_reasoning_gym,
    score_answer,
    strict_answer,
)
from hf_strategies.modeling.embedded import embedded_model_path
from hf_strategies.options import Options, option
from hf_strategies.reporting.completions import completions_table
from hf_strategies.trainers import StrategyTrainer

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
        task = demo_task(seed)
    elif data.dataset_name.startswith(PREFIX):
        train = load_reasoning_gym(data.dataset_name, data.task_size, seed)
        heldout = (
            load_reasoning_gym(data.dataset_name, data.held_out_rows, HELD_OUT_SEED) if data.held_out_rows else None
        )
        task = Task(data.dataset_name, train, heldout, [AccuracyReward(), format_reward])
    else:
        if functions is None:
            raise ValueError(
                f"dataset_name={data.dataset_name!r} needs reward_funcs: nothing says what a good answer is"
            )
        train, heldout = load_rows(data, seed)
        task = Task(data.dataset_name, train, heldout, functions)
    if functions is not None:
        task.rewards = functions
    return task


def _reward(name: str) -> Any:
    if name in BUILT_IN:
        return BUILT_IN[name]
    module, _, attribute = name.rpartition(".")
    if not module or "/" in name:
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


@dataclass
class HeldOut:
    """One measurement on the held-out problems.

    Attributes:
        rows: completions with their rewards, in dataset order.
        scores: per row, the score that is compared before and after.
        lenient: per row, correctness under the lenient parser; None where the task has no parser.
        seconds: how long it took.
    """

    rows: list[dict[str, Any]]
    scores: list[float]
    lenient: list[float] | None
    seconds: float

    @property
    def mean(self) -> float:
        """Mean score."""
        return sum(self.scores) / len(self.scores)

    def describe(self, label: str) -> str:
        """One line for people."""
        low, high = mean_interval(self.scores)
        line = f"{label}: {self.mean:.3f}  (95 % interval {low:.3f} to {high:.3f}, n = {len(self.scores)})"
        if self.lenient is not None:
            line += f"; lenient parser {sum(self.lenient) / len(self.lenient):.3f}"
        return line


def measure(trainer: StrategyTrainer) -> HeldOut:
    """Sample the held-out prompts with the evaluation settings and score them."""
    started = time.perf_counter()
    trainer.evaluate()
    n = trainer.args.num_generations_eval or trainer.args.num_generations
    rows: list[dict[str, Any]] = gather_object(trainer.last_eval_table)[: len(trainer.eval_dataset) * n]
    scores, lenient = [row["reward"] for row in rows], None
    if rows and "entry" in rows[0]:
        # A verifiable task is measured by exact correctness, whatever rewards it is trained with.
        scores = [_correct(row, strict_answer) for row in rows]
        lenient = [_correct(row, lenient_answer) for row in rows]
    return HeldOut(rows, scores, lenient, time.perf_counter() - started)


def _correct(row: dict[str, Any], parse: Any) -> float:
    return float(score_answer(row["task"], parse(row["completion"]), row["entry"]) == 1.0)


@contextmanager
def held_out_report(trainer: StrategyTrainer, task: Task, examples: int = 6) -> Iterator[dict[str, Any]]:
    """Measure before and after what happens inside, and print the comparison.

    Args:
        trainer: an online trainer.
        task: what it trains on.
        examples: completions shown side by side.

    Yields:
        A dict that holds the figures once the context is left.
    """
    result: dict[str, Any] = {}
    if task.heldout is None:
        yield result
        return
    console = Console()
    chief = trainer.is_world_process_zero()
    if chief:
        console.print(f"Task: {task.name}; {len(task.train)} training and {len(task.heldout)} held-out problems.")
        console.print("Measuring the held-out problems before training ...")
    before = measure(trainer)
    if chief:
        console.print(before.describe("Held-out score before"))
    started = time.perf_counter()
    yield result
    seconds = time.perf_counter() - started
    after = measure(trainer)
    if not chief:
        return
    console.print(_side_by_side(before, after, examples))
    console.print(before.describe("Held-out score before"))
    console.print(after.describe("Held-out score after "))
    if before.lenient is not None:
        console.print(
            "The score counts exact answers on a last line 'Answer: ...'; the lenient parser also takes the last "
            "number of the text: what it finds beyond the score is arithmetic without the form."
        )
    result |= {
        "held_out_before": round(before.mean, 4),
        "held_out_before_interval": [round(x, 4) for x in mean_interval(before.scores)],
        "held_out_after": round(after.mean, 4),
        "held_out_after_interval": [round(x, 4) for x in mean_interval(after.scores)],
        "held_out_problems": len(after.scores),
        "optimizer_steps": trainer.state.global_step,
        "training_seconds": round(seconds, 1),
        "evaluation_seconds": round(before.seconds + after.seconds, 1),
    }
    if before.lenient is not None and after.lenient is not None:
        result["lenient_before"] = round(sum(before.lenient) / len(before.lenient), 4)
        result["lenient_after"] = round(sum(after.lenient) / len(after.lenient), 4)


def _side_by_side(before: HeldOut, after: HeldOut, examples: int) -> Any:
    changed = [i for i in range(len(before.rows)) if before.scores[i] != after.scores[i]]
    same = [i for i in range(len(before.rows)) if before.scores[i] == after.scores[i]]
    rows = []
    for i in (changed + same)[:examples]:
        prompt = before.rows[i]["prompt"]
        rows.append(
            {
                "prompt": prompt if isinstance(prompt, str) else prompt[-1]["content"],
                "before": before.rows[i]["completion"],
                "score": before.scores[i],
                "after": after.rows[i]["completion"],
                "score after": after.scores[i],
            }
        )
    return completions_table(rows, "Held-out completions before and after training")


def save_and_say(trainer: StrategyTrainer, task: Task, result: dict[str, Any]) -> None:
    """Save the model, push it if asked to, and say what can be done with it.

    The last line printed is ``result`` as JSON, for programs.
    """
    trainer.save_model()
    if trainer.args.push_to_hub:
        trainer.push_to_hub()
    if not trainer.is_world_process_zero():
        return
    folder = trainer.args.output_dir
    if task.context:
        (Path(folder) / "conversation.json").write_text(json.dumps(task.context, indent=1))
    adapter = isinstance(trainer.accelerator.unwrap_model(trainer.model), PeftModel)
    loader = "PeftModel.from_pretrained(base_model, ...)" if adapter else "AutoModelForCausalLM.from_pretrained(...)"
    print(f"Saved in {folder}: load it with {loader}, or talk to it:")
    print(f"  {sys.executable} recipes/chat.py --model {folder}")
    if result:
        print(json.dumps(result))
