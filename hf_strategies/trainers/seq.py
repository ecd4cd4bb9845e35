"""Continued pretraining: `SeqTrainer` and `SeqConfig`. The loss is in `strategies/seq.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hf_strategies.options import option
from hf_strategies.strategies.seq import SeqOptions
from hf_strategies.trainers.arguments import TextArguments
from hf_strategies.trainers.base import StrategyTrainer


@dataclass
class SeqConfig(SeqOptions, TextArguments):
    """Config of `SeqTrainer`; ``max_length`` is the number of tokens a packed row is filled up to."""

    learning_rate: float = option(2e-5, "Initial learning rate.")


class SeqTrainer(StrategyTrainer):
    """Trains on every token of documents, packed into rows of up to ``max_length`` tokens.

    Args:
        model: see `StrategyTrainer`.
        args: config.
        train_dataset: a column ``text``, ``messages`` or ``input_ids``.
        **kwargs: see `StrategyTrainer`.
    """

    def __init__(
        self,
        model: Any,
        args: SeqConfig | None = None,
        train_dataset: Any = None,
        **kwargs: Any,
    ) -> None:
        args = args if args is not None else SeqConfig(output_dir="trainer_output")
        super().__init__(model, "seq", args, train_dataset, **kwargs)
