"""A reference that is asked once, before training, or that follows the policy."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset
from peft import PeftModel
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from tqdm import tqdm
from transformers import Trainer, TrainerCallback
from transformers.integrations import is_deepspeed_zero3_enabled

from hf_strategies.batch import Batch
from hf_strategies.data.formats import REFERENCE, collate
from hf_strategies.modeling.embedded import cache_dir
from hf_strategies.modeling.forward import CheckedForward
from hf_strategies.modeling.generation import generating
from hf_strategies.modeling.reference import Present, Reference
from hf_strategies.modeling.unwrap import causal_lm_of
from hf_strategies.options import Options, option
from hf_strategies.trainers.preparation import Preparation
from hf_strategies.trainers.random_state import preserved_random_state

logger = logging.getLogger(__name__)

ROWS_PER_HASH = 1000
# Settings of models and adapters that say where they come from, and nothing of what they compute.
UNREAD = ("_name_or_path", "transformers_version", "base_model_name_or_path", "peft_version")


@dataclass
class ReferenceArguments(Options):
    """What is done with the policy that a strategy compares with."""

    precompute_ref_log_probs: bool = option(
        False,
        "Compute the reference's log-probabilities of given rows once, before training, and keep them on disk: no "
        "reference in memory while training.",
    )
    precompute_ref_batch_size: int | None = option(
        None, "Dataset rows scored at a time then; unset: per_device_train_batch_size or per_device_eval_batch_size."
    )
    sync_ref_model: bool = option(False, "Let the reference follow the policy (TR-DPO).")
    ref_model_mixup_alpha: float = option(
        0.6, "Weight of the policy when the reference follows: alpha * policy + (1 - alpha) * reference, in (0, 1]."
    )
    ref_model_sync_steps: int = option(512, "Optimizer steps between two such steps of the reference.")

    def validate(self) -> None:  # noqa: D102 - see Options
        super().validate()
        if self.precompute_ref_batch_size is not None:
            self.require_integer("precompute_ref_batch_size", 1)
        self.require_number("ref_model_mixup_alpha", 0.0, 1.0, above=0.0)
        self.require_integer("ref_model_sync_steps", 1)
        defaults = {f.name: f.default for f in fields(ReferenceArguments)}
        for name, switch in (
            ("precompute_ref_batch_size", "precompute_ref_log_probs"),
            ("ref_model_mixup_alpha", "sync_ref_model"),
            ("ref_model_sync_steps", "sync_ref_model"),
        ):
            if getattr(self, name) != defaults[name] and not getattr(self, switch):
                raise ValueError(f"{name}={getattr(self, name)!r} has no effect without {switch}=True")
        if self.sync_ref_model and self.precompute_ref_log_probs:
            raise ValueError(
                "sync_ref_model=True and precompute_ref_log_probs=True contradict each other: numbers that were "
                "computed once do not follow; allowed is one of them"
            )

    @property
    def mixup_alpha(self) -> float | None:
        """Weight of the policy in a reference that follows; None for one that does not."""
        return self.ref_model_mixup_alpha if self.sync_ref_model else None

    def check_use(self, strategy: str, args: Any, needed: bool, online: bool, train_dataset: Any) -> None:
        """Raise where an option could do nothing, or not what it says.

        Args:
            strategy: registered name.
            args: the whole config.
            needed: whether the strategy compares with a reference under its options.
            online: whether its rows are sampled.
            train_dataset: as it was given.
        """
        sharded = is_deepspeed_zero3_enabled() or bool(args.fsdp)
        streams = isinstance(train_dataset, IterableDataset)
        for name in ("precompute_ref_log_probs", "sync_ref_model"):
            if not getattr(self, name):
                continue
            if not needed:
                raise ValueError(f"{name}=True: {strategy} compares with no reference under these options")
            if sharded:
                raise ValueError(f"{name}=True: allowed is False where weights are sharded (ZeRO-3, FSDP)")
        if self.precompute_ref_log_probs and (online or streams):
            reason = (
                "samples its rows while it trains" if online else "reads a stream, whose rows come while it trains"
            )
            raise ValueError(f"precompute_ref_log_probs=True: {strategy} {reason}; allowed is False")


class ReferenceSync(TrainerCallback):
    """Mixes the policy into its reference every so many optimizer steps (TR-DPO, arXiv 2404.09656).

    Args:
        reference: what follows.
        alpha: weight of the policy.
        every: optimizer steps.
    """

    def __init__(self, reference: Reference, alpha: float, every: int) -> None:
        self.reference = reference
        self.alpha = alpha
        self.every = every

    def on_step_end(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any) -> None:
        """Mix where the number of steps says so."""
        if model is not None and state.global_step % self.every == 0:
            self.reference.mix(model, self.alpha)


def fingerprint_of(reference: Reference, policy: nn.Module, precision: str) -> str:
    """Changes with everything, beside the rows, that the reference's log-probabilities are made from.

    Args:
        reference: what will be asked.
        policy: unwrapped policy.
        precision: of the computation.
    """
    digest = hashlib.blake2b(digest_size=16)
    model, weights = reference.identity(policy)
    causal_lm: Any = causal_lm_of(model)
    settings = [causal_lm.config.to_dict()]
    if isinstance(model, PeftModel):
        settings.append(model.peft_config[model.active_adapter].to_dict())
    kept = [{name: value for name, value in each.items() if name not in UNREAD} for each in settings]
    what = [precision, type(causal_lm).__name__, *kept]
    digest.update(json.dumps(what, sort_keys=True, default=str).encode())
    for name, value in sorted(weights.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


class ReferenceScores:
    """Log-probabilities of the reference for whole datasets, from the cache or computed by all processes together.

    Args:
        score: batch -> [N, C] log-probabilities, without gradient.
        fingerprint: of what ``score`` depends on.
        accelerator: of the run.
        pad_token_id: written into padding, never looked at.
        quiet: show no progress.
    """

    def __init__(
        self, score: Callable[[Batch], Tensor], fingerprint: str, accelerator: Any, pad_token_id: int, quiet: bool
    ) -> None:
        self.score = score
        self.fingerprint = fingerprint
        self.accelerator = accelerator
        self.pad_token_id = pad_token_id
        self.quiet = quiet or not accelerator.is_local_main_process

    def add_to(self, dataset: Dataset, batch_size: int, name: str) -> Dataset:
        """An encoded dataset with a column of log-probabilities, see `collate`; its rows and their order stay.

        Args:
            dataset: of `encode_dataset`.
            batch_size: examples scored at a time.
            name: of the dataset, for people.
        """
        lengths = [[len(row["completion_ids"]) for row in rows] for rows in dataset["rows"]]
        total = sum(map(sum, lengths))
        key = _key_of(dataset, self.fingerprint)
        file = cache_dir() / "reference" / f"{key}.safetensors"
        values = _read(file, total)
        if not all(gather_object([values is not None])):
            values = self._computed(dataset, batch_size, name)
            if self.accelerator.is_local_main_process:
                _write(file, values)
        assert values is not None
        rows = pa.ListArray.from_arrays(_offsets([n for each in lengths for n in each]), pa.array(values))
        column = pa.ListArray.from_arrays(_offsets([len(each) for each in lengths]), rows)
        return dataset.add_column(REFERENCE, column, new_fingerprint=key)  # type: ignore[arg-type]

    def _computed(self, dataset: Dataset, batch_size: int, name: str) -> np.ndarray:
        starts = range(0, len(dataset), batch_size)
        # A process without any of its own takes part all the same: the first batch is compared on all of them.
        mine = starts[self.accelerator.process_index :: self.accelerator.num_processes] or starts[:1]
        parts: dict[int, np.ndarray] = {}
        for start in tqdm(mine, desc=f"Reference log-probs of the {name} dataset", disable=self.quiet):
            examples = dataset.select(range(start, min(start + batch_size, len(dataset)))).to_list()
            batch = collate(examples, self.pad_token_id)["batch"].to(self.accelerator.device)
            logprobs = self.score(batch).float()
            parts[start] = logprobs[batch.completion_mask].cpu().numpy()
        everywhere = {start: values for each in gather_object([parts]) for start, values in each.items()}
        return np.concatenate([everywhere[start] for start in starts])


class ReferenceMixin(Trainer):
    """The part of the trainer that keeps a reference, or its numbers."""

    args: Any
    model: Any
    prepare: Preparation
    forward_pass: CheckedForward
    processing_class: Any
    synced_reference: Reference | None

    def _set_up_reference(self, reference: Reference, options: ReferenceArguments) -> None:
        if options.mixup_alpha is not None:
            self.synced_reference = reference
            self.add_callback(ReferenceSync(reference, options.mixup_alpha, options.ref_model_sync_steps))
        if not options.precompute_ref_log_probs:
            return
        policy = self.model
        if not hasattr(policy, "hf_device_map"):
            policy.to(self.args.device)
        size = options.precompute_ref_batch_size
        train_size = size or self.args.per_device_train_batch_size
        eval_size = size or self.args.per_device_eval_batch_size
        scores = ReferenceScores(
            self._score_reference,
            fingerprint_of(reference, policy, self.accelerator.mixed_precision),
            self.accelerator,
            self.processing_class.pad_token_id,
            self.args.disable_tqdm,
        )
        if self.train_dataset is not None:
            self.train_dataset = scores.add_to(self.train_dataset, train_size, "train")
        if isinstance(self.eval_dataset, dict):
            self.eval_dataset = {
                name: scores.add_to(dataset, eval_size, name) for name, dataset in self.eval_dataset.items()
            }
        elif self.eval_dataset is not None:
            self.eval_dataset = scores.add_to(self.eval_dataset, eval_size, "eval")
        reference.park()
        self.prepare.parks = True
        if isinstance(reference, Present):
            self.prepare.reference = None

    def _score_reference(self, batch: Batch) -> Tensor:
        """Along the path of training, in its precision."""
        with preserved_random_state(self.args.device), generating(self.model):
            self.forward_pass.check(self.model, batch, lambda value: max(gather_object([value])))
            return self.prepare.score_reference(self.model, batch)


def _key_of(dataset: Dataset, fingerprint: str) -> str:
    """Of the rows and of what scores them."""
    digest = hashlib.blake2b(fingerprint.encode(), digest_size=16)
    rows = dataset.select_columns(["rows"]).with_format("arrow")
    for start in range(0, len(rows), ROWS_PER_HASH):
        table = rows[start : start + ROWS_PER_HASH].combine_chunks()
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema.remove_metadata()) as writer:
            writer.write_table(table.replace_schema_metadata())
        digest.update(sink.getvalue())
    return digest.hexdigest()


def _offsets(lengths: list[int]) -> pa.Array:
    return pa.array(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64), type=pa.int32())


def _read(file: Path, total: int) -> np.ndarray | None:
    if not file.is_file():
        return None
    try:
        values = load_file(file)["logprobs"].numpy()
    except (SafetensorError, KeyError, OSError) as error:
        logger.warning("%s cannot be read (%s): its log-probabilities are computed again", file, error)
        return None
    return values if len(values) == total else None


def _write(file: Path, values: np.ndarray) -> None:
    """Whole or not at all: another run may read it meanwhile."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            made = Path(folder) / file.name
            save_file({"logprobs": torch.from_numpy(values)}, made)
            os.replace(made, file)
    except OSError as error:
        logger.warning("%s cannot be written (%s): the next run computes its log-probabilities again", file, error)
