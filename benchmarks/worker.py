"""One run of one side in a process of its own; prints its figures as a line of JSON.

python -m benchmarks.worker ours '{"name": ...}'
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
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
            RolloutGroup(list(prompt), [Completion(ids, [-1.0] * len(ids), "stop") for ids in group])
            for prompt, group in zip(prompt_ids, self.ids(len(prompt_ids)), strict=True)
        ]

    def sync_weights(self, model: Any, version: int) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""


def run(side: str, case: Case, model_path: str) -> dict[str, Any]:
    """Measure one side."""
    from peft import LoraConfig

    torch.set_num_threads(THREADS)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    texts, clock = Texts(tokenizer), Clock()
    loaded_gb = memory()
    make = {"grpo": grpo_trainer, "rollout": grpo_trainer, "dpo": dpo_trainer, "sft": sft_trainer}[case.kind]
    trainer = make(side, case, model, tokenizer, lora, texts, clock)
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


def grpo_trainer(side: str, case: Case, model: Any, tokenizer: Any, lora: Any, texts: Texts, clock: Clock) -> Any:
    """A GRPO trainer of either side on prompts of exactly the case's length."""
    rows = [{"prompt": texts(case.prompt)} for _ in range(case.prompts * STEPS)]
    replay = Replay(case, tokenizer) if case.ragged < 1.0 else None

    def reward(completions: list[Any], **kwargs: Any) -> Any:
        return [r for g in range(len(completions) // case.group) for r in rewards_of(case, g)]

    arguments = shared_arguments(case) | grpo_arguments(case)
    if side == "trl":
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer

        if replay is None:
            arguments["generation_kwargs"] = {"min_new_tokens": case.completion}
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=GRPOConfig(**arguments),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            peft_config=lora,
            callbacks=[clock],
            rollout_func=replay,
        )
        trainer._generate = clock.around(trainer._generate)  # type: ignore[method-assign]
        return trainer
    from hf_strategies import GRPOConfig as OurConfig
    from hf_strategies import GRPOTrainer as OurTrainer

    if replay is None:
        arguments["min_new_tokens"] = case.completion
    ours = OurTrainer(
        model,
        reward,
        OurConfig(**arguments),
        rows,
        processing_class=tokenizer,
        peft_config=lora,
        callbacks=[clock],
    )
    assert ours.rollouts is not None
    if replay is not None:
        ours.rollouts.engine = replay
    ours.rollouts.engine.generate = clock.around(ours.rollouts.engine.generate)  # type: ignore[method-assign]
    return ours


def dpo_trainer(side: str, case: Case, model: Any, tokenizer: Any, lora: Any, texts: Texts, clock: Clock) -> Any:
    """A DPO trainer of either side."""
    rows = [
        # The end-of-sequence token that both sides append is the completion's last.
        {
            "prompt": texts(case.prompt),
            "chosen": texts(case.completion - 1),
            "rejected": texts(case.completion - 1),
        }
        for _ in range(case.prompts * STEPS)
    ]
    arguments = shared_arguments(case) | {"max_length": case.prompt + case.completion}
    if side == "trl":
        from datasets import Dataset
        from trl import DPOConfig, DPOTrainer

        return DPOTrainer(
            model=model,
            args=DPOConfig(**arguments),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            peft_config=lora,
            callbacks=[clock],
        )
    from hf_strategies import DPOConfig as OurConfig
    from hf_strategies import DPOTrainer as OurTrainer

    return OurTrainer(
        model,
        args=OurConfig(**arguments),
        train_dataset=rows,
        processing_class=tokenizer,
        peft_config=lora,
        callbacks=[clock],
    )


def sft_trainer(side: str, case: Case, model: Any, tokenizer: Any, lora: Any, texts: Texts, clock: Clock) -> Any:
    """An SFT trainer of either side on ragged prompt and completion rows."""
    sizes = lengths(case, case.prompts * STEPS)
    rows = [{"prompt": texts(case.prompt), "completion": texts(size)} for size in sizes]
    arguments = shared_arguments(case) | {"max_length": case.prompt + case.completion + 1}
    if side == "trl":
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        return SFTTrainer(
            model=model,
            args=SFTConfig(**arguments, packing=case.packed),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            peft_config=lora,
            callbacks=[clock],
        )
    from hf_strategies import SFTConfig as OurConfig
    from hf_strategies import SFTTrainer as OurTrainer

    return OurTrainer(
        model,
        args=OurConfig(**arguments),
        train_dataset=rows,
        processing_class=tokenizer,
        peft_config=lora,
        callbacks=[clock],
    )


def main() -> None:
    """Run the side and case that the command line names."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    from hf_strategies.modeling.embedded import embedded_model_path

    side, fields = sys.argv[1], json.loads(sys.argv[2])
    print("RESULT " + json.dumps(run(side, Case(**fields), str(embedded_model_path()))))


if __name__ == "__main__":
    main()
