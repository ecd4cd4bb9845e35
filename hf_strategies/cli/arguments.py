"""Which model, which adapter, which rewards: what the commands and recipes ask for beside data and training."""

from __future__ import annotations

from dataclasses import dataclass

from peft import LoraConfig

from hf_strategies.modeling.embedded import embedded_model_path
from hf_strategies.options import Options, option


@dataclass
class ModelArguments(Options):
    """Which model, and which adapter on it."""

    model_name_or_path: str | None = option(None, "Hub id or path; unset: the embedded SmolLM2-135M-Instruct.")
    use_peft: bool = option(True, "Train a LoRA adapter; --no_use_peft trains the whole model.")
    lora_r: int = option(16, "Rank of the LoRA matrices, >= 1.")
    lora_alpha: int = option(32, "LoRA scale: updates are multiplied by alpha / r.")
    lora_dropout: float = option(0.0, "Dropout on the adapter's input, in [0, 1).")
    lora_target_modules: str = option("all-linear", "Modules that get an adapter: all-linear, or names by comma.")
    use_dora: bool = option(False, "Weight-decomposed adapters (DoRA).")
    use_rslora: bool = option(False, "Scale by alpha / sqrt(r) instead (rank-stabilised LoRA).")

    def validate(self) -> None:  # noqa: D102 - see Options
        super().validate()
        if isinstance(self.lora_target_modules, list):  # of a YAML file
            self.lora_target_modules = ",".join(map(str, self.lora_target_modules))
        self._require_types(["model_name_or_path", "lora_target_modules"])
        self.require_integer("lora_r", 1)
        self.require_integer("lora_alpha", 1)
        self.require_number("lora_dropout", 0.0, below=1.0)
        if self.model_name_or_path is not None and not self.model_name_or_path.strip():
            raise ValueError(f"model_name_or_path={self.model_name_or_path!r}: allowed is a Hub id or a path")
        if not all(name.strip() for name in self.lora_target_modules.split(",")):
            raise ValueError(
                f"lora_target_modules={self.lora_target_modules!r}: allowed are all-linear, or names by comma"
            )

    @property
    def policy(self) -> str:
        """Id or path of the policy; the embedded model when none is named."""
        return self.model_name_or_path or str(embedded_model_path())

    def peft_config(self) -> LoraConfig | None:
        """The adapter to train, or None for full fine-tuning."""
        if not self.use_peft:
            return None
        modules = self.lora_target_modules
        return LoraConfig(
            r=self.lora_r,
            lora_alpha=self.lora_alpha,
            lora_dropout=self.lora_dropout,
            target_modules=modules if modules == "all-linear" else [name.strip() for name in modules.split(",")],
            use_dora=self.use_dora,
            use_rslora=self.use_rslora,
            task_type="CAUSAL_LM",
        )


@dataclass
class RewardArguments(Options):
    """Which rewards."""

    reward_funcs: list[str] | None = option(
        None,
        "Rewards: accuracy, format (both for reasoning_gym tasks), module.function of your own, or the id of a "
        "sequence-classification model; unset: accuracy and format.",
    )
