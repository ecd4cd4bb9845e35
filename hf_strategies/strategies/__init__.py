"""Training objectives: one file, one method."""

from hf_strategies.strategies.base import Strategy
from hf_strategies.strategies.dpo import DPO, DPOOptions
from hf_strategies.strategies.grpo import GRPO, GRPOOptions
from hf_strategies.strategies.ppo import PPO, PPOOptions
from hf_strategies.strategies.registry import (
    STRATEGIES,
    get_entry,
    make_strategy,
    register_strategy,
)
from hf_strategies.strategies.seq import Seq, SeqOptions
from hf_strategies.strategies.sft import SFT, SFTOptions

__all__ = [
    "DPO",
    "GRPO",
    "PPO",
    "SFT",
    "STRATEGIES",
    "DPOOptions",
    "GRPOOptions",
    "PPOOptions",
    "SFTOptions",
    "Seq",
    "SeqOptions",
    "Strategy",
    "get_entry",
    "make_strategy",
    "register_strategy",
]
