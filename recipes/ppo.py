"""PPO with a learned critic and LoRA.

    accelerate launch recipes/ppo.py    # embedded model and task, options in recipes/configs/ppo.yaml
    accelerate launch recipes/ppo.py --config my.yaml --learning_rate 1e-5
    accelerate launch recipes/ppo.py --model_name_or_path Qwen/Qwen3-0.6B --dataset_name reasoning_gym:gcd
    accelerate launch recipes/ppo.py --dataset_name me/prompts --reward_funcs my_rewards.accuracy --push_to_hub

The loss is in hf_strategies/strategies/ppo.py.
"""

from __future__ import annotations

from hf_strategies import PPOConfig, PPOTrainer
from hf_strategies.cli import DataArguments, ModelArguments, RewardArguments
from hf_strategies.recipe import online_task, parse_recipe, train_and_report


def main() -> None:
    """Train, with the score of held-out problems measured before and after."""
    data, rewards, model, args = parse_recipe(
        __file__, __doc__, DataArguments, RewardArguments, ModelArguments, PPOConfig
    )
    task = online_task(data, rewards, args.seed)
    trainer = PPOTrainer(
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
