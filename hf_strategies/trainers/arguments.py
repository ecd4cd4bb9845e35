"""Configs: `transformers.TrainingArguments`, a strategy's own options and, for online ones, the rollout options."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields, make_dataclass
from types import NoneType
from typing import Any, TypeVar

from transformers import TrainingArguments

from hf_strategies.data.chat import check_template_kwargs
from hf_strategies.data.packing import PACKING_STRATEGIES
from hf_strategies.data.truncation import TRUNCATION_MODES
from hf_strategies.modeling.forward import ATTENTION_PATHS
from hf_strategies.options import Options, option
from hf_strategies.rollout.options import RolloutOptions
from hf_strategies.strategies import get_entry
from hf_strategies.strategies.sampler_correction import SamplerCorrectionOptions
from hf_strategies.trainers.reference import ReferenceArguments

T = TypeVar("T")


@dataclass
class StrategyArguments(Options, TrainingArguments):
    """What all strategies share, on top of `transformers.TrainingArguments`."""

    _VALID_DICT_FIELDS = [  # noqa: RUF012
        *TrainingArguments._VALID_DICT_FIELDS,
        "model_init_kwargs",
        "chat_template_kwargs",
    ]

    logging_steps: float = option(10, "Optimizer steps between two logs.")
    remove_unused_columns: bool = option(False, "Kept off: rewards read the dataset's other columns.")
    max_length: int | None = option(
        1024,
        "Most tokens of a row (prompt and completion) of offline data; unset: no cut.",
    )
    truncation_mode: str = option(
        "keep_start",
        "What becomes of rows longer than max_length: keep_start (the completion's end is cut off), keep_end (the "
        "beginning of the prompt, or of a document, is), drop, error.",
    )
    chat_template_path: str | None = option(
        None, "Chat template to use: a file, or the folder or Hub id of a tokenizer. Unset: the tokenizer's own."
    )
    chat_template_kwargs: dict[str, Any] | str | None = option(
        None, "Arguments of the chat template, as JSON; a row's column chat_template_kwargs goes before them."
    )
    eos_token: str | None = option(None, "End-of-sequence token to use. Unset: the tokenizer's own.")
    pad_token: str | None = option(None, "Padding token to use. Unset: the tokenizer's own, or its eos_token.")
    plain_text: bool = option(
        False, "Read special tokens that texts and messages spell out as plain text, so that no row forges a turn."
    )
    dataset_num_proc: int | None = option(None, "Processes that encode given rows; unset: the training process.")
    disable_dropout: bool | None = option(
        None,
        "Set every dropout rate to 0, LoRA's included; unset: where log-probabilities of passes are compared.",
    )
    router_aux_loss_coef: float = option(
        0.001,
        "Weight of the load-balancing loss of mixtures of experts, >= 0; 0 still reports it.",
    )
    attention_path: str = option(
        "auto",
        "How rows go through the model: stream (every shared prompt once, no padding), padded (the plain rectangle, "
        "and adapters as peft computes them), auto (stream where the model allows it and the first batch agrees).",
    )
    max_tokens_per_micro_batch: int | None = option(
        None,
        "Most tokens that go through the model at once, counted as they are computed; larger micro-batches are cut, "
        "with the same gradients. Unset: no bound.",
    )
    low_memory: bool = option(
        False,
        "Compute prompts in a pass of their own and completions in pieces on top of it, one row each unless "
        "max_tokens_per_micro_batch says more: the same gradients from less memory.",
    )
    model_init_kwargs: dict[str, Any] | str | None = option(
        None,
        "Keyword arguments of from_pretrained when the model is an id or path, as JSON.",
    )
    trust_remote_code: bool = option(False, "Run code that comes with the model. Never implied.")

    def __post_init__(self) -> None:
        for name in ("model_init_kwargs", "chat_template_kwargs"):
            self._decode(name)
        check_template_kwargs(self.chat_template_kwargs or {})
        super().__post_init__()

    def _decode(self, name: str) -> None:
        given = value = getattr(self, name)
        if isinstance(given, str):
            try:
                value = json.loads(given)
            except json.JSONDecodeError as error:
                raise ValueError(f"{name}={given!r} is no JSON: {error}") from None
        if not isinstance(value, dict | NoneType):
            raise ValueError(f"{name}={given!r}: allowed is a dict, as JSON, or None")
        setattr(self, name, value)

    @property
    def from_pretrained_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of ``from_pretrained`` for a model that is an id or path."""
        assert not isinstance(self.model_init_kwargs, str)  # decoded on construction
        return {"trust_remote_code": self.trust_remote_code, **(self.model_init_kwargs or {})}

    def validate(self) -> None:  # noqa: D102 - see Options
        super().validate()
        for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
            self.require_integer(name, 1)
        self.require_integer("seed", 0, 2**32 - 1)
        if self.data_seed is not None:
            self.require_integer("data_seed", 0)
        self.require_integer("dataloader_num_workers", 0)
        for name in ("learning_rate", "weight_decay", "max_grad_norm"):
            self.require_number(name, 0.0)
        self.require_number("num_train_epochs", above=0.0)
        if self.neftune_noise_alpha is not None:
            self.require_number("neftune_noise_alpha", 0.0)
        if self.max_steps != -1 and self.max_steps < 1:
            raise ValueError(
                f"max_steps={self.max_steps!r}: allowed is a whole number >= 1, or -1 for as many as num_train_epochs "
                "takes"
            )
        self._require_effect()
        self.require_number("router_aux_loss_coef", 0.0)
        self.require_one_of("attention_path", ATTENTION_PATHS)
        if self.max_tokens_per_micro_batch is not None:
            self.require_integer("max_tokens_per_micro_batch", 1)
        if self.max_length is not None:
            self.require_integer("max_length", 2)
        self.require_one_of("truncation_mode", TRUNCATION_MODES)
        if self.dataset_num_proc is not None:
            self.require_integer("dataset_num_proc", 1)

    def _require_effect(self) -> None:
        """Refuse what `transformers.TrainingArguments` offers and this trainer cannot do, or would ignore."""
        self.require_one_of("remove_unused_columns", (False,))
        self.require_one_of("train_sampling_strategy", ("random", "sequential"))
        if self.label_smoothing_factor != 0:
            raise ValueError(
                f"label_smoothing_factor={self.label_smoothing_factor!r}: allowed is 0, it would have no effect; seq "
                "and sft have label_smoothing"
            )
        if "inputs" in self.include_for_metrics:
            raise ValueError(
                f"include_for_metrics={self.include_for_metrics!r}: allowed is ['loss'], compute_metrics gets labels "
                "and predictions of the trained tokens"
            )
        if getattr(self.accelerator_config, "dispatch_batches", None):
            raise ValueError("accelerator_config.dispatch_batches=True: allowed are False and None")


