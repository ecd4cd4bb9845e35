"""Post-training of Hugging Face causal LMs as a plugin for `transformers.Trainer`."""

from hf_strategies.batch import Batch, Row
from hf_strategies.policy_output import PolicyOutput
from hf_strategies.rollout.callback import RolloutCallback
from hf_strategies.strategies import Strategy, make_strategy, register_strategy
from hf_strategies.trainers import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    OnlineDPOConfig,
    OnlineDPOTrainer,
    PPOConfig,
    PPOTrainer,
    SeqConfig,
    SeqTrainer,
    SFTConfig,
    SFTTrainer,
    StrategyTrainer,
    config_class,
)

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "DPOConfig",
    "DPOTrainer",
    "GRPOConfig",
    "GRPOTrainer",
    "OnlineDPOConfig",
    "OnlineDPOTrainer",
    "PPOConfig",
    "PPOTrainer",
    "PolicyOutput",
    "RolloutCallback",
    "Row",
    "SFTConfig",
    "SFTTrainer",
    "SeqConfig",
    "SeqTrainer",
    "Strategy",
    "StrategyTrainer",
    "config_class",
    "make_strategy",
    "register_strategy",
]
