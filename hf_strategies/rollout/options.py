"""Options of online strategies: how completions are sampled, scored and reused."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from hf_strategies.modeling.sampling import Sampling
from hf_strategies.options import Options, option
from hf_strategies.rollout.hf_engine import ENGINES


@dataclass
class RolloutOptions(Options):
    """Sampling, reuse and rewards; names and defaults are TRL's."""

    num_generations: int = option(8, "Completions per prompt (G).")
    num_generations_eval: int | None = option(None, "Completions per prompt in evaluation; unset: num_generations.")
    max_completion_length: int = option(512, "Most tokens of a completion, >= 1.")
    min_new_tokens: int = option(0, "No end-of-sequence token before this many tokens.")
    temperature: float = option(
        1.0,
        "Sampling temperature, > 0; log-probabilities are of logits / temperature too.",
    )
    temperature_eval: float | None = option(None, "Temperature in evaluation; 0: greedy; unset: temperature.")
    top_p: float = option(1.0, "Nucleus sampling: mass that is kept, in (0, 1]; 1 keeps all.")
    top_k: int = option(0, "Tokens that are kept; 0 keeps all.")
    min_p: float | None = option(None, "Least probability relative to the likeliest token, in [0, 1].")
    repetition_penalty: float = option(1.0, "Above 1, tokens that occurred are less likely; 1 is off.")
    steps_per_generation: int | None = option(
        None, "Micro-steps served by one rollout; unset: gradient_accumulation_steps."
    )
    num_iterations: int = option(1, "Times each rollout is trained on (mu in GRPO, epochs in PPO).")
    max_policy_lag: int | None = option(
        None,
        "Most optimizer steps between sampling and use; unset: what the reuse settings need.",
    )
    reward_weights: list[float] | None = option(None, "One weight per reward; unset: all 1.")
    missing_eos_penalty: float | None = option(
        None, "Subtracted from the reward of a completion that is cut off at its length limit, > 0; unset: nothing."
    )
    rollout_engine: str = option(
        "auto",
        "What samples: stream (every prompt computed once), generate (model.generate), auto (stream where the model "
        "allows it).",
    )
    rollout_batch_size: int = option(64, "Most completions sampled in one generate call; groups stay together.")
    stop_strings: list[str] | None = option(None, "Texts that end a completion; they stay part of it.")
    rollout_dtype: str | None = option(
        None, "Precision of the weights while sampling: float32, bfloat16, float16; unset: the policy's own."
    )
    log_completions: bool = option(False, "Print sample completions when metrics are logged.")
    num_completions_to_print: int | None = option(None, "Completions to print; unset: all of the last rollout.")

    def validate(self) -> None:  # noqa: D102 - see Options
        super().validate()
        self.require_integer("num_generations", 1)
        for name in (
            "num_generations_eval",
            "steps_per_generation",
            "num_completions_to_print",
        ):
            if getattr(self, name) is not None:
                self.require_integer(name, 1)
        for name in ("max_completion_length", "num_iterations", "rollout_batch_size"):
            self.require_integer(name, 1)
        for name in ("top_k", "min_new_tokens"):
            self.require_integer(name, 0)
        if self.max_policy_lag is not None:
            self.require_integer("max_policy_lag", 0)
        if self.min_new_tokens > self.max_completion_length:
            raise ValueError(
                f"min_new_tokens={self.min_new_tokens}: allowed is at most "
                f"max_completion_length={self.max_completion_length}"
            )
        self.require_number("temperature", above=0.0)
        self.require_number("top_p", 0.0, 1.0, above=0.0)
        self.require_number("repetition_penalty", above=0.0)
        if self.temperature_eval is not None:
            self.require_number("temperature_eval", 0.0)
        if self.min_p is not None:
            self.require_number("min_p", 0.0, 1.0)
        if self.stop_strings is not None and not all(self.stop_strings):
            raise ValueError(f"stop_strings={self.stop_strings!r}: allowed are texts that are not empty")
        if self.missing_eos_penalty is not None:
            self.require_number("missing_eos_penalty", above=0.0)
        self.require_one_of("rollout_dtype", (None, "float32", "bfloat16", "float16"))
        self.require_one_of("rollout_engine", tuple(ENGINES))

    @property
    def resolved_num_generations_eval(self) -> int:
        """Completions per prompt in evaluation."""
        return self.num_generations_eval or self.num_generations

    @property
    def sampling_dtype(self) -> torch.dtype | None:
        """Precision of the weights while sampling; None: the policy's own."""
        return None if self.rollout_dtype is None else getattr(torch, self.rollout_dtype)

    def sampling(self) -> Sampling:
        """How training rollouts are drawn."""
        return Sampling(
            max_new_tokens=self.max_completion_length,
            min_new_tokens=self.min_new_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty,
            stop_strings=tuple(self.stop_strings or ()),
        )

    def eval_sampling(self) -> Sampling:
        """How evaluation rollouts are drawn."""
        temperature = self.temperature if self.temperature_eval is None else self.temperature_eval
        if temperature == 0.0:
            return replace(self.sampling(), temperature=1.0, greedy=True)
        return replace(self.sampling(), temperature=temperature)
