"""The one trainer: where strategy, rollouts and model meet.

What is done in an optimizer step is in `trainers/steps.py`, in an evaluation in `trainers/evaluation.py`, with
checkpoints in `trainers/checkpoints.py`; here everything is checked, loaded and put together.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from peft import PeftConfig
from torch import nn
from transformers import PreTrainedTokenizerBase, TrainerCallback
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from hf_strategies.data.formats import ENCODED, collate
from hf_strategies.data.streams import EncodedStream
from hf_strategies.modeling.critic import attach_critic
from hf_strategies.modeling.forward import CheckedForward
from hf_strategies.modeling.fused_lora import fuse_adapters
from hf_strategies.modeling.policy import (
    check_peft_config,
    check_sizes,
    disable_dropout,
    load_policy,
    read_config,
)
from hf_strategies.modeling.reference import make_reference
from hf_strategies.modeling.tokenizer import adapt_tokenizer, load_tokenizer
from hf_strategies.modeling.unwrap import causal_lm_of
from hf_strategies.reporting.completions import print_completions
from hf_strategies.reporting.metrics import MetricStore
from hf_strategies.reporting.progress import StrategyProgress
from hf_strategies.rollout.callback import RolloutCallback
from hf_strategies.rollout.hf_engine import ENGINES
from hf_strategies.rollout.options import RolloutOptions
from hf_strategies.rollout.rewards import Rewards
from hf_strategies.strategies import Strategy, get_entry
from hf_strategies.trainers.arguments import (
    OnlineArguments,
    StrategyArguments,
    config_class,
    options_from,
    strategy_options,
)
from hf_strategies.trainers.checkpoints import CheckpointMixin
from hf_strategies.trainers.checks import check_all_sizes, check_noise, check_reference, check_rewards, check_run
from hf_strategies.trainers.datasets import prepare_data
from hf_strategies.trainers.evaluation import EvaluationMixin
from hf_strategies.trainers.micro_batches import check_low_memory
from hf_strategies.trainers.preparation import Preparation
from hf_strategies.trainers.reference import ReferenceArguments, ReferenceMixin
from hf_strategies.trainers.reward_functions import resolve_rewards
from hf_strategies.trainers.sampler import RolloutSampler, prompt_positions
from hf_strategies.trainers.steps import StepMixin

logger = logging.getLogger(__name__)

# What `transformers.Trainer` may be given besides; its other hooks would never be called here.
TRAINER_ARGUMENTS = ("data_collator", "callbacks", "optimizers", "optimizer_cls_and_kwargs")
# And where rows are texts whose tokens are labels.
TEXT_ARGUMENTS = ("compute_metrics", "preprocess_logits_for_metrics", "formatting_func")


class StrategyTrainer(StepMixin, EvaluationMixin, ReferenceMixin, CheckpointMixin):
    """`transformers.Trainer` for any registered strategy.

    Args:
        model: Hub id, path, `PreTrainedModel`, or `PeftModel` whose adapter is trained on.
        strategy: registered name.
        args: config; an instance of `config_class(strategy)` or of one of the public ``*Config`` classes.
        train_dataset: rows in one of the shapes the strategy reads; map-style, a list of dicts, or, of given rows,
            streaming.
        eval_dataset: the same, or a dict of such.
        processing_class: tokenizer; the model's own when left out.
        reward_funcs: rewards of an online strategy: functions, model ids or models, one or several.
        reward_processing_classes: tokenizers of reward models, one per reward (None for functions).
        ref_model: explicit reference; by default the weights the run starts from.
        peft_config: adapter to train instead of the full model.
        **kwargs: handed to `transformers.Trainer`: callbacks, optimizers, data_collator, optimizer_cls_and_kwargs; for
            seq and sft also compute_metrics and preprocess_logits_for_metrics, see `modeling.predictions`, and
            formatting_func, which makes a text, messages, or a row of every row of the datasets.

    Raises:
        TypeError: an argument that does not exist, or that would have no effect.
        ValueError: unknown strategy; an online strategy without rewards or an offline one with them; data that does
            not fit. All of it is checked before a model is loaded.
    """

    # The loss is divided by the exact count of the whole optimizer step; Trainer must not divide it again.
    loss_is_scaled_for_ga = True
    train_dataset: Any
    eval_dataset: Any

    def __init__(
        self,
        model: str | nn.Module,
        strategy: str,
        args: StrategyArguments | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        reward_funcs: Any = None,
        reward_processing_classes: Any = None,
        ref_model: nn.Module | None = None,
        peft_config: PeftConfig | None = None,
        **kwargs: Any,
    ) -> None:
        entry = get_entry(strategy)
        kwargs = {name: value for name, value in kwargs.items() if value is not None}
        known = TRAINER_ARGUMENTS + (TEXT_ARGUMENTS if entry.strategy.labelled else ())
        for name in sorted(kwargs.keys() - set(known)):
            raise TypeError(f"{type(self).__name__}: {name}= is not supported; further ones are {known}")
        args = args if args is not None else config_class(strategy)(output_dir="trainer_output")
        if not isinstance(args, OnlineArguments if entry.online else StrategyArguments):
            raise TypeError(
                f"args of strategy {strategy!r}: got {type(args).__name__}, see config_class({strategy!r})"
            )
        if args.n_gpu > 1:
            logger.warning(
                "one process uses one GPU; start with `accelerate launch` to use all %d",
                args.n_gpu,
            )
            args._n_gpu = 1
        if not torch.accelerator.is_available():
            args.dataloader_pin_memory = False  # nothing to pin it for: torch would only warn
        self.strategy_name = strategy
        self.strategy: Strategy = entry.strategy(strategy_options(args, entry.strategy.Options))
        check_rewards(strategy, reward_funcs, entry.online)
        if ref_model is not None:
            check_reference(strategy, ref_model, model, self.strategy.needs_reference)
        if peft_config is not None:
            check_peft_config(peft_config)
        check_run(strategy, args, eval_dataset)
        check_noise(strategy, args, self.strategy.dropout)
        reference_args = options_from(args, ReferenceArguments)
        reference_args.check_use(strategy, args, self.strategy.needs_reference, entry.online, train_dataset)
        rollout_args = args if isinstance(args, OnlineArguments) and entry.online else None
        if rollout_args is not None:
            rollout_args.check_rollouts(self.strategy.min_group_size)

        # Everything that can be wrong with the data is found before weights are read.
        init_kwargs = args.from_pretrained_kwargs
        config = read_config(model, init_kwargs)
        tokenizer = processing_class or load_tokenizer(model, args.trust_remote_code)
        tokenizer = adapt_tokenizer(tokenizer, args.chat_template_path, args.eos_token, args.pad_token)
        check_sizes(config, tokenizer)
        formatting_func = kwargs.pop("formatting_func", None)
        self._read = partial(
            prepare_data,
            tokenizer=tokenizer,
            strategy=self.strategy,
            args=args,
            rollout_args=rollout_args,
            formatting_func=formatting_func,
        )
        compared = ref_model if self.strategy.needs_reference else None
        self._check_sizes = partial(check_all_sizes, config, tokenizer, compared)
        data = self._read(train_dataset, eval_dataset)
        self._check_sizes(data.longest, data.largest_id)
        if isinstance(data.train, EncodedStream):
            data.train.check = self._check_sizes
            # Every process reads the whole stream and takes its share: batches of rows cannot be sent around.
            args.accelerator_config.dispatch_batches = False  # type: ignore[union-attr]
        self.dropped = data.dropped
        self.lost_tokens = data.lost_tokens
        self.rollouts: RolloutCallback | None = None
        if rollout_args is not None:
            rewards = resolve_rewards(
                reward_funcs, rollout_args.reward_weights, reward_processing_classes, data.columns
            )
            self.rollouts = make_rollouts(rollout_args, tokenizer, rewards)

        policy = load_policy(model, init_kwargs, peft_config)
        if args.attention_path != "padded":
            fuse_adapters(policy)
        if args.low_memory:
            check_low_memory(args, policy)
        if args.disable_dropout if args.disable_dropout is not None else not self.strategy.dropout:
            disable_dropout(policy)
        reference = None
        if self.strategy.needs_reference:
            copied, alpha = not reference_args.precompute_ref_log_probs, reference_args.mixup_alpha
            reference = make_reference(policy, ref_model, copied=copied, mixup_alpha=alpha)
        if self.strategy.needs_critic:
            attach_critic(causal_lm_of(policy))
        temperature = rollout_args.temperature if rollout_args else 1.0
        self.forward_pass = CheckedForward(policy, temperature, args.attention_path)
        self.forward_pass.noise_alpha = args.neftune_noise_alpha
        # Rollouts are larger than the micro-batches that are cut from them.
        rows_per_pass = args.per_device_train_batch_size if self.rollouts else None
        self.prepare = Preparation(self.strategy, self.forward_pass, reference, rows_per_pass)

        self._preprocess_logits = kwargs.pop("preprocess_logits_for_metrics", None)
        default_collator = collate_prompts if self.rollouts else partial(collate, pad_token_id=tokenizer.pad_token_id)
        super().__init__(
            model=policy,
            args=args,
            data_collator=kwargs.pop("data_collator", None) or default_collator,
            train_dataset=data.train,
            eval_dataset=data.eval,
            processing_class=tokenizer,
            **kwargs,
        )
        self.neftune_noise_alpha = None  # Trainer's own hook would take a stream of rows for one long row
        self.metric_store = {"train": MetricStore(), "eval": MetricStore()}
        self.num_tokens = 0
        self._tokens_since_log = 0
        self._last_log = time.perf_counter()
        self._eval_position = 0
        self._train_sampler: RolloutSampler | None = None
        self.last_eval_table: list[dict[str, Any]] = []
        self.prepare.autocast = self.accelerator.autocast
        self.synced_reference = None
        if reference is not None:
            self._set_up_reference(reference, reference_args)
        if self.rollouts:
            self.add_callback(self.rollouts)
        if self.strategy.sums is not None:
            self.add_callback(_StrategySums(self.strategy))
        self.add_callback(_EpochSeed(self))
        if not args.disable_tqdm:
            self.remove_callback(ProgressCallback)
            self.remove_callback(PrinterCallback)
            self.add_callback(StrategyProgress)

    # ---- data ----

    def encoded(self, dataset: Any) -> Any:
        """Evaluation data in token ids, as those that the trainer was made with.

        Args:
            dataset: one dataset; given rows that are encoded already stay as they are.
        """
        if self.rollouts is None and isinstance(dataset, Dataset) and ENCODED in dataset.column_names:
            return dataset
        data = self._read(None, dataset)
        self._check_sizes(data.longest, data.largest_id)
        return data.eval

    def get_train_dataloader(self) -> Any:
        """Loader of training data; for an online strategy, of the prompts of each rollout."""
        if self.rollouts is None:
            return super().get_train_dataloader()
        return self._get_dataloader(
            dataset=self.train_dataset,
            description="Training",
            batch_size=self.args.prompts_per_rollout,
            sampler_fn=self._get_train_sampler,
            is_training=True,
        )

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        if self.rollouts is None:
            return super()._get_train_sampler(train_dataset)
        dataset = self.train_dataset if train_dataset is None else train_dataset
        seed = self.args.data_seed if self.args.data_seed is not None else self.args.seed
        self._train_sampler = RolloutSampler(
            len(dataset),
            self.args.prompts_per_rollout,
            self.args.world_size,
            self.rollouts.buffer.window,
            seed,
            self.args.prompts_per_block,
        )
        return self._train_sampler

    # ---- logging ----

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with what strategy and rollouts collected since the last log."""
        if "loss" in logs:
            now = time.perf_counter()
            logs |= self.metric_store["train"].reduce(gather_object)
            tokens = sum(gather_object([self._tokens_since_log]))
            logs["train/tokens_per_second"] = tokens / (now - self._last_log)
            logs["num_tokens"] = self.num_tokens
            if isinstance(self.train_dataset, EncodedStream):
                logs["tokens_lost"] = self.train_dataset.lost_tokens
                logs |= {f"rows_dropped/{reason}": n for reason, n in sorted(self.train_dataset.dropped.items())}
            if self.rollouts is not None:
                logs["policy_version"] = self.rollouts.version.current
            self._tokens_since_log, self._last_log = 0, now
            if self.rollouts is not None and self.args.log_completions and self.is_world_process_zero():
                print_completions(
                    self.rollouts.last_table,
                    self.rollouts.rewards.names,
                    self.args.num_completions_to_print,
                    self.state.global_step,
                )
        super().log(logs, start_time)


