"""Direct preference optimisation, offline and online. The loss is in `strategies/dpo.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from hf_strategies.options import option
from hf_strategies.strategies.dpo import DPOOptions
from hf_strategies.trainers.arguments import OnlineArguments, StrategyArguments
from hf_strategies.trainers.base import StrategyTrainer
from hf_strategies.trainers.reference import ReferenceArguments


@dataclass
class DPOConfig(DPOOptions, ReferenceArguments, StrategyArguments):
    """Config of `DPOTrainer`."""

    learning_rate: float = option(1e-6, "Initial learning rate; about ten times higher is usual with LoRA.")


@dataclass
class OnlineDPOConfig(DPOOptions, ReferenceArguments, OnlineArguments):
    """Config of `OnlineDPOTrainer`; batches count completions."""

    aliases: ClassVar[dict[str, str]] = {"max_new_tokens": "max_completion_length"}
    learning_rate: float = option(5e-7, "Initial learning rate; about ten times higher is usual with LoRA.")
    num_generations: int = option(2, "Completions per prompt (G); pair_selection makes pairs of them.")
    max_new_tokens: int | None = option(None, "Another name of max_completion_length.")


class DPOTrainer(StrategyTrainer):
    """DPO on given pairs.

    Args:
        model: see `StrategyTrainer`.
        ref_model: explicit reference; by default the weights the run starts from.
        args: config.
        train_dataset: columns ``prompt``, ``chosen``, ``rejected``; without ``prompt`` it is what both begin with.
        **kwargs: see `StrategyTrainer`.
    """

    def __init__(
        self,
        model: Any,
        ref_model: Any = None,
        args: DPOConfig | None = None,
        train_dataset: Any = None,
        **kwargs: Any,
    ) -> None:
        args = args if args is not None else DPOConfig(output_dir="trainer_output")
        super().__init__(model, "dpo", args, train_dataset, ref_model=ref_model, **kwargs)


class OnlineDPOTrainer(StrategyTrainer):
    """DPO on pairs chosen by reward from sampled completions.

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
        args: OnlineDPOConfig | None = None,
        train_dataset: Any = None,
        **kwargs: Any,
    ) -> None:
        args = args if args is not None else OnlineDPOConfig(output_dir="trainer_output")
        super().__init__(
            model,
            "online_dpo",
            args,
            train_dataset,
            ref_model=ref_model,
            reward_funcs=reward_funcs,
            **kwargs,
        )
