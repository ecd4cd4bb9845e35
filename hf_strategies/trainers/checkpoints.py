"""What a checkpoint of a strategy's run holds besides Trainer's own files."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any

from peft import PeftModel
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer
from transformers.trainer_utils import get_last_checkpoint

from hf_strategies.modeling.critic import critic_of, without_critic
from hf_strategies.modeling.policy import is_converted, restore_weights
from hf_strategies.modeling.reference import Reference
from hf_strategies.rollout.callback import RolloutCallback
from hf_strategies.strategies import Strategy

STATE_FILE = "strategy_state.json"
CRITIC_FILE = "critic.safetensors"
REFERENCE_FILE = "reference.safetensors"
# What Trainer saves for exact resumption; without one of these it would begin afresh there, silently.
RESUME_FILES = ("trainer_state.json", STATE_FILE, "optimizer.pt", "scheduler.pt")


def named_checkpoint(value: Any, output_dir: str | None) -> Any:
    """The folder that an option names: ``true`` is the last checkpoint in the output folder, ``false`` none.

    Raises:
        FileNotFoundError: there is no checkpoint in the output folder.
    """
    named = str(value).lower()
    if value is None or named == "false":
        return None
    if named != "true":
        return value
    last = get_last_checkpoint(output_dir) if output_dir is not None and Path(output_dir).is_dir() else None
    if last is None:
        raise FileNotFoundError(
            f"resume_from_checkpoint={value!r}: there is no checkpoint in output_dir={output_dir!r}"
        )
    return last


def check_checkpoint(folder: Any, strategy: str, *, needs_optimizer: bool = True) -> None:
    """Raise unless a folder is a complete checkpoint of a strategy; no weights are read.

    Args:
        folder: what is to be resumed from.
        strategy: registered name of this run's strategy.
        needs_optimizer: whether optimizer and scheduler are files in the folder (engines have their own formats).

    Raises:
        TypeError: no path.
        FileNotFoundError: no such folder, or one that lacks a file.
        ValueError: a file that is cut off, or the checkpoint of another strategy.
    """
    if not isinstance(folder, str | os.PathLike):
        raise TypeError(f"resume_from_checkpoint={folder!r}: allowed are a folder, True and None")
    path = Path(folder)
    if not path.is_dir():
        raise FileNotFoundError(f"resume_from_checkpoint={str(folder)!r}: no such folder")
    for name in RESUME_FILES if needs_optimizer else RESUME_FILES[:2]:
        if not (path / name).is_file():
            raise FileNotFoundError(
                f"resume_from_checkpoint={str(folder)!r} is no checkpoint to resume from: {name} is missing (was it "
                "written with save_only_model, or is it a saved model?)"
            )
    for file in sorted(path.rglob("*")):
        problem = _damage(file)
        if problem:
            raise ValueError(
                f"resume_from_checkpoint: {file} is damaged ({problem}): was the run stopped while saving?"
            )
    saved = json.loads((path / STATE_FILE).read_text()).get("strategy", strategy)
    if saved != strategy:
        raise ValueError(
            f"resume_from_checkpoint={str(folder)!r} is of strategy {saved!r}, this run's is {strategy!r}"
        )


def _damage(file: Path) -> str | None:
    """What is wrong with a file, as far as its outer form tells."""
    if file.suffix == ".json":
        try:
            json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            return str(error)
    if file.suffix == ".safetensors":
        try:
            with safe_open(file, framework="pt"):
                pass
        except SafetensorError as error:
            return str(error)
    if file.suffix in (".pt", ".pth") and not zipfile.is_zipfile(file):
        return "no archive of torch"
    return None


class CheckpointMixin(Trainer):
    """Saves and restores critic, rollouts and counters; exports the policy alone. Safetensors and JSON only."""

    args: Any
    model: Any
    processing_class: Any
    rollouts: RolloutCallback | None
    num_tokens: int
    strategy: Strategy
    strategy_name: str
    synced_reference: Reference | None

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        """Write the policy alone (no critic, no reference) and what is needed to use it."""
        if not self.args.should_save:
            return
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        model = self.accelerator.unwrap_model(self.model)
        if critic_of(model) is not None:
            state_dict = without_critic(model.state_dict() if state_dict is None else state_dict)
        adapters = {"selected_adapters": [model.active_adapter]} if isinstance(model, PeftModel) else {}
        model.save_pretrained(str(folder), state_dict=state_dict, **adapters)
        self.processing_class.save_pretrained(str(folder))
        (folder / "training_args.json").write_text(self.args.to_json_string())

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        folder = Path(output_dir)
        if self.args.should_save:
            (folder / STATE_FILE).write_text(
                json.dumps(
                    {
                        "num_tokens": self.num_tokens,
                        "strategy": self.strategy_name,
                        "sums": None if self.strategy.sums is None else self.strategy.sums.tolist(),
                    }
                )
            )
            critic = critic_of(self.model)
            if critic is not None:
                save_file(critic.state_dict(), folder / CRITIC_FILE)
            if self.synced_reference is not None:
                state = self.synced_reference.state()
                save_file({name: value.contiguous() for name, value in state.items()}, folder / REFERENCE_FILE)
        if self.rollouts is not None:
            self.rollouts.save(folder)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        check_checkpoint(resume_from_checkpoint, self.strategy_name)
        adapter = any(Path(resume_from_checkpoint).rglob("adapter_config.json"))
        if adapter != isinstance(self.accelerator.unwrap_model(self.model), PeftModel):
            kinds = ("an adapter", "a full model") if adapter else ("a full model", "an adapter")
            raise ValueError(
                f"resume_from_checkpoint={str(resume_from_checkpoint)!r} holds {kinds[0]}, this run trains {kinds[1]}"
            )
        critic = critic_of(self.model)
        critic_file = Path(resume_from_checkpoint) / CRITIC_FILE
        if critic is not None and not critic_file.exists():
            raise FileNotFoundError(
                f"the checkpoint {resume_from_checkpoint} has no critic ({CRITIC_FILE} is missing)"
            )
        self._load_policy(resume_from_checkpoint, model)
        if critic is not None:
            critic.load_state_dict(load_file(critic_file))

    def _load_best_model(self) -> None:
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            super()._load_best_model()
        else:
            assert self.state.best_model_checkpoint is not None
            self._load_policy(self.state.best_model_checkpoint)

    def _load_policy(self, folder: str, model: nn.Module | None = None) -> None:
        """Load what `_save` wrote; Trainer itself would put a converted model's weights nowhere, with a warning."""
        if isinstance(self.model, PreTrainedModel) and not self.is_fsdp_enabled and is_converted(self.model, folder):
            restore_weights(self.model, folder)
        else:
            super()._load_from_checkpoint(folder, model)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        # The critic has a file of its own.
        missing = list(without_critic(dict.fromkeys(load_result.missing_keys)))
        super()._issue_warnings_after_load(load_result._replace(missing_keys=missing))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        state_file = Path(checkpoint) / STATE_FILE
        if state_file.exists():
            state = json.loads(state_file.read_text())
            self.num_tokens = state["num_tokens"]
            if self.strategy.sums is not None:
                if state.get("sums") is None:
                    raise ValueError(
                        f"the checkpoint {checkpoint} has no sums of what the strategy has seen ({STATE_FILE}): was "
                        "it written with other options?"
                    )
                self.strategy.sums = self.strategy.sums.new_tensor(state["sums"])
        if self.synced_reference is not None:
            reference_file = Path(checkpoint) / REFERENCE_FILE
            if not reference_file.exists():
                raise FileNotFoundError(
                    f"the checkpoint {checkpoint} has no reference ({REFERENCE_FILE} is missing): was it written "
                    "without sync_ref_model?"
                )
            self.synced_reference.load_state(load_file(reference_file))
        if self.rollouts is not None:
            self.rollouts.load(checkpoint)
