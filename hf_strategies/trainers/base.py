"""The one trainer: where strategy, rollouts and model meet.

Per optimizer step, `get_batch_samples` sees every micro-batch of the step: it rolls out, pins what must not change
(old and reference log-probabilities, values), lets the strategy assign credit, and counts the exact denominator over
micro-batches and processes. `compute_loss` is then one forward pass and one call of the strategy.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from huggingface_hub import get_token
from peft import PeftConfig, PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from hf_strategies.batch import Batch
from hf_strategies.data.formats import collate
from hf_strategies.modeling.critic import attach_critic
from hf_strategies.modeling.forward import CheckedForward, ForwardResult, causal_lm_of
from hf_strategies.modeling.policy import (
    check_peft_config,
    check_sizes,
    disable_dropout,
    ensure_pad_token,
    load_policy,
    load_tokenizer,
    read_config,
)
from hf_strategies.modeling.reference import make_reference
from hf_strategies.reporting.completions import print_completions
from hf_strategies.reporting.metrics import MetricStore
from hf_strategies.reporting.progress import StrategyProgress
from hf_strategies.rollout.callback import Rollout, RolloutCallback
from hf_strategies.rollout.hf_engine import ENGINES
from hf_strategies.rollout.options import RolloutOptions
from hf_strategies.stats import Mean
from hf_strategies.strategies import Strategy, get_entry
from hf_strategies.trainers.arguments import (
    OnlineArguments,
    StrategyArguments,
    config_class,
    options_from,
    strategy_options,
)
from hf_strategies.trainers.checkpoints import CheckpointMixin, check_checkpoint
from hf_strategies.trainers.datasets import check_one_batch, check_one_rollout, prepare_data
from hf_strategies.trainers.micro_batches import check_low_memory, level, pieces_of, without_sync
from hf_strategies.trainers.preparation import Preparation
from hf_strategies.trainers.random_state import preserved_random_state
from hf_strategies.trainers.reward_functions import resolve_rewards
from hf_strategies.trainers.sampler import RolloutSampler, prompt_positions

logger = logging.getLogger(__name__)

# What `transformers.Trainer` may be given besides; its other hooks would never be called here.
TRAINER_ARGUMENTS = ("data_collator", "callbacks", "optimizers", "optimizer_cls_and_kwargs")


class StrategyTrainer(CheckpointMixin):
    """`transformers.Trainer` for any registered strategy.

    Args:
        model: Hub id, path, `PreTrainedModel`, or `PeftModel` whose adapter is trained on.
        strategy: registered name.
        args: config; an instance of `config_class(strategy)` or of one of the public ``*Config`` classes.
        train_dataset: rows in one of the shapes the strategy reads; map-style, or a list of dicts.
        eval_dataset: the same, or a dict of such.
        processing_class: tokenizer; the model's own when left out.
        reward_funcs: rewards of an online strategy: functions, model ids or models, one or several.
        reward_processing_classes: tokenizers of reward models, one per reward (None for functions).
        ref_model: explicit reference; by default the weights the run starts from.
        peft_config: adapter to train instead of the full model.
        **kwargs: handed to `transformers.Trainer`: callbacks, optimizers, data_collator, optimizer_cls_and_kwargs.

    Raises:
        TypeError: an argument that does not exist, or that would have no effect.
        ValueError: unknown strategy; an online strategy without rewards or an offline one with them; data that does
            not fit. All of it is checked before a model is loaded.
    """

    # The loss is divided by the exact count of the whole optimizer step; Trainer must not divide it again.
    loss_is_scaled_for_ga = True
    # Pack several documents into each example of offline data.
    packed = False
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
        for name in sorted(kwargs.keys() - set(TRAINER_ARGUMENTS)):
            raise TypeError(f"{type(self).__name__}: {name}= is not supported; further ones are {TRAINER_ARGUMENTS}")
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
        self._check_rewards(reward_funcs, entry.online)
        if ref_model is not None and ref_model is model:
            raise ValueError("ref_model is the policy itself: it would change with every update; leave it unset")
        if ref_model is not None and not self.strategy.needs_reference:
            logger.warning("ref_model is not used: %s compares with no reference under these options", strategy)
        if ref_model is not None and not isinstance(ref_model, PreTrainedModel | PeftModel):
            raise TypeError(f"ref_model: got {type(ref_model).__name__}, allowed are a PreTrainedModel, PeftModel")
        if peft_config is not None:
            check_peft_config(peft_config)
        self._check_run(args, eval_dataset)
        rollout_args = args if isinstance(args, OnlineArguments) and entry.online else None
        if rollout_args is not None:
            rollout_args.check_rollouts(self.strategy.min_group_size)

        # Everything that can be wrong with the data is found before weights are read.
        init_kwargs = _as_dict(args.model_init_kwargs)
        init_kwargs.setdefault("trust_remote_code", args.trust_remote_code)
        config = read_config(model, init_kwargs)
        tokenizer = ensure_pad_token(processing_class or load_tokenizer(model, args.trust_remote_code))
        check_sizes(config, tokenizer)
        data = prepare_data(train_dataset, eval_dataset, tokenizer, self.strategy, args, rollout_args, self.packed)
        check_sizes(config, tokenizer, data.longest, data.largest_id)
        if ref_model is not None and self.strategy.needs_reference:
            try:
                check_sizes(ref_model.config, tokenizer, data.longest, data.largest_id)
            except ValueError as error:
                raise ValueError(f"ref_model: {error}") from None
        if data.train is not None and rollout_args is None:
            check_one_batch(data.train, args)
        self.dropped = data.dropped
        self.rollouts: RolloutCallback | None = None
        if rollout_args is not None:
            if data.train is not None:
                check_one_rollout(data.train, rollout_args)
            self.rollouts = RolloutCallback(
                ENGINES[rollout_args.rollout_engine](
                    tokenizer, rollout_args.rollout_batch_size, rollout_args.sampling_dtype
                ),
                resolve_rewards(
                    reward_funcs,
                    rollout_args.reward_weights,
                    reward_processing_classes,
                    data.columns,
                ),
                tokenizer,
                options_from(args, RolloutOptions),
                steps_per_generation=rollout_args.resolved_steps_per_generation,
                max_policy_lag=rollout_args.resolved_max_policy_lag,
                seed=args.seed,
                process_index=args.process_index,
                positions=prompt_positions(
                    rollout_args.prompts_per_rollout,
                    args.process_index,
                    args.world_size,
                    rollout_args.prompts_per_block,
                ),
            )

        policy = load_policy(model, init_kwargs, peft_config)
        if args.low_memory:
            check_low_memory(args, policy)
        if args.disable_dropout if args.disable_dropout is not None else not self.strategy.dropout:
            disable_dropout(policy)
        reference = make_reference(policy, ref_model) if self.strategy.needs_reference else None
        if self.strategy.needs_critic:
            attach_critic(causal_lm_of(policy))
        temperature = rollout_args.temperature if rollout_args else 1.0
        self.forward_pass = CheckedForward(policy, temperature, args.attention_path)
        self.prepare = Preparation(self.strategy, self.forward_pass, reference, args.per_device_train_batch_size)

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
        self.metric_store = {"train": MetricStore(), "eval": MetricStore()}
        self.num_tokens = 0
        self._tokens_since_log = 0
        self._last_log = time.perf_counter()
        self._eval_position = 0
        self._train_sampler: RolloutSampler | None = None
        self.last_eval_table: list[dict[str, Any]] = []
        if self.rollouts:
            self.add_callback(self.rollouts)
        self.add_callback(_EpochSeed(self))
        if not args.disable_tqdm:
            self.remove_callback(ProgressCallback)
            self.remove_callback(PrinterCallback)
            self.add_callback(StrategyProgress)

    def _check_rewards(self, reward_funcs: Any, online: bool) -> None:
        if online and reward_funcs is None:
            raise ValueError(f"strategy {self.strategy_name!r} scores its own completions: reward_funcs is needed")
        if not online and reward_funcs is not None:
            raise ValueError(
                f"strategy {self.strategy_name!r} trains on given rows and makes no rollouts: leave reward_funcs out"
            )

    def _check_run(self, args: StrategyArguments, eval_dataset: Any) -> None:
        """Refuse what would end the run later, after weights are loaded or after training."""
        if eval_dataset is None and (args.eval_strategy != "no" or args.eval_on_start):
            asked = "eval_on_start=True" if args.eval_on_start else "eval_strategy"
            raise ValueError(f"eval_dataset is not given, and {asked} asks for evaluations")
        if args.load_best_model_at_end and args.eval_strategy == "no":
            raise ValueError(
                "load_best_model_at_end=True: which one is best is known from evaluations, set eval_strategy"
            )
        if args.output_dir is not None and Path(args.output_dir).exists() and not Path(args.output_dir).is_dir():
            raise ValueError(f"output_dir={args.output_dir!r}: allowed is a folder, this is a file")
        if args.push_to_hub and not (args.hub_token or get_token()):
            raise ValueError("push_to_hub=True needs a token: run `hf auth login`, or set HF_TOKEN or hub_token")
        if args.resume_from_checkpoint is not None:
            engine = args.deepspeed is not None or bool(args.fsdp)
            check_checkpoint(args.resume_from_checkpoint, self.strategy_name, needs_optimizer=not engine)

    # ---- data ----

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

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], Tensor | int | None]:
        """Micro-batches of one optimizer step, ready for the loss, and the step's denominator over all processes."""
        samples = []
        for _ in range(num_batches):
            try:
                samples.append(next(epoch_iterator))
            except StopIteration:
                break
        if self.rollouts is None:
            batches, metrics = self.prepare(self.model_wrapped, [sample["batch"].to(device) for sample in samples])
            self.metric_store["train"].add(metrics)
        else:
            batches = [self._next_rollout_batch(sample["examples"], device) for sample in samples]
        if not batches:
            return [], None
        items = torch.stack([self.strategy.count_items(batch).to(device) for batch in batches]).sum()
        tokens = torch.stack([batch.num_tokens for batch in batches]).sum()
        self._tokens_since_log += int(tokens)
        totals = self.accelerator.gather(torch.stack([items, tokens.to(items.dtype)]).unsqueeze(0)).sum(dim=0)
        self.num_tokens += int(totals[1])
        inputs = [
            {"whole": batch, "pieces": self._inputs(pieces, totals[1])}
            for batch, pieces in zip(batches, self._cut(batches), strict=True)
        ]
        return inputs, totals[0].clamp(min=1)

    def _cut(self, batches: list[Batch]) -> list[list[Batch]]:
        """Pieces of each micro-batch, as many on every process."""
        budget, apart = self.args.max_tokens_per_micro_batch, self.args.low_memory and self.forward_pass.stream
        if budget is None and not apart:
            return [[batch] for batch in batches]
        prompts = "apart" if apart else "per_piece" if self.forward_pass.stream else "per_row"
        keep = self.strategy.keep_groups
        return level([pieces_of(b, budget or 1, keep_groups=keep, prompts=prompts) for b in batches], gather_object)

    @staticmethod
    def _inputs(pieces: list[Batch], tokens: Tensor) -> list[dict[str, Any]]:
        return [{"batch": piece, "token_share": piece.num_tokens / tokens.clamp(min=1)} for piece in pieces]

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Forward and backward pass of each piece of a micro-batch; gradients are reduced after the last one."""
        *first, last = inputs["pieces"]
        losses, prefix = [], None
        if self.args.low_memory:
            model.train()
            with without_sync(self.accelerator, model), self.compute_loss_context_manager():
                prefix = self.forward_pass.run_prefix(model, inputs["whole"])
        with self.forward_pass.going_on_from(prefix):
            for piece in first:
                with without_sync(self.accelerator, model):
                    losses.append(super().training_step(model, piece, num_items_in_batch))
            if prefix is not None:
                prefix.attach()
            losses.append(super().training_step(model, last, num_items_in_batch))
        return torch.stack(losses).sum()

    def _next_rollout_batch(self, examples: list[dict[str, Any]], device: torch.device) -> Batch:
        assert self.rollouts is not None
        if self.rollouts.buffer.needs_rollout:
            rollout = self.rollouts.rollout(examples, self.state)
            pin_old = self.strategy.needs_old_logprobs or self.args.updates_within_rollout
            parts, whole = self.args.resolved_steps_per_generation, rollout.batch.to(device)
            # Groups that stay together are cut before rows are selected: which prompts a step trains on must not
            # depend on how many of the others are left out, here or on another process.
            cut = whole.split(parts, keep_groups=True) if self.strategy.keep_groups else [whole]
            batches, metrics = self.prepare(self.model_wrapped, cut, pin_old=pin_old)
            self.metric_store["train"].add(rollout.metrics | metrics)
            self.rollouts.buffer.fill(batches if self.strategy.keep_groups else batches[0].split(parts))
            self._call_on_rollout(rollout)
        return self.rollouts.next_batch().to(device)  # a checkpoint brings it back on the CPU

    def _call_on_rollout(self, rollout: Rollout) -> None:
        for callback in self.callback_handler.callbacks:
            if hasattr(callback, "on_rollout"):
                callback.on_rollout(self.args, self.state, self.control, rollout=rollout)

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return inputs  # micro-batches are on the device already

    # ---- loss ----

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """This micro-batch's share of the step's loss.

        Args:
            model: wrapped model.
            inputs: ``batch``, and ``token_share``: its part of the step's tokens, which weighs the router's aux loss.
            return_outputs: also return the `ForwardResult`.
            num_items_in_batch: the step's denominator; the batch's own when left out.

        Returns:
            Scalar. Engines average gradients over processes, so it is multiplied by their number in training.
        """
        batch: Batch = inputs["batch"]
        num_items = num_items_in_batch
        if not isinstance(num_items, Tensor):
            num_items = self.strategy.count_items(batch).clamp(min=1)
        idle = self.strategy.idle_rows(batch)
        if self.forward_pass.is_moe or not model.training:
            idle = torch.zeros_like(idle)  # a router's loss comes from every row; an evaluation reports on all of them
        result = self.forward_pass(
            model,
            batch.replace(loss_mask=batch.loss_mask & ~idle.unsqueeze(-1)),
            entropy=True,
            vocab_mean=self.strategy.needs_vocab_mean,
            values=self.strategy.needs_critic,
            router=True,
        )
        result.policy.computed = ~idle
        loss, metrics = self.strategy.loss(result.policy, batch, num_items)
        metrics["stream/sharing_factor"] = Mean(
            torch.tensor(float(result.padded_tokens)), torch.tensor(result.computed_tokens)
        )
        if result.aux_loss is not None:
            loss = loss + self._weighted_aux_loss(result, batch, inputs.get("token_share", 1.0), metrics)
        self.metric_store["train" if model.training else "eval"].add(metrics)
        if model.training:
            loss = loss * self.accelerator.num_processes
            prefix = self.forward_pass.prefix
            if prefix is not None and (pull := prefix.pull()) is not None:
                loss = loss + pull - pull.detach()  # a gradient, and no part of the loss
        return (loss, result) if return_outputs else loss

    def _weighted_aux_loss(self, result: ForwardResult, batch: Batch, share: Any, metrics: dict[str, Any]) -> Tensor:
        # A product of batch means has no exact split; the token-weighted mean over micro-batches at least does not
        # grow with their number.
        assert result.aux_loss is not None
        coefficient, tokens, aux = (
            self.args.router_aux_loss_coef,
            batch.num_tokens,
            result.aux_loss,
        )
        metrics["aux_loss"] = Mean(aux.detach() * tokens, tokens)
        metrics["aux_loss_weighted"] = Mean(coefficient * aux.detach() * tokens, tokens)
        if result.router_load is not None:
            metrics["moe"] = result.router_load
        return coefficient * aux * share

    # ---- evaluation ----

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, None, None]:
        """Score one evaluation batch along the path of training; training state stays untouched."""
        store = self.metric_store["eval"]
        pin_old = self.strategy.needs_old_logprobs
        with torch.no_grad(), self.compute_loss_context_manager():
            if self.rollouts is None:
                (batch,), metrics = self.prepare(model, [inputs["batch"].to(self.args.device)], pin_old=pin_old)
            else:
                first = self._eval_position + self.accelerator.process_index * self.args.per_device_eval_batch_size
                self._eval_position += self.accelerator.num_processes * self.args.per_device_eval_batch_size
                rollout = self.rollouts.evaluate(
                    self.accelerator.unwrap_model(model),
                    inputs["examples"],
                    first,
                    self.state,
                )
                self.last_eval_table += rollout.table
                n = self.args.num_generations_eval or self.args.num_generations
                if n < self.strategy.min_group_size:
                    # Nothing to compare a lone completion with: rewards are reported, a loss is not defined.
                    store.add(rollout.metrics)
                    return None, None, None
                (batch,), metrics = self.prepare(model, [rollout.batch.to(self.args.device)], pin_old=pin_old)
                metrics = rollout.metrics | metrics
            store.add(metrics)
            items = self.strategy.count_items(batch)
            loss = self.compute_loss(model, {"batch": batch}, num_items_in_batch=items.clamp(min=1))
            store.add({"loss": Mean(loss.detach() * items, items)})
        return loss, None, None

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """`Trainer.evaluation_loop`, with the strategy's metrics and a loss weighted like the training loss."""
        prefix = kwargs.get("metric_key_prefix", args[4] if len(args) > 4 else "eval")
        self._eval_position, self.last_eval_table = 0, []
        self.metric_store["eval"] = MetricStore()
        with preserved_random_state(self.args.device):
            output = super().evaluation_loop(*args, **kwargs)
        assert output.metrics is not None
        metrics = self.metric_store["eval"].reduce(gather_object)
        output.metrics.pop(f"{prefix}_loss", None)
        output.metrics.update({f"{prefix}_{name}": value for name, value in metrics.items()})
        return output

    # ---- logging ----

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with what strategy and rollouts collected since the last log."""
        if "loss" in logs:
            now = time.perf_counter()
            logs |= self.metric_store["train"].reduce(gather_object)
            tokens = sum(gather_object([self._tokens_since_log]))
            logs["train/tokens_per_second"] = tokens / (now - self._last_log)
            logs["num_tokens"] = self.num_tokens
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


class _EpochSeed(TrainerCallback):
    """Tells the sampler which epoch begins: wrapped loaders do not pass it on in every setting."""

    def __init__(self, trainer: StrategyTrainer) -> None:
        self.trainer = trainer

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set the epoch of the sampler the loader was built with."""
        sampler = self.trainer._train_sampler
        if sampler is not None:
            sampler.set_epoch(int((state.epoch or 0.0) + 1e-6))


def collate_prompts(examples: list[dict[str, Any]]) -> dict[str, Any]:
    """Prompts stay dataset rows until they are rolled out."""
    return {"examples": examples}


def _as_dict(value: dict[str, Any] | str | None) -> dict[str, Any]:
    if value is None:
        return {}
    return dict(json.loads(value) if isinstance(value, str) else value)
