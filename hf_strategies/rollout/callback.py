"""Rollouts as a `TrainerCallback`: grouped generation, scoring, policy versions, and what of it a checkpoint keeps."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import TrainerCallback

from hf_strategies import credit
from hf_strategies.batch import Batch, Row
from hf_strategies.rollout.buffer import RolloutBuffer
from hf_strategies.rollout.engine import RolloutEngine, RolloutGroup
from hf_strategies.rollout.options import RolloutOptions
from hf_strategies.rollout.rewards import RewardError, Rewards, Scores
from hf_strategies.rollout.version import PolicyVersion
from hf_strategies.stats import Extreme, Mean, Metrics

logger = logging.getLogger(__name__)

# Noise keys of evaluation start with this number, those of training with 0: the two never share noise.
TRAIN_DOMAIN, EVAL_DOMAIN = 0, 1
# Rewards get `prompts` instead; all other columns travel to them under their own names.
PROMPT_COLUMNS = ("prompt", "prompt_ids")


@dataclass
class Rollout:
    """Scored completions of some prompts.

    Attributes:
        batch: N rows with rewards, group after group.
        scores: rewards of the N rows.
        table: one dict per row for people to read: prompt, completion, rewards, the dataset's other columns.
        metrics: lengths, rewards, speed.
    """

    batch: Batch
    scores: Scores
    table: list[dict[str, Any]]
    metrics: Metrics = field(default_factory=dict)


class RolloutCallback(TrainerCallback):
    """Samples and scores groups for an online strategy, and counts the policy's versions.

    Args:
        engine: what samples.
        rewards: what scores.
        tokenizer: decodes completions for rewards and people; trained ids are the sampled ids, never re-encoded text.
        options: sampling and reuse.
        steps_per_generation: micro-batches one rollout is cut into (``options.steps_per_generation`` resolved).
        max_policy_lag: most optimizer steps between sampling and use.
        seed: of the sampling noise.
        process_index: of this process, under which it writes its state.
        positions: place of each of this process's prompts among those of all processes in a rollout, the source of
            their noise; block after block in the order of the processes when left out.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        rewards: Rewards,
        tokenizer: Any,
        options: RolloutOptions,
        *,
        steps_per_generation: int,
        max_policy_lag: int,
        seed: int = 0,
        process_index: int = 0,
        positions: Sequence[int] | None = None,
    ) -> None:
        self.engine = engine
        self.rewards = rewards
        self.tokenizer = tokenizer
        self.options = options
        self.max_policy_lag = max_policy_lag
        self.seed = seed
        self.process_index = process_index
        self.positions = positions
        self.buffer = RolloutBuffer(steps_per_generation, options.num_iterations)
        self.version = PolicyVersion()
        self.last_table: list[dict[str, Any]] = []

    # ---- weights and versions ----

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Bind the engine to the policy."""
        if model is not None:
            self.engine.sync_weights(model, self.version.current)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Weights are about to change: no rollout until the new version is published."""
        self.version.begin_step()

    def on_step_end(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: nn.Module | None = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Publish the new version, unless the optimizer skipped the step."""
        if getattr(optimizer, "step_was_skipped", False):
            self.version.skip_step()
            return
        version = self.version.publish()
        if model is not None:
            self.engine.sync_weights(model, version)

    # ---- rollouts ----

    def rollout(self, examples: Sequence[dict[str, Any]], state: Any = None) -> Rollout:
        """Training rollout of this process's prompts.

        Args:
            examples: B dataset rows with ``prompt_ids`` (and ``prompt``, reward columns).
            state: trainer state, handed to the rewards.
        """
        self.version.check_rollout_may_start()
        generation = self.buffer.generation
        first = self.process_index * len(examples)
        positions = range(first, first + len(examples)) if self.positions is None else self.positions
        keys = [
            [(self.seed, TRAIN_DOMAIN, generation, 0, position, j) for j in range(self.options.num_generations)]
            for position in positions
        ]
        rollout = self._sample_and_score(examples, self.options.num_generations, keys, False, state)
        if generation == 0 and rollout.scores.total.isnan().all():
            raise RewardError(
                f"no reward returned a number for any of the first {len(rollout.table)} completions "
                f"(rewards: {', '.join(self.rewards.names)}): is a `return` missing?"
            )
        self.last_table = rollout.table
        return rollout

    def evaluate(
        self,
        model: nn.Module,
        examples: Sequence[dict[str, Any]],
        first: int,
        state: Any = None,
    ) -> Rollout:
        """Throw-away rollout: buffer, versions and noise of training stay as they are.

        Args:
            model: unwrapped policy.
            examples: B dataset rows with ``prompt_ids``.
            first: position of the first of them in the evaluation set, the source of their noise.
            state: trainer state, handed to the rewards.
        """
        self.engine.sync_weights(model, self.version.current)
        n = self.options.resolved_num_generations_eval
        keys = [[(self.seed, EVAL_DOMAIN, 0, 0, first + i, j) for j in range(n)] for i in range(len(examples))]
        return self._sample_and_score(examples, n, keys, True, state)

    def next_batch(self) -> Batch:
        """Micro-batch of the next micro-step, from a policy that is not too old."""
        batch = self.buffer.next()
        if batch.policy_version is not None:
            self.version.check_lag(int(batch.policy_version.min()), self.max_policy_lag)
            self.version.check_lag(int(batch.policy_version.max()), self.max_policy_lag)
        return batch

    def _sample_and_score(
        self,
        examples: Sequence[dict[str, Any]],
        n: int,
        keys: Sequence[Sequence[tuple[int, ...]]],
        evaluation: bool,
        state: Any,
    ) -> Rollout:
        sampling = self.options.eval_sampling() if evaluation else self.options.sampling()
        started = time.perf_counter()
        groups = self.engine.generate([example["prompt_ids"] for example in examples], n, sampling, keys)
        seconds = time.perf_counter() - started
        scores, table = self._score(examples, groups, state)
        batch = self._collate(groups, scores)
        metrics = _completion_metrics(groups) | self._reward_metrics(scores) | credit.reward_metrics(batch)
        if not evaluation:
            # Tokens and seconds add up separately, so that a mean over rollouts weighs them rightly.
            tokens = torch.tensor(float(sum(len(c.ids) for group in groups for c in group.completions)))
            metrics["rollout/tokens_per_second"] = Mean(tokens, torch.tensor(seconds))
        return Rollout(batch, scores, table, metrics)

    def _score(
        self,
        examples: Sequence[dict[str, Any]],
        groups: Sequence[RolloutGroup],
        state: Any,
    ) -> tuple[Scores, list[dict[str, Any]]]:
        repeated = [(e, c) for e, group in zip(examples, groups, strict=True) for c in group.completions]
        prompts = [example["prompt"] for example, _ in repeated]
        ids = [completion.ids for _, completion in repeated]
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        completions = [
            text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        names = [name for name in examples[0] if name not in PROMPT_COLUMNS] if examples else []
        columns = {name: [example[name] for example, _ in repeated] for name in names}
        scores = self.rewards.score(prompts, completions, ids, columns, state)
        if self.options.missing_eos_penalty is not None:
            cut_off = torch.tensor([completion.finish_reason == "length" for _, completion in repeated])
            scores.total = scores.total - self.options.missing_eos_penalty * cut_off
        unscorable = int(scores.total.isnan().sum())
        if unscorable:
            first = int(scores.total.isnan().nonzero()[0])
            logger.warning(
                "%d of %d completions got no reward from any function (first: row %d, %r); they are left out of "
                "their group's statistics and of the loss",
                unscorable,
                len(texts),
                first,
                texts[first],
            )
        table = []
        for i, text in enumerate(texts):
            made = {"prompt": prompts[i], "completion": text, "reward": float(scores.total[i])}
            made |= {name: float(values[i]) for name, values in scores.by_name.items()}
            # A dataset column of one of these names is another thing, such as the gold completion.
            given = {name: values[i] for name, values in (columns | scores.extra).items() if name not in made}
            table.append(made | given)
        return scores, table

    def _collate(self, groups: Sequence[RolloutGroup], scores: Scores) -> Batch:
        rows: list[Row] = []
        for i, group in enumerate(groups):
            for j, completion in enumerate(group.completions):
                rows.append(
                    Row(
                        prompt_ids=group.prompt_ids,
                        completion_ids=completion.ids,
                        loss_mask=None if group.loss_masks is None else group.loss_masks[j],
                        group=i,
                        reward=float(scores.total[len(rows)]),
                        sampling_logprobs=completion.logprobs,
                        truncated=completion.finish_reason == "length",
                        policy_version=group.policy_version,
                    )
                )
        return Batch.from_rows(rows, pad_token_id=self.tokenizer.pad_token_id)

    def _reward_metrics(self, scores: Scores) -> Metrics:
        one = torch.tensor(1.0)
        metrics: Metrics = {}
        for name, values in scores.by_name.items():
            given = values[~values.isnan()]
            if given.numel():
                metrics[f"rewards/{name}/mean"] = Mean(given.sum(), torch.tensor(given.numel()))
                metrics[f"rewards/{name}/std"] = Mean(given.std() if given.numel() > 1 else torch.tensor(0.0), one)
        for name, logged in scores.metrics.items():
            metrics[name] = Mean(torch.tensor(sum(logged)), torch.tensor(len(logged)))
        unscorable = scores.total.isnan()
        metrics["rows_dropped/unscorable"] = Mean(unscorable.double().sum(), torch.tensor(unscorable.numel()))
        return metrics

    # ---- checkpoints ----

    def save(self, folder: str | Path) -> None:
        """Write version, position and unused rollouts of this process into a checkpoint folder."""
        numbers, tensors = self.buffer.state()
        content = {"policy_version": self.version.current, "buffer": numbers}
        # The process that writes the model may be slower, or write on another node's disk.
        Path(folder).mkdir(parents=True, exist_ok=True)
        stem = Path(folder) / f"rollouts-{self.process_index}"
        save_file(tensors, stem.with_suffix(".safetensors"))
        stem.with_suffix(".json").write_text(json.dumps(content))

    def load(self, folder: str | Path) -> None:
        """Restore what `save` wrote.

        Raises:
            FileNotFoundError: the checkpoint has no rollout state of this process.
        """
        stem = Path(folder) / f"rollouts-{self.process_index}"
        if not stem.with_suffix(".json").exists():
            raise FileNotFoundError(
                f"{stem.with_suffix('.json')} is missing: the checkpoint cannot resume rollouts exactly "
                "(was it written by another number of processes, or with save_only_model?)"
            )
        content = json.loads(stem.with_suffix(".json").read_text())
        self.version = PolicyVersion(content["policy_version"])
        self.buffer.load_state(content["buffer"], load_file(stem.with_suffix(".safetensors")))


def _completion_metrics(groups: Sequence[RolloutGroup]) -> Metrics:
    """``completions/*`` lengths in tokens, of all and of terminated ones, and the share cut off at the limit."""
    completions = [completion for group in groups for completion in group.completions]
    lengths = torch.tensor([float(len(c.ids)) for c in completions], dtype=torch.float64)
    terminated = torch.tensor([c.finish_reason == "stop" for c in completions])
    metrics: Metrics = {
        "completions/clipped_ratio": Mean((~terminated).double().sum(), torch.tensor(len(completions)))
    }
    for prefix, values in (("", lengths), ("terminated_", lengths[terminated])):
        if values.numel():
            metrics[f"completions/mean_{prefix}length"] = Mean(values.sum(), torch.tensor(values.numel()))
            metrics[f"completions/min_{prefix}length"] = Extreme(values.min(), "min")
            metrics[f"completions/max_{prefix}length"] = Extreme(values.max(), "max")
    return metrics
