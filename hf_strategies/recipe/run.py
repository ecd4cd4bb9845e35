"""The two ends of a recipe: options from the command line, and a run that is measured, saved and explained."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from peft import PeftModel

from hf_strategies.cli import StrategyParser
from hf_strategies.data.demo import Task
from hf_strategies.recipe.heldout import held_out_report
from hf_strategies.trainers import StrategyTrainer
from hf_strategies.trainers.checkpoints import named_checkpoint


def parse_recipe(script: str, description: str | None, *dataclass_types: type) -> tuple[Any, ...]:
    """Options of a recipe.

    Args:
        script: the recipe's file; the options of ``configs/<its name>.yaml`` beside it hold when the flags name
            neither a model nor a dataset nor a ``--config``.
        description: for ``--help``.
        *dataclass_types: what the flags fill in.

    Returns:
        One instance per type.
    """
    path = Path(script)
    parser = StrategyParser(
        dataclass_types,
        default_config=path.parent / "configs" / f"{path.stem}.yaml",
        unless_given=("--dataset_name", "--datasets", "--model_name_or_path"),
        description=description,
    )
    return parser.parse()


def train_and_report(trainer: StrategyTrainer, task: Task) -> None:
    """Train between two measurements, save the model, push it if asked to, and say what can be done with it.

    The last line printed is the figures as JSON, for programs.
    """
    with held_out_report(trainer, task) as result:
        trainer.train(named_checkpoint(trainer.args.resume_from_checkpoint, trainer.args.output_dir))
    trainer.save_model()
    if trainer.args.push_to_hub:
        trainer.push_to_hub()
    if not trainer.is_world_process_zero():
        return
    folder = trainer.args.output_dir
    if task.context:
        (Path(folder) / "conversation.json").write_text(json.dumps(task.context, indent=1))
    adapter = isinstance(trainer.accelerator.unwrap_model(trainer.model), PeftModel)
    loader = "PeftModel.from_pretrained(base_model, ...)" if adapter else "AutoModelForCausalLM.from_pretrained(...)"
    print(f"Saved in {folder}: load it with {loader}, or talk to it:")
    # Recipes lie beside the chat, wherever they are called from.
    chat = Path(sys.argv[0]).with_name("chat.py")
    print(f"  {sys.executable} {chat if chat.exists() else 'recipes/chat.py'} --model {folder}")
    if result:
        print(json.dumps(result))
