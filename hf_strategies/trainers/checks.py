"""What would end a run later, found before anything is loaded."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from huggingface_hub import get_token
from peft import PeftModel
from transformers import PreTrainedModel

from hf_strategies.modeling.policy import check_sizes
from hf_strategies.trainers.arguments import StrategyArguments
from hf_strategies.trainers.checkpoints import check_checkpoint, named_checkpoint

logger = logging.getLogger(__name__)


def check_rewards(strategy: str, reward_funcs: Any, online: bool) -> None:
    """Raise unless rewards are given where a strategy makes rollouts, and only there."""
    if online and reward_funcs is None:
        raise ValueError(f"strategy {strategy!r} scores its own completions: reward_funcs is needed")
    if not online and reward_funcs is not None:
        raise ValueError(f"strategy {strategy!r} trains on given rows and makes no rollouts: leave reward_funcs out")


def check_reference(strategy: str, ref_model: Any, model: Any, needed: bool) -> None:
    """Raise unless an explicit reference is a model beside the policy; warn where a strategy needs none."""
    if ref_model is model:
        raise ValueError("ref_model is the policy itself: it would change with every update; leave it unset")
    if not needed:
        logger.warning("ref_model is not used: %s compares with no reference under these options", strategy)
    if not isinstance(ref_model, PreTrainedModel | PeftModel):
        raise TypeError(f"ref_model: got {type(ref_model).__name__}, allowed are a PreTrainedModel, PeftModel")


def check_all_sizes(config: Any, tokenizer: Any, ref_model: Any, longest_row: int, largest_id: int) -> None:
    """`check_sizes` for the policy, by its config, and for an explicit reference, if there is one."""
    check_sizes(config, tokenizer, longest_row, largest_id)
    if ref_model is not None:
        try:
            check_sizes(ref_model.config, tokenizer, longest_row, largest_id)
        except ValueError as error:
            raise ValueError(f"ref_model: {error}") from None


def check_noise(strategy: str, args: StrategyArguments, allowed: bool) -> None:
    """Raise where noise on embeddings would make two passes disagree whose log-probabilities are compared."""
    if args.neftune_noise_alpha is not None and not allowed:
        raise ValueError(
            f"neftune_noise_alpha={args.neftune_noise_alpha!r}: allowed is None, strategy {strategy!r} compares "
            "log-probabilities of passes, which noise on the embeddings would move apart"
        )


def check_run(strategy: str, args: StrategyArguments, eval_dataset: Any) -> None:
    """Refuse what would end the run later, after weights are loaded or after training."""
    if eval_dataset is None and (args.eval_strategy != "no" or args.eval_on_start):
        asked = "eval_on_start=True" if args.eval_on_start else "eval_strategy"
        raise ValueError(f"eval_dataset is not given, and {asked} asks for evaluations")
    if args.load_best_model_at_end and args.eval_strategy == "no":
        raise ValueError("load_best_model_at_end=True: which one is best is known from evaluations, set eval_strategy")
    if args.output_dir is not None and Path(args.output_dir).exists() and not Path(args.output_dir).is_dir():
        raise ValueError(f"output_dir={args.output_dir!r}: allowed is a folder, this is a file")
    if args.push_to_hub and not (args.hub_token or get_token()):
        raise ValueError("push_to_hub=True needs a token: run `hf auth login`, or set HF_TOKEN or hub_token")
    checkpoint = named_checkpoint(args.resume_from_checkpoint, args.output_dir)
    if checkpoint is not None:
        engine = args.deepspeed is not None or bool(args.fsdp)
        check_checkpoint(checkpoint, strategy, needs_optimizer=not engine)
