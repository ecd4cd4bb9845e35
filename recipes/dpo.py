"""Direct preference optimisation with LoRA on given pairs.

    accelerate launch recipes/dpo.py    # embedded model and data, options in recipes/configs/dpo.yaml
    accelerate launch recipes/dpo.py --config my.yaml --learning_rate 1e-5
    accelerate launch recipes/dpo.py --model_name_or_path Qwen/Qwen3-0.6B --dataset_name me/pairs --push_to_hub

The loss is in hf_strategies/strategies/dpo.py.
"""

from __future__ import annotations

from hf_strategies import DPOConfig, DPOTrainer
from hf_strategies.cli import DataArguments, ModelArguments
from hf_strategies.data.demo import demo_pairs
from hf_strategies.recipe import offline_task, parse_recipe, train_and_report


def main() -> None:
    """Train, with the ranking of held-out pairs measured before and after."""
    data, model, args = parse_recipe(__file__, __doc__, DataArguments, ModelArguments, DPOConfig)
    task = offline_task(data, args.seed, embedded=demo_pairs)
    trainer = DPOTrainer(
        model.policy,
        args=args,
        train_dataset=task.train,
        eval_dataset=task.heldout,
        peft_config=model.peft_config(),
    )
    train_and_report(trainer, task)


if __name__ == "__main__":
    main()
