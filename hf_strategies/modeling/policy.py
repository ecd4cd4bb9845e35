"""Getting a tokenizer and a policy ready, with the checks that need no weights done before any are loaded."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import safe_open
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import ADAPTER_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

HALF_PRECISION = (torch.float16, torch.bfloat16)


def read_config(model: str | nn.Module, init_kwargs: dict[str, Any]) -> Any:
    """Configuration of a model id, path or loaded model; no weights are read.

    Raises:
        TypeError: ``model`` is of another type.
        ValueError: an id or path that cannot be read, an adapter without its base model, or no causal LM.
    """
    if isinstance(model, str):
        config = _config_of(model, init_kwargs)
    elif isinstance(model, PreTrainedModel | PeftModel):
        config = model.config
    else:
        raise TypeError(f"model: got {type(model).__name__}, allowed are an id or path, PreTrainedModel, PeftModel")
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    no_head = isinstance(base, PreTrainedModel) and not base.can_generate()
    if no_head or getattr(config, "is_encoder_decoder", False):
        kind = type(base).__name__ if isinstance(base, PreTrainedModel) else config.model_type
        raise ValueError(f"model: {kind} is no causal LM; load it with AutoModelForCausalLM")
    return config


def _config_of(name: str, init_kwargs: dict[str, Any]) -> Any:
    if (Path(name) / ADAPTER_CONFIG_NAME).is_file():
        raise ValueError(
            f"model={name!r} is an adapter: to train it on, load it with "
            "AutoPeftModelForCausalLM.from_pretrained(..., is_trainable=True); for another one, name its base model"
        )
    keys = ("trust_remote_code", "revision", "cache_dir", "token", "subfolder")
    try:
        return AutoConfig.from_pretrained(name, **{k: v for k, v in init_kwargs.items() if k in keys})
    except (OSError, ValueError) as error:
        is_path = Path(name).exists() or name.startswith((".", "/", "~"))
        what = (
            "no folder of a model with a config.json" if is_path else "neither a folder nor an id that the Hub knows"
        )
        raise ValueError(f"model={name!r} is {what}: {error}") from error


def check_peft_config(peft_config: Any) -> None:
    """Raise unless an adapter can be trained here.

    Raises:
        TypeError: no `PeftConfig`.
        ValueError: one for inference, or one that puts tokens before the prompt: positions here are those of the rows.
    """
    if not isinstance(peft_config, PeftConfig):
        raise TypeError(f"peft_config: got {type(peft_config).__name__}, allowed is a PeftConfig, such as LoraConfig")
    if peft_config.is_prompt_learning:
        raise ValueError(
            f"peft_config: {type(peft_config).__name__} adds tokens to every prompt, which is not supported"
        )
    if peft_config.inference_mode:
        raise ValueError("peft_config.inference_mode=True: allowed is False, nothing would be trained")


def check_adapters(model: nn.Module) -> None:
    """Raise where a model brings adapters that would be overwritten or trained in part.

    Raises:
        ValueError: adapter layers without their `PeftModel`, several active adapters, or prompt learning.
    """
    if not isinstance(model, PeftModel):
        if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
            raise ValueError(
                "the model holds adapter layers of another PeftModel: give that PeftModel, or merge it first "
                "(merge_and_unload)"
            )
        return
    active = model.active_adapters if hasattr(model, "active_adapters") else [model.active_adapter]
    if len(active) > 1:
        raise ValueError(f"the model has several active adapters, {active}: allowed is one (model.set_adapter)")
    config = model.peft_config[active[0]]
    if config.is_prompt_learning:
        raise ValueError(f"model: {type(config).__name__} adds tokens to every prompt, which is not supported")


def check_sizes(
    config: Any, tokenizer: PreTrainedTokenizerBase, longest_row: int | None = None, largest_id: int = 0
) -> None:
    """Compare tokenizer and sequence lengths with what the model was built for.

    Args:
        config: the model's configuration.
        tokenizer: tokenizer the data is encoded with.
        longest_row: most tokens of a row (prompt and completion), if known.
        largest_id: largest token id of a row; rows may be given in ids of another tokenizer.

    Raises:
        ValueError: a token id the embedding has no row for, or a row longer than the model's positions.
    """
    text = config.get_text_config()
    vocab_size = getattr(text, "vocab_size", None)
    if vocab_size is not None and len(tokenizer) > vocab_size:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens, the model's embedding only {vocab_size}: "
            "resize the embedding (model.resize_token_embeddings) or use the model's own tokenizer"
        )
    if vocab_size is not None and largest_id >= vocab_size:
        raise ValueError(
            f"a row holds the token id {largest_id}, the model's embedding has {vocab_size}: was it encoded with "
            "another tokenizer?"
        )
    positions = getattr(text, "max_position_embeddings", None)
    if longest_row is not None and positions is not None and longest_row > positions:
        raise ValueError(
            f"the longest row has {longest_row} tokens (prompt and completion), the model holds {positions}: "
            "shorten or drop long prompts, or lower max_completion_length"
        )


def load_policy(model: str | nn.Module, init_kwargs: dict[str, Any], peft_config: PeftConfig | None) -> nn.Module:
    """The model to train.

    Args:
        model: Hub id, path, `PreTrainedModel`, or a `PeftModel` whose adapter is trained on.
        init_kwargs: keyword arguments of ``from_pretrained`` for an id or path; ``dtype`` defaults to float32.
        peft_config: adapter to put on a plain model.

    Returns:
        Unwrapped model with its trainable parameters; adapter weights in float32 where the base is half precision.

    Raises:
        ValueError: an adapter config together with a `PeftModel`, adapters that `check_adapters` refuses, or nothing
            to train.
    """
    if isinstance(model, str):
        model = AutoModelForCausalLM.from_pretrained(model, **{"dtype": torch.float32, **init_kwargs})
    check_adapters(model)
    if isinstance(model, PeftModel):
        if peft_config is not None:
            raise ValueError("peft_config is given together with a PeftModel: pass one of them")
    elif peft_config is not None:
        with warnings.catch_warnings():
            # peft asks by the old name of a property that transformers renamed.
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
            model = get_peft_model(model, peft_config)
    if isinstance(model, PeftModel):
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.dtype in HALF_PRECISION:
                # A half-precision adapter loses updates that are small beside its weights.
                parameter.data = parameter.data.float()
    if not any(parameter.requires_grad for parameter in model.parameters()):
        hint = (
            ": load the adapter with PeftModel.from_pretrained(..., is_trainable=True)"
            if isinstance(model, PeftModel)
            else ""
        )
        raise ValueError(f"the model has no trainable parameter{hint}")
    return model


def is_converted(model: PreTrainedModel, folder: str) -> bool:
    """Whether a saved full model has another layout than the one in memory.

    `save_pretrained` writes a model as it is published: experts that are one tensor in memory become one each.
    """
    index = Path(folder) / SAFE_WEIGHTS_INDEX_NAME
    file = Path(folder) / SAFE_WEIGHTS_NAME
    if index.exists():
        saved = set(json.loads(index.read_text())["weight_map"])
    elif file.exists():
        with safe_open(file, framework="pt") as content:
            saved = set(content.keys())
    else:
        return False
    return not saved <= set(model.state_dict())


def restore_weights(model: PreTrainedModel, folder: str) -> None:
    """Put the weights of a saved full model into one in memory, converting them as `from_pretrained` does.

    Raises:
        ValueError: the folder lacks some of the weights.
    """
    # In float32 nothing is lost before each weight is cast to the precision it has in memory.
    loader: Any = type(model)
    saved, report = loader.from_pretrained(
        folder, config=copy.deepcopy(model.config), dtype=torch.float32, output_loading_info=True
    )
    if report["missing_keys"]:
        raise ValueError(f"{folder} lacks weights of the model: {sorted(report['missing_keys'])}")
    model.load_state_dict(saved.state_dict(), strict=False)  # what else hangs in the model, a critic, stays


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout rate to zero, LoRA's and the attention's included.

    Two passes over the same tokens must agree wherever their log-probabilities are compared.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "attn_dropout", "dropout"):
            # Attention modules keep the rate as a number and hand it to the attention function.
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
