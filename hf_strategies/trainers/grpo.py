"""Group-relative policy optimisation: `GRPOTrainer` and `GRPOConfig`. The loss is in `strategies/grpo.py`."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from hf_strategies.options import option
from hf_strategies.strategies.grpo import GRPOOptions
from hf_strategies.trainers.arguments import OnlineArguments
from hf_strategies.trainers.base import StrategyTrainer
from hf_strategies.trainers.reference import ReferenceArguments

logger = logging.getLogger(__name__)


@dataclass
class GRPOConfig(GRPOOptions, ReferenceArguments, OnlineArguments):
    """Config of `GRPOTrainer`."""

    learning_rate: float = option(1e-6, "Initial learning rate; about ten times higher is usual with LoRA.")


class GRPOTrainer(StrategyTrainer):
    """GRPO on sampled completions, or, without ``reward_funcs``, on a dataset of scored groups.

    Args:
        model: see `StrategyTrainer`.
        reward_funcs: rewards; None trains offline on the columns ``prompt``, ``completions``, ``rewards``.
        args: config.
        train_dataset: prompts with reward columns, or scored groups.
        **kwargs: see `StrategyTrainer`.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        **kwargs: Any,
    ) -> None:
        name = "grpo" if reward_funcs is None else "online_grpo"
        args = args if args is not None else GRPOConfig(output_dir="trainer_output")
        super().__init__(model, name, args, train_dataset, reward_funcs=reward_funcs, **kwargs)
        offline = reward_funcs is None and self.train_dataset is not None
        if offline and next(iter(self.train_dataset))["rows"][0]["old_logprobs"] is None:
            logger.warning(
                "the scored groups have no old_logprobs: they count as sampled from the policy as it is now (ratio "
                "1), and nothing bounds how far it moves from what sampled them"
            )
