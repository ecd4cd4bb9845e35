"""Command line: flags with YAML files, what they describe, and the commands of ``hf-strategies``."""

from hf_strategies.cli.arguments import ModelArguments, RewardArguments
from hf_strategies.cli.parser import StrategyParser
from hf_strategies.data.arguments import DataArguments

__all__ = ["DataArguments", "ModelArguments", "RewardArguments", "StrategyParser"]