@dataclass
class TextArguments(StrategyArguments):
    """What strategies over given texts share: how these fill batches."""

    dataset_text_field: str = option("text", "Column of texts, in the place of text.")
    completion_only_loss: bool | None = option(
        None,
        "Of prompt and completion the completion alone trains; unset: as True. True also demands rows that have a "
        "completion.",
    )
    assistant_only_loss: bool = option(
        False,
        "Of messages what the assistant wrote alone trains: by the chat template's generation markers, or by "
        "rendering turn by turn.",
    )
    packing: bool | None = option(
        None, "Put several texts into a row of max_length tokens, where they do not see each other; unset: seq does."
    )
    packing_strategy: str | None = option(
        None,
        "How texts are packed: bfd (best-fit-decreasing, long ones are cut off), bfd_split (long ones are cut into "
        "pieces), wrapped (one after another, cut where a row is full). Unset: bfd; for seq, bfd_split.",
    )
    eval_packing: bool | None = option(None, "Pack evaluation data; unset: as training data.")
    padding_free: bool | None = option(
        None,
        "Rows go through the model one after another, without padding: True demands it, False pads; unset: without "
        "padding where the model allows it.",
    )

    def validate(self) -> None:  # noqa: D102 - see Options
        super().validate()
        for name in ("packing", "eval_packing"):
            if getattr(self, name) and self.max_length is None:
                raise ValueError(f"{name}=True needs a max_length, the number of tokens of a packed row")
        if self.packing_strategy is not None:
            self.require_one_of("packing_strategy", PACKING_STRATEGIES)
            if self.packing is False and not self.eval_packing:
                raise ValueError(f"packing_strategy={self.packing_strategy!r} has no effect with packing=False")
        if self.padding_free is None:
            return
        path, other = ("stream", "padded") if self.padding_free else ("padded", "stream")
        if self.attention_path == other:
            raise ValueError(
                f"padding_free={self.padding_free!r} and attention_path={self.attention_path!r} contradict each other"
            )
        self.attention_path = path


