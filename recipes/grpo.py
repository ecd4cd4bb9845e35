"""Online GRPO with LoRA.

    accelerate launch recipes/grpo.py        # embedded model and task, options in recipes/configs/grpo.yaml
    accelerate launch recipes/grpo.py --config my.yaml --learning_rate 1e-5
    accelerate launch recipes/grpo.py --model_name_or_path Qwen/Qwen3-0.6B --dataset_name reasoning_gym:gcd
    accelerate launch recipes/grpo.py --dataset_name me/prompts --reward_funcs my_rewards.accuracy --push_to_hub

The loss is in hf_strategies/strategies/grpo.py.
"""

from __future__ import annotations

from pathlib import Path

from hf_strategies import GRPOConfig, GRPOTrainer
from hf_strategies.cli import DataArguments, ModelArguments, StrategyParser
from hf_strategies.recipe import RewardArguments, held_out_report, online_task, policy_name, save_and_say

DEFAULT_CONFIG = Path(__file__).parent / "configs" / "grpo.yaml"


def main() -> None:
    """Train, with the held-out reward measured before and after."""
    parser = StrategyParser(
        (DataArguments, RewardArguments, ModelArguments, GRPOConfig),
        default_config=DEFAULT_CONFIG,
        unless_given=("--dataset_name", "--model_name_or_path"),
        description=__doc__,
    )
    data, rewards, model, args = parser.parse()
    task = online_task(data, rewards, args.seed)
    trainer = GRPOTrainer(
        model=policy_name(model),
        reward_funcs=task.rewards,
        args=args,
        train_dataset=task.train,
        eval_dataset=task.heldout,
        peft_config=model.peft_config(),
    )
    with held_out_report(trainer, task) as result:
        trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    save_and_say(trainer, task, result)


if __name__ == "__main__":
    main()
