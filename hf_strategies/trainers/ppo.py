"""Proximal policy optimisation: `PPOTrainer` and `PPOConfig`. The loss is in `strategies/ppo.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hf_strategies.options import option
from hf_strategies.strategies.ppo import PPOOptions
from hf_strategies.trainers.arguments import OnlineArguments
from hf_strategies.trainers.base import StrategyTrainer
from hf_strategies.trainers.reference import ReferenceArguments


@dataclass
class PPOConfig(PPOOptions, ReferenceArguments, OnlineArguments):
    """Config of `PPOTrainer`; ``num_iterations`` are the PPO epochs over a rollout."""

    learning_rate: float = option(3e-6, "Initial learning rate; about ten times higher is usual with LoRA.")
    num_generations: int = option(1, "Completions per prompt; the critic is the baseline, 1 is fine.")
    num_iterations: int = option(4, "PPO epochs: times each rollout is trained on.")


class PPOTrainer(StrategyTrainer):
    """PPO with a value head on the policy's own trunk.

    Args:
        model: see `StrategyTrainer`.
        ref_model: explicit reference; by default the weights the run starts from.
        reward_funcs: rewards.
        args: config.
        train_dataset: prompts with reward columns.
        **kwargs: see `StrategyTrainer`.
    """

    def __init__(
        self,
        model: Any,
        ref_model: Any = None,
        reward_funcs: Any = None,
        args: PPOConfig | None = None,
        train_dataset: Any = None,
        **kwargs: Any,
    ) -> None:
        args = args if args is not None else PPOConfig(output_dir="trainer_output")
        super().__init__(
            model,
            "online_ppo",
            args,
            train_dataset,
            ref_model=ref_model,
            reward_funcs=reward_funcs,
            **kwargs,
        )
