"""The causal LM inside whatever wraps it."""

from __future__ import annotations

from typing import Any


def causal_lm_of(model: Any) -> Any:
    """The Hugging Face causal LM inside a PEFT model (or the model itself)."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def unwrapped_lm(model: Any) -> Any:
    """The causal LM inside wrappers and adapters."""
    while not hasattr(model, "get_output_embeddings") and hasattr(model, "module"):
        model = model.module
    return causal_lm_of(model)
