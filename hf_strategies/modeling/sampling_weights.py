"""Weights for sampling: an adapter added into what it adapts, another precision, a layout for products of a few rows.

All three are copies; afterwards the very tensors that were there are back. Merging in place and subtracting again
would leave rounding behind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from hf_strategies.modeling.packed import linears_by_input, packed_forwards


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
    own: dict[Tensor, Tensor] = {parameter: parameter.data for parameter in model.parameters()}

    def convert(parameter: Tensor) -> None:
        layer, data = adapted.get(id(parameter)), own[parameter]
        if layer is not None:
            data = layer.get_delta_weight(model.active_adapter).add_(data)
        parameter.data = data.to(dtype) if dtype is not None and parameter.is_floating_point() else data

    unread = [id(part[model.active_adapter]) for layer in layers for part in (layer.lora_A, layer.lora_B)]
    packable = linears_by_input(model, without=unread)
    weights = {id(layer.weight) for together in packable for layer in together}
    with ExitStack() as contexts:
        contexts.callback(_put_back, own)
        with torch.no_grad():
            for parameter in own:
                if id(parameter) not in weights:
                    convert(parameter)
            for together in packable:
                for linear in together:
                    convert(linear.weight)
                forwards = packed_forwards(together)
                if forwards is None:
                    continue
                for linear, forward in zip(together, forwards, strict=True):
                    contexts.enter_context(_calling(linear, forward))
                    if dtype is None:
                        linear.weight.data = own[linear.weight]  # the packed copy is the one that is read
        for layer in layers:
            contexts.enter_context(_calling(layer, layer.get_base_layer()))
        yield bool(layers)


@contextmanager
def _calling(module: nn.Module, forward: Callable[..., Tensor]) -> Iterator[None]:
    """Inside this context something else computes a module's forward."""
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if before is not None:
            module.__dict__["forward"] = before


def _put_back(own: Mapping[Tensor, Tensor]) -> None:
    for parameter, data in own.items():
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
