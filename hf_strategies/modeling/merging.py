"""An adapter added into the weights it adapts, for a while: sampling then pays for no adapter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from peft import PeftModel
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn


@contextmanager
def merged_adapter(model: Any) -> Iterator[bool]:
    """Inside this context a model with a plain LoRA adapter computes with merged weights.

    The merged weights are copies; afterwards the very tensors that were there are back. Merging in place and
    subtracting again would leave rounding behind.

    Args:
        model: unwrapped model; left as it is without an adapter, with one that is more than products of two matrices
            (DoRA, biases, saved modules), and on weights that are quantised, sharded, used by another layer too (a
            tied head), or of half precision, whose rounding would swallow small updates.

    Yields:
        Whether the adapter was merged.
    """
    layers = _mergeable(model) if isinstance(model, PeftModel) else None
    if layers is None:
        yield False
        return
    adapter = model.active_adapter
    weights = [cast(nn.Parameter, layer.get_base_layer().weight) for layer in layers]
    own: list[Tensor] = [weight.data for weight in weights]
    try:
        with torch.no_grad():
            for layer, weight in zip(layers, weights, strict=True):
                weight.data = weight.data + layer.get_delta_weight(adapter).to(weight.dtype)
        with model.disable_adapter():
            yield True
    finally:
        for weight, data in zip(weights, own, strict=True):
            weight.data = data


def _mergeable(model: PeftModel) -> list[LoraLinear] | None:
    """All adapted layers, if every one of them can be merged."""
    adapter = model.active_adapter
    config = model.peft_config.get(adapter) if isinstance(adapter, str) else None
    if config is None or getattr(config, "modules_to_save", None) or getattr(config, "use_dora", False):
        return None
    if getattr(config, "bias", "none") != "none" or getattr(config, "lora_bias", False):
        return None
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    layers: list[LoraLinear] = []
    for module in model.modules():
        if not isinstance(module, BaseTunerLayer):
            continue
        if type(module) is not LoraLinear or module.merged:
            return None
        if adapter not in module.lora_A:
            continue
        weight = module.get_base_layer().weight
        sharded = hasattr(weight, "ds_id") or getattr(weight, "device_mesh", None) is not None
        if sharded or uses[id(weight)] > 1 or weight.dtype not in (torch.float32, torch.float64):
            return None
        layers.append(module)
    return layers
