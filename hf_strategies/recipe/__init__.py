"""What the recipes share: read options, find the task, measure before and after training, save, say how to go on."""

from hf_strategies.recipe.heldout import held_out_report
from hf_strategies.recipe.run import parse_recipe, train_and_report
from hf_strategies.recipe.tasks import RewardArguments, offline_task, online_task, policy_name

__all__ = [
    "RewardArguments",
    "held_out_report",
    "offline_task",
    "online_task",
    "parse_recipe",
    "policy_name",
    "train_and_report",
]
