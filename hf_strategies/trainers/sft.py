"""Supervised fine-tuning: `SFTTrainer` and `SFTConfig`. The loss is in `strategies/sft.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hf_strategies.options import option
from hf_strategies.strategies.sft import SFTOptions
from hf_strategies.trainers.arguments import TextArguments
from hf_strategies.trainers.base import StrategyTrainer


@dataclass
class SFTConfig(SFTOptions, TextArguments):
    """Config of `SFTTrainer`."""

    learning_rate: float = option(2e-5, "Initial learning rate; about ten times higher is usual with LoRA.")


class SFTTrainer(StrategyTrainer):
    """Trains on messages, prompt and completion (the completion trains), or text.

    Args:
        model: see `StrategyTrainer`.
        args: config.
        train_dataset: see `hf_strategies.data.rows`.
        **kwargs: see `StrategyTrainer`.
    """

    def __init__(
        self,
        model: Any,
        args: SFTConfig | None = None,
        train_dataset: Any = None,
        **kwargs: Any,
    ) -> None:
        args = args if args is not None else SFTConfig(output_dir="trainer_output")
        super().__init__(model, "sft", args, train_dataset, **kwargs)
