"""Getting a tokenizer and a policy ready, with the checks that need no weights done before any are loaded."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel, get_peft_model
from safetensors import safe_open
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

HALF_PRECISION = (torch.float16, torch.bfloat16)


def load_tokenizer(model: str | nn.Module, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Tokenizer of a model id, path or loaded model; a missing pad token becomes the end-of-sequence token.

    Raises:
        ValueError: the model does not say where it came from, or the tokenizer has neither pad nor end-of-sequence.
    """
    name = model if isinstance(model, str) else model.config._name_or_path  # type: ignore[union-attr]
    if not name:
        raise ValueError("processing_class is not given and the model does not say which tokenizer belongs to it")
    return ensure_pad_token(AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code))


def ensure_pad_token(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Give the tokenizer a pad token. Safe with pad == eos: masks here never come from ids."""
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token is None:
            raise ValueError("the tokenizer has neither pad_token nor eos_token; set one of them")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def read_config(model: str | nn.Module, init_kwargs: dict[str, Any]) -> Any:
    """Configuration of a model id, path or loaded model; no weights are read.

    Raises:
        TypeError: ``model`` is of another type.
    """
    if isinstance(model, str):
        keys = ("trust_remote_code", "revision", "cache_dir", "token", "subfolder")
        return AutoConfig.from_pretrained(model, **{k: v for k, v in init_kwargs.items() if k in keys})
    if not isinstance(model, PreTrainedModel | PeftModel):
        raise TypeError(f"model: got {type(model).__name__}, allowed are an id or path, PreTrainedModel, PeftModel")
    return model.config


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
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
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
        ValueError: an adapter config together with a `PeftModel`, or nothing to train.
    """
    if isinstance(model, str):
        model = AutoModelForCausalLM.from_pretrained(model, **{"dtype": torch.float32, **init_kwargs})
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
