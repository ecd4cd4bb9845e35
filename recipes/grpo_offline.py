"""GRPO with LoRA on scored groups, without rollouts.

    accelerate launch recipes/grpo_offline.py    # embedded model and data, configs/grpo_offline.yaml
    accelerate launch recipes/grpo_offline.py --config my.yaml --learning_rate 1e-5
    accelerate launch recipes/grpo_offline.py --model_name_or_path me/model --dataset_name me/groups --push_to_hub

The loss is in hf_strategies/strategies/grpo.py.
"""

from __future__ import annotations

from hf_strategies import GRPOConfig, GRPOTrainer
from hf_strategies.cli import DataArguments, ModelArguments
from hf_strategies.data.demo import demo_groups
from hf_strategies.recipe import offline_task, parse_recipe, train_and_report


def main() -> None:
    """Train, with the score of held-out problems measured before and after."""
    data, model, args = parse_recipe(__file__, __doc__, DataArguments, ModelArguments, GRPOConfig)
    task = offline_task(data, args.seed, embedded=demo_groups)
    trainer = GRPOTrainer(
        model.policy,
        args=args,
        train_dataset=task.train,
        eval_dataset=task.heldout,
        peft_config=model.peft_config(),
    )
    train_and_report(trainer, task)


if __name__ == "__main__":
    main()
