"""Weights for sampling: an adapter added into what it adapts, another precision, a layout for products of a few rows.

All three are copies; afterwards the very tensors that were there are back. Merging in place and subtracting again
would leave rounding behind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from hf_strategies.modeling.packed import packed_forward, plain_linears


@contextmanager
def sampling_weights(model: Any, dtype: torch.dtype | None = None) -> Iterator[bool]:
    """Inside this context a model computes what it would with its adapter, in another precision, and faster.

    Args:
        model: unwrapped model. An adapter is left as it is where it is more than products of two matrices (DoRA,
            biases, saved modules), and on weights that are quantised, sharded, used by another layer too (a tied
            head), or of half precision, whose rounding would swallow small updates.
        dtype: precision of all floating-point weights; None keeps each as it is.

    Yields:
        Whether an adapter was merged.
    """
    layers = (_mergeable(model) if isinstance(model, PeftModel) else None) or []
    adapted = {id(layer.get_base_layer().weight): layer for layer in layers}
    parameters = list(model.parameters())
    own: list[Tensor] = [parameter.data for parameter in parameters]
    linears = plain_linears(model)
    for merged in layers:
        for unused in (merged.lora_A, merged.lora_B):
            linears.pop(id(unused[model.active_adapter].weight), None)
    with ExitStack() as contexts:
        contexts.callback(_put_back, parameters, own)
        with torch.no_grad():
            for parameter, data in zip(parameters, own, strict=True):
                layer = adapted.get(id(parameter))
                if layer is not None:
                    parameter.data = layer.get_delta_weight(model.active_adapter).add_(data)
                if dtype is not None and parameter.is_floating_point():
                    parameter.data = parameter.data.to(dtype)
                for linear in linears.get(id(parameter), ()):
                    forward = packed_forward(linear)
                    if forward is not None:
                        linear.__dict__["forward"] = forward
                        contexts.callback(linear.__dict__.pop, "forward")
                        if dtype is None:
                            parameter.data = data  # the packed copy is the one that is read
        if layers:
            contexts.enter_context(model.disable_adapter())
        yield bool(layers)


def _put_back(parameters: list[nn.Parameter], own: list[Tensor]) -> None:
    for parameter, data in zip(parameters, own, strict=True):
        parameter.data = data


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
