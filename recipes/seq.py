"""Continued pretraining with LoRA: every token of packed documents trains.

    accelerate launch recipes/seq.py    # embedded model and data, options in recipes/configs/seq.yaml
    accelerate launch recipes/seq.py --config my.yaml --learning_rate 1e-5
    accelerate launch recipes/seq.py --model_name_or_path Qwen/Qwen3-0.6B --dataset_name me/documents --push_to_hub

The loss is in hf_strategies/strategies/seq.py.
"""

from __future__ import annotations

from hf_strategies import SeqConfig, SeqTrainer
from hf_strategies.cli import DataArguments, ModelArguments
from hf_strategies.data.demo import demo_documents
from hf_strategies.recipe import offline_task, parse_recipe, train_and_report


def main() -> None:
    """Train, with the held-out loss measured before and after."""
    data, model, args = parse_recipe(__file__, __doc__, DataArguments, ModelArguments, SeqConfig)
    task = offline_task(data, args.seed, embedded=demo_documents)
    trainer = SeqTrainer(
        model.policy,
        args=args,
        train_dataset=task.train,
        eval_dataset=task.heldout,
        peft_config=model.peft_config(),
    )
    train_and_report(trainer, task)


if __name__ == "__main__":
    main()
