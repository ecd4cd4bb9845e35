"""What the recipes share: read options, find the task, measure before and after training, save, say how to go on."""

from hf_strategies.recipe.heldout import held_out_report
from hf_strategies.recipe.run import parse_recipe, train_and_report
from hf_strategies.recipe.tasks import offline_task, online_task

__all__ = [
    "held_out_report",
    "offline_task",
    "online_task",
    "parse_recipe",
    "train_and_report",
]
