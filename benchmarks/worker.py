"""One run of one side in a process of its own; prints its figures as a line of JSON.

python -m benchmarks.worker ours '{"name": ...}'
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from benchmarks.cases import Case
from benchmarks.data import Texts, lengths, rewards_of

# The first step warms up; the others are measured.
STEPS = 2
THREADS = 2


def peak_memory() -> float:
    """Most memory the process ever held, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def memory() -> float:
    """Memory the process holds now, in GB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e9


class Clock(TrainerCallback):
    """Seconds from the end of one optimizer step to the end of the next, and of what is measured within."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.inside: list[float] = []
        self._sum = 0.0
        self._last = 0.0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Start."""
        self._last, self._sum = time.perf_counter(), 0.0

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """One step is done."""
        now = time.perf_counter()
        self.steps.append(now - self._last)
        self.inside.append(self._sum)
        self._last, self._sum = now, 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its time counted as inside."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._sum += time.perf_counter() - started

        return timed


def shared_arguments(case: Case) -> dict[str, Any]:
    """What both sides are configured with."""
    online = case.kind in ("grpo", "rollout")
    return {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": case.group if online else 1 if case.kind == "dpo" else case.prompts,
        "gradient_accumulation_steps": 1 if case.kind == "sft" else case.prompts,
        "max_steps": STEPS,
        "logging_steps": 1,
        "learning_rate": 1e-5,
        "lr_scheduler_type": "constant",
        "gradient_checkpointing": case.checkpointing,
        "bf16": False,
        "use_cpu": True,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": 3,
    }


def grpo_arguments(case: Case) -> dict[str, Any]:
    """The same for online GRPO."""
    return {
        "num_generations": case.group,
        "max_completion_length": case.completion,
        "beta": case.beta,
        "temperature": 1.0,
    }


class Replay:
    """Completions of given lengths in place of sampling, as an engine of ours or a ``rollout_func`` of TRL.

    Args:
        case: gives the lengths.
        tokenizer: for the prompts of TRL, which are texts.
    """

    def __init__(self, case: Case, tokenizer: Any) -> None:
        self.case = case
        self.tokenizer = tokenizer
        self.version = 0

    def ids(self, prompts: int) -> list[list[list[int]]]:
        """Token ids of every prompt's completions."""
        sizes = lengths(self.case, prompts * self.case.group)
        return [
            [
                [3000 + (7 * g + 13 * j + 5 * t) % 9000 for t in range(sizes[g * self.case.group + j])]
                for j in range(self.case.group)
            ]
            for g in range(prompts)
        ]

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        """For TRL: one entry per completion."""
        completions = [ids for group in self.ids(len(prompts) // self.case.group) for ids in group]
        return {
            "prompt_ids": [self.tokenizer(prompt)["input_ids"] for prompt in prompts],
            "completion_ids": completions,
            "logprobs": [[-1.0] * len(ids) for ids in completions],
        }

    def generate(self, prompt_ids: Any, n: int, sampling: Any, noise_keys: Any) -> Any:
        """For us: one group per prompt."""
        from hf_strategies.modeling.sampling import Completion
        from hf_strategies.rollout.engine import RolloutGroup

        return [
            RolloutGroup(list(prompt), [Completion(ids, [-1.0] * len(ids), "stop") for ids in group], self.version)
            for prompt, group in zip(prompt_ids, self.ids(len(prompt_ids)), strict=True)
        ]

    def sync_weights(self, model: Any, version: int) -> None:
        """The version is all there is to know."""
        self.version = version


def run(side: str, case: Case, model_path: str) -> dict[str, Any]:
    """Measure one side."""
    torch.set_num_threads(THREADS)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    clock = Clock()
    loaded_gb = memory()
    trainer = TRAINERS[case.kind](Parts(side, case, model, tokenizer, Texts(tokenizer), clock))
    trainer.train()
    step, inside = min(clock.steps[1:]), min(clock.inside[1:])
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    log, tokens = logs[-1], [entry.get("num_tokens", 0) for entry in logs]
    return {
        "side": side,
        "case": case.name,
        "step": step,
        "generation": inside,
        "train": step - inside,
        "peak_gb": peak_memory(),
        "above_model_gb": peak_memory() - loaded_gb,
        "tokens_per_second": (tokens[-1] - tokens[-2]) / clock.steps[-1],
        "loss": log["loss"],
        "mean_length": log.get("completions/mean_length"),
        "sharing_factor": log.get("stream/sharing_factor"),
        "threads": torch.get_num_threads(),
    }


@dataclass
class Parts:
    """What every trainer of either side is made of.

    Attributes:
        side: trl or ours.
        case: what is measured.
        model: the policy, loaded.
        tokenizer: its tokenizer.
        texts: makes texts of exact length.
        clock: measures steps.
    """

    side: str
    case: Case
    model: Any
    tokenizer: Any
    texts: Texts
    clock: Clock

    def trainer(self, name: str, rows: list[dict[str, Any]], arguments: dict[str, Any], **further: Any) -> Any:
        """``<name>Trainer`` with ``<name>Config`` of the side's library."""
        library = importlib.import_module("trl" if self.side == "trl" else "hf_strategies")
        return getattr(library, f"{name}Trainer")(
            model=self.model,
            args=getattr(library, f"{name}Config")(**arguments),
            train_dataset=Dataset.from_list(rows),
            processing_class=self.tokenizer,
            peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
            callbacks=[self.clock],
            **further,
        )


def grpo_trainer(parts: Parts) -> Any:
    """Online GRPO on prompts of exactly the case's length."""
    case, trl = parts.case, parts.side == "trl"
    rows = [{"prompt": parts.texts(case.prompt)} for _ in range(case.prompts * STEPS)]
    replay = Replay(case, parts.tokenizer) if case.ragged < 1.0 else None

    def reward(completions: list[Any], **kwargs: Any) -> list[float]:
        return [r for g in range(len(completions) // case.group) for r in rewards_of(case, g)]

    arguments = shared_arguments(case) | grpo_arguments(case)
    if replay is None:
        fixed = {"min_new_tokens": case.completion}
        arguments |= {"generation_kwargs": fixed} if trl else fixed
    if not trl:
        arguments["rollout_dtype"] = case.rollout_dtype
    trainer = parts.trainer(
        "GRPO", rows, arguments, reward_funcs=reward, **({"rollout_func": replay} if trl and replay else {})
    )
    if trl:
        trainer._generate = parts.clock.around(trainer._generate)
        return trainer
    if replay is not None:
        trainer.rollouts.engine = replay
    trainer.rollouts.engine.generate = parts.clock.around(trainer.rollouts.engine.generate)
    return trainer


def dpo_trainer(parts: Parts) -> Any:
    """DPO on pairs of exactly the case's lengths."""
    case = parts.case
    # The end-of-sequence token that both sides append is the completion's last.
    lengths_of = {"prompt": case.prompt, "chosen": case.completion - 1, "rejected": case.completion - 1}
    rows = [{name: parts.texts(n) for name, n in lengths_of.items()} for _ in range(case.prompts * STEPS)]
    return parts.trainer("DPO", rows, shared_arguments(case) | {"max_length": case.prompt + case.completion})


def sft_trainer(parts: Parts) -> Any:
    """SFT on ragged prompt and completion rows."""
    case = parts.case
    sizes = lengths(case, case.prompts * STEPS)
    rows = [{"prompt": parts.texts(case.prompt), "completion": parts.texts(size)} for size in sizes]
    arguments = shared_arguments(case) | {"max_length": case.prompt + case.completion + 1}
    if parts.side == "trl":
        arguments["packing"] = case.packed
    return parts.trainer("SFT", rows, arguments)


TRAINERS = {"grpo": grpo_trainer, "rollout": grpo_trainer, "dpo": dpo_trainer, "sft": sft_trainer}


def main() -> None:
    """Run the side and case that the command line names."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    from hf_strategies.modeling.embedded import embedded_model_path

    side, fields = sys.argv[1], json.loads(sys.argv[2])
    print("RESULT " + json.dumps(run(side, Case(**fields), str(embedded_model_path()))))


if __name__ == "__main__":
    main()
