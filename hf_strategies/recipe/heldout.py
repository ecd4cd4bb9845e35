"""Held-out rows before and after training: the strategy's own measure, and problems that are sampled and scored."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from accelerate.utils import gather_object
from datasets import IterableDataset
from rich.console import Console
from scipy.stats import binomtest, sem, t

from hf_strategies.data.demo import Task
from hf_strategies.data.reasoning import lenient_answer, score_answer, strict_answer
from hf_strategies.reporting.completions import completions_table
from hf_strategies.trainers import GRPOConfig, GRPOTrainer, StrategyTrainer

# Measures of offline strategies, where they report them, and what they are called here.
MEASURES = {
    "eval_loss": "loss",
    "eval_rewards/accuracies": "pairs ranked rightly",
    "eval_logps/accuracies": "better answer likelier",
}
SAMPLED_TOKENS = 20


@dataclass
class HeldOut:
    """One measurement.

    Attributes:
        measures: name -> value of the strategy's own measures; empty for an online strategy.
        rows: sampled completions with their rewards, in dataset order.
        scores: per sampled completion, the score that is compared before and after.
        lenient: per sampled completion, correctness under the lenient parser; None where the task has no parser.
        per_problem: completions sampled for each problem.
        seconds: how long it took.
    """

    measures: dict[str, float] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    lenient: list[float] | None = None
    per_problem: int = 1
    seconds: float = 0.0

    @property
    def means(self) -> list[float]:
        """Mean score of each problem: its completions are no independent measurements."""
        n = self.per_problem
        return [_mean(self.scores[i : i + n]) for i in range(0, len(self.scores), n)]

    def describe(self, label: str) -> list[str]:
        """Lines for people."""
        lines = []
        if self.measures:
            lines.append(f"{label}: " + ", ".join(f"{name} {value:.4f}" for name, value in self.measures.items()))
        if self.scores:
            low, high = mean_interval(self.means)
            line = f"{label}: score {_mean(self.scores):.3f}  (95 % interval {low:.3f} to {high:.3f}, n = "
            line += f"{len(self.means)}{f' x {self.per_problem}' if self.per_problem > 1 else ''})"
            if self.lenient is not None:
                line += f"; lenient parser {_mean(self.lenient):.3f}"
            lines.append(line)
        return lines

    def figures(self, moment: str) -> dict[str, Any]:
        """Numbers for programs, their names ending in ``moment``."""
        figures: dict[str, Any] = {
            f"{name.replace(' ', '_')}_{moment}": round(value, 4) for name, value in self.measures.items()
        }
        if self.scores:
            figures[f"held_out_{moment}"] = round(_mean(self.scores), 4)
            figures[f"held_out_{moment}_interval"] = [round(x, 4) for x in mean_interval(self.means)]
        if self.lenient is not None:
            figures[f"lenient_{moment}"] = round(_mean(self.lenient), 4)
        return figures


def measure(trainer: StrategyTrainer, task: Task) -> HeldOut:
    """Evaluate the held-out rows; sample the task's problems with the evaluation settings and score them."""
    started = time.perf_counter()
    result = HeldOut()
    sampler = trainer
    if trainer.rollouts is None:
        metrics = trainer.evaluate()
        result.measures = {label: metrics[name] for name, label in MEASURES.items() if name in metrics}
        if task.problems is not None:
            sampler = _sampler(trainer, task)
    if sampler.rollouts is not None:
        sampler.evaluate()
        n = sampler.args.resolved_num_generations_eval
        rows: list[dict[str, Any]] = gather_object(sampler.last_eval_table)[: len(sampler.eval_dataset) * n]
        result.rows, result.scores, result.per_problem = rows, [row["reward"] for row in rows], n
        if rows and "entry" in rows[0]:
            # A verifiable task is measured by exact correctness, whatever rewards it is trained with.
            result.scores = [_correct(row, strict_answer) for row in rows]
            result.lenient = [_correct(row, lenient_answer) for row in rows]
    result.seconds = time.perf_counter() - started
    return result


def _sampler(trainer: StrategyTrainer, task: Task) -> GRPOTrainer:
    """An online trainer on the same model that is only evaluated: greedy answers to the task's problems."""
    args = GRPOConfig(
        output_dir=trainer.args.output_dir,
        num_generations_eval=1,
        temperature_eval=0.0,
        max_completion_length=SAMPLED_TOKENS,
        per_device_eval_batch_size=64,
        disable_dropout=False,  # the model goes on training, with what dropout it has
        bf16=trainer.args.bf16,
        fp16=trainer.args.fp16,
        use_cpu=trainer.args.use_cpu,
        seed=trainer.args.seed,
        report_to=[],
    )
    return GRPOTrainer(
        trainer.accelerator.unwrap_model(trainer.model),
        task.rewards,
        args,
        eval_dataset=task.problems,
        processing_class=trainer.processing_class,
    )


def _correct(row: dict[str, Any], parse: Callable[[str], str | None]) -> float:
    return float(score_answer(row["task"], parse(row["completion"]), row["entry"]) == 1.0)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


@contextmanager
def held_out_report(trainer: StrategyTrainer, task: Task, examples: int = 6) -> Iterator[dict[str, Any]]:
    """Measure before and after what happens inside, and print the comparison.

    Args:
        trainer: any trainer; its evaluation rows are the task's.
        task: what it trains on.
        examples: completions shown side by side.

    Yields:
        A dict that holds the figures once the context is left.
    """
    result: dict[str, Any] = {}
    if task.heldout is None:
        yield result
        return
    console = Console(soft_wrap=True)
    chief = trainer.is_world_process_zero()
    if chief:
        rows = "streamed" if isinstance(task.train, IterableDataset) else str(len(task.train))
        console.print(f"Task: {task.name}; {rows} training and {len(task.heldout)} held-out rows.")
        console.print("Measuring the held-out rows before training ...")
    before = measure(trainer, task)
    if chief:
        console.print(*before.describe("Held-out before"), sep="\n")
    started = time.perf_counter()
    yield result
    seconds = time.perf_counter() - started
    after = measure(trainer, task)
    if not chief:
        return
    if before.rows:
        Console().print(_side_by_side(before, after, examples))
    console.print(*before.describe("Held-out before"), *after.describe("Held-out after "), sep="\n")
    if before.lenient is not None:
        console.print(
            "The score counts exact answers on a last line 'Answer: ...'; the lenient parser also takes the last "
            "number of the text: what it finds beyond the score is arithmetic without the form."
        )
    result |= before.figures("before") | after.figures("after")
    result |= {
        "held_out_rows": len(after.means) or len(task.heldout),
        "optimizer_steps": trainer.state.global_step,
        "training_seconds": round(seconds, 1),
        "evaluation_seconds": round(before.seconds + after.seconds, 1),
    }


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


def mean_interval(scores: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the mean of independent scores: Wilson's for zeros and ones, Student's t for other numbers."""
    if all(score in (0.0, 1.0) for score in scores):
        interval = binomtest(int(sum(scores)), len(scores)).proportion_ci(confidence_level=0.95, method="wilson")
        return interval.low, interval.high
    # A single number says nothing about its own error.
    mean, error = float(np.mean(scores)), float(sem(scores)) if len(scores) > 1 else 0.0
    low, high = t.interval(0.95, len(scores) - 1, loc=mean, scale=error) if error else (mean, mean)
    return float(low), float(high)
