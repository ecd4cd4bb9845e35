"""How long either side takes to the same mean reward, on sums with ten solved examples in the prompt.

python -m benchmarks.time_to_reward  # the sides that have no result yet, then the comparison

A side runs until the mean reward of two steps in a row is at least `THRESHOLD` (of at most 1.3).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from benchmarks.run import RESULTS, SIDES
from benchmarks.worker import THREADS
from hf_strategies.data.demo import CONTEXT, demo_task, divided_numbers

STEPS = 14
THRESHOLD = 0.8
EXAMPLES = 10
ARGUMENTS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 8,
    "num_generations": 8,
    "max_completion_length": 20,
    "temperature": 1.0,
    "beta": 0.0,
    "learning_rate": 3e-4,
    "lr_scheduler_type": "linear",
    "warmup_steps": 2,
    "max_steps": STEPS,
    "logging_steps": 1,
    "bf16": False,
    "gradient_checkpointing": False,
    "use_cpu": True,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "seed": 42,
    "reward_weights": [1.0, 0.3],
}


class Curve(TrainerCallback):
    """Wall-clock seconds and mean reward after every optimizer step."""

    def __init__(self) -> None:
        self.points: list[tuple[float, float]] = []
        self._started = 0.0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self._started = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Keep what was logged; stop where the threshold is reached."""
        if "reward" in logs:
            self.points.append((time.perf_counter() - self._started, logs["reward"]))
            print(f"{self.points[-1][0]:.1f} s: {self.points[-1][1]:.3f}", flush=True)
            control.should_training_stop = reached(self.points) is not None


def prompts() -> Dataset:
    """The demo task's problems, each after ten solved examples."""
    numbers, _ = divided_numbers()
    solved: list[dict[str, str]] = list(CONTEXT[:1])
    for i in range(EXAMPLES):
        a, b = numbers[7 * i], numbers[5 * i + 3]
        solved.append({"role": "user", "content": f"{a} + {b}"})
        solved.append({"role": "assistant", "content": f"{a} + {b} = {a + b}\nAnswer: {a + b}"})
    task = demo_task(42)
    rows = [{**row, "prompt": [*solved, row["prompt"][-1]]} for row in task.train]
    return Dataset.from_list(rows)


def run(side: str) -> dict[str, Any]:
    """Train one side."""
    from hf_strategies.modeling.embedded import embedded_model_path

    torch.set_num_threads(THREADS)
    path = str(embedded_model_path())
    tokenizer = AutoTokenizer.from_pretrained(path)
    dataset, curve = prompts(), Curve()
    text: Any = tokenizer.apply_chat_template(dataset[0]["prompt"], tokenize=False, add_generation_prompt=True)
    length = len(tokenizer(text, add_special_tokens=False)["input_ids"])
    if side == "trl":
        from trl import GRPOConfig, GRPOTrainer
    else:
        from hf_strategies import GRPOConfig, GRPOTrainer  # type: ignore[assignment]
    rewards: Any = demo_task(42, train_problems=1).rewards
    for reward in rewards:
        reward.__name__ = getattr(reward, "__name__", None) or reward.name
    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        reward_funcs=rewards,
        args=GRPOConfig(output_dir=tempfile.mkdtemp(), **ARGUMENTS),
        train_dataset=dataset,
        processing_class=tokenizer,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
        callbacks=[curve],
    )
    trainer.train()
    return {"side": side, "prompt_tokens": length, "points": curve.points}


def reached(points: Sequence[Sequence[float]]) -> float | None:
    """Seconds until the mean reward of two steps in a row is at least the threshold."""
    for (_, before), (seconds, reward) in pairwise(points):
        if (before + reward) / 2 >= THRESHOLD:
            return seconds
    return None


def main() -> None:
    """Run the sides that have no result yet, each in a process of its own, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", choices=SIDES, help="Run this side here and print its result.")
    options = parser.parse_args()
    if options.side:
        print("RESULT " + json.dumps(run(options.side)))
        return
    folder = RESULTS / "time-to-reward"
    folder.mkdir(parents=True, exist_ok=True)
    times: dict[str, float | None] = {}
    for side in reversed(SIDES):
        path = folder / f"{side}.json"
        if not path.exists():
            command = [sys.executable, "-m", "benchmarks.time_to_reward", "--side", side]
            log = path.with_suffix(".log")
            with log.open("w") as output:
                subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False)
            line = next(line for line in log.read_text().splitlines() if line.startswith("RESULT "))
            path.write_text(line.removeprefix("RESULT "))
        result = json.loads(path.read_text())
        times[side] = reached(result["points"])
        rewards = ", ".join(f"{reward:.2f}" for _, reward in result["points"])
        print(
            f"{side}: {result['prompt_tokens']} prompt tokens; {times[side]} s to a mean reward of "
            f"{THRESHOLD}; {result['points'][-1][0]:.0f} s in all; rewards {rewards}"
        )
    trl, ours = times["trl"], times["ours"]
    if trl is not None and ours is not None:
        print(f"ratio: {trl / ours:.1f}x")


if __name__ == "__main__":
    main()
