"""Trainers and their configs."""

from hf_strategies.trainers.arguments import (
    OnlineArguments,
    StrategyArguments,
    config_class,
)
from hf_strategies.trainers.base import StrategyTrainer
from hf_strategies.trainers.dpo import (
    DPOConfig,
    DPOTrainer,
    OnlineDPOConfig,
    OnlineDPOTrainer,
)
from hf_strategies.trainers.grpo import GRPOConfig, GRPOTrainer
from hf_strategies.trainers.ppo import PPOConfig, PPOTrainer
from hf_strategies.trainers.seq import SeqConfig, SeqTrainer
from hf_strategies.trainers.sft import SFTConfig, SFTTrainer

__all__ = [
    "DPOConfig",
    "DPOTrainer",
    "GRPOConfig",
    "GRPOTrainer",
    "OnlineArguments",
    "OnlineDPOConfig",
    "OnlineDPOTrainer",
    "PPOConfig",
    "PPOTrainer",
    "SFTConfig",
    "SFTTrainer",
    "SeqConfig",
    "SeqTrainer",
    "StrategyArguments",
    "StrategyTrainer",
    "config_class",
]