@dataclass
class OnlineArguments(RolloutOptions, StrategyArguments):
    """What all online strategies share.

    A batch counts completions: ``per_device_train_batch_size`` completions per process and micro-step. One rollout
    makes ``per_device_train_batch_size * steps_per_generation`` completions per process, whole groups each.
    """

    @property
    def resolved_steps_per_generation(self) -> int:
        """Micro-steps one rollout is cut into."""
        return self.steps_per_generation or self.gradient_accumulation_steps

    @property
    def prompts_per_rollout(self) -> int:
        """Prompts per process and rollout."""
        return self.per_device_train_batch_size * self.resolved_steps_per_generation // self.num_generations

    @property
    def prompts_per_block(self) -> int:
        """Prompts per process that one optimizer step takes from a rollout; all where that is no whole number."""
        rows = self.per_device_train_batch_size * self.gradient_accumulation_steps
        whole = rows % self.num_generations == 0 and rows // self.num_generations < self.prompts_per_rollout
        return rows // self.num_generations if whole else self.prompts_per_rollout

    @property
    def resolved_max_policy_lag(self) -> int:
        """Optimizer steps that lie between a rollout's sampling and its last use, unless set by hand."""
        if self.max_policy_lag is not None:
            return self.max_policy_lag
        return self._steps_within_rollout

    @property
    def updates_within_rollout(self) -> bool:
        """Whether an optimizer step falls between two uses of a rollout, so that old log-probs must be kept."""
        return self._steps_within_rollout > 0

    @property
    def _steps_within_rollout(self) -> int:
        """Most optimizer steps between the first and the last use of a rollout.

        A rollout may start in the middle of a step, but only at multiples of what divides both its uses and the
        accumulation: 3 uses at accumulation 4 start at every place, 2 uses never reach over a step's end.
        """
        uses, accumulation = self.resolved_steps_per_generation * self.num_iterations, self.gradient_accumulation_steps
        return math.ceil((uses - math.gcd(uses, accumulation)) / accumulation)

    def _require_effect(self) -> None:
        super()._require_effect()
        self.require_one_of("train_sampling_strategy", ("random",))

    def check_rollouts(self, min_group_size: int) -> None:
        """Check that rollouts, micro-batches and groups fit together.

        Not part of `validate`: the same config may train offline on given groups, where none of it matters.

        Args:
            min_group_size: completions per prompt the strategy needs.

        Raises:
            ValueError: what does not divide, with the values that do.
        """
        if self.num_generations < min_group_size:
            raise ValueError(
                f"num_generations={self.num_generations}: the strategy compares the completions of a prompt, "
                f"allowed is a whole number >= {min_group_size}"
            )
        accumulation, steps = self.gradient_accumulation_steps, self.resolved_steps_per_generation
        if accumulation % steps and steps % accumulation:
            valid = [n for n in range(1, 4 * accumulation + 1) if accumulation % n == 0 or n % accumulation == 0]
            raise ValueError(
                f"steps_per_generation={steps} and gradient_accumulation_steps={accumulation} must divide one "
                f"another: allowed steps_per_generation are {', '.join(map(str, valid))} "
                f"and further multiples of {accumulation}"
            )
        rows = self.per_device_train_batch_size * steps
        if rows % self.num_generations:
            valid = [n for n in range(min_group_size, rows + 1) if rows % n == 0]
            allowed = (
                f"allowed num_generations are {', '.join(map(str, valid))}"
                if valid
                else "raise per_device_train_batch_size or steps_per_generation to a multiple of num_generations"
            )
            raise ValueError(
                f"num_generations={self.num_generations} does not divide the {rows} completions of a rollout "
                f"(per_device_train_batch_size={self.per_device_train_batch_size} * steps_per_generation={steps}): "
                f"{allowed}"
            )


def options_from(args: Any, options: type[T]) -> T:
    """The part of a config that belongs to ``options``; defaults where the config has no such field."""
    return options(**{f.name: getattr(args, f.name) for f in fields(options) if hasattr(args, f.name)})  # type: ignore[arg-type]


def strategy_options(args: Any, options: type[T]) -> T:
    """A strategy's part of a config, with what is ``auto`` there decided by the rest of the config."""
    chosen = options_from(args, options)
    if isinstance(chosen, SamplerCorrectionOptions) and chosen.sampler_correction == "auto":
        other_precision = isinstance(args, OnlineArguments) and args.sampling_dtype is not None
        chosen.sampler_correction = "token_truncate" if other_precision else "off"
    return chosen


def config_class(name: str) -> type[StrategyArguments]:
    """A config for any registered strategy, a user's own included: shared options plus the strategy's.

    Raises:
        ValueError: unknown strategy.
    """
    entry = get_entry(name)
    base = OnlineArguments if entry.online else TextArguments if entry.strategy.labelled else StrategyArguments
    bases: tuple[type, ...] = (entry.strategy.Options, base)
    if entry.strategy.may_need_reference():
        bases = (entry.strategy.Options, ReferenceArguments, base)
    return make_dataclass(f"{entry.strategy.__name__}Arguments", [], bases=bases)