class _StrategySums(TrainerCallback):
    """Adds up, over processes, what a strategy has seen in an optimizer step."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        assert strategy.sums is not None
        self._zeros = torch.zeros_like(strategy.sums, device="cpu")
        strategy.unmerged = self._zeros.clone()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.strategy.sums is not None
        assert self.strategy.unmerged is not None
        self.strategy.sums = torch.stack([self.strategy.sums, *gather_object([self.strategy.unmerged.cpu()])]).sum(0)
        self.strategy.unmerged = self._zeros.clone()


class _EpochSeed(TrainerCallback):
    """Tells the sampler which epoch begins: wrapped loaders do not pass it on in every setting."""

    def __init__(self, trainer: StrategyTrainer) -> None:
        self.trainer = trainer

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set the epoch of the sampler the loader was built with."""
        sampler = self.trainer._train_sampler
        if sampler is not None:
            sampler.set_epoch(int((state.epoch or 0.0) + 1e-6))


def make_rollouts(args: OnlineArguments, tokenizer: PreTrainedTokenizerBase, rewards: Rewards) -> RolloutCallback:
    """What samples and scores in a run, as its config says."""
    return RolloutCallback(
        ENGINES[args.rollout_engine](tokenizer, args.rollout_batch_size, args.sampling_dtype),
        rewards,
        tokenizer,
        options_from(args, RolloutOptions),
        steps_per_generation=args.resolved_steps_per_generation,
        max_policy_lag=args.resolved_max_policy_lag,
        seed=args.seed,
        process_index=args.process_index,
        positions=prompt_positions(
            args.prompts_per_rollout, args.process_index, args.world_size, args.prompts_per_block
        ),
    )


def collate_prompts(examples: list[dict[str, Any]]) -> dict[str, Any]:
    """Prompts stay dataset rows until they are rolled out."""
    return {"examples": examples}
