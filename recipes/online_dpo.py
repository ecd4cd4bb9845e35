"""DPO with LoRA on pairs chosen from sampled completions.

    accelerate launch recipes/online_dpo.py    # embedded model and task, configs/online_dpo.yaml
    accelerate launch recipes/online_dpo.py --config my.yaml --learning_rate 1e-5
    accelerate launch recipes/online_dpo.py --model_name_or_path Qwen/Qwen3-0.6B --dataset_name reasoning_gym:gcd
    accelerate launch recipes/online_dpo.py --dataset_name me/prompts --reward_funcs my_rewards.accuracy

The loss is in hf_strategies/strategies/dpo.py.
"""

from __future__ import annotations

from hf_strategies import OnlineDPOConfig, OnlineDPOTrainer
from hf_strategies.cli import DataArguments, ModelArguments, RewardArguments
from hf_strategies.recipe import online_task, parse_recipe, train_and_report


def main() -> None:
    """Train, with the score of held-out problems measured before and after."""
    data, rewards, model, args = parse_recipe(
        __file__, __doc__, DataArguments, RewardArguments, ModelArguments, OnlineDPOConfig
    )
    task = online_task(data, rewards, args.seed)
    trainer = OnlineDPOTrainer(
        model.policy,
        reward_funcs=task.rewards,
        args=args,
        train_dataset=task.train,
        eval_dataset=task.heldout,
        peft_config=model.peft_config(),
    )
    train_and_report(trainer, task)


if __name__ == "__main__":
    main()
