"""Low-rank adapters without passes of their own over the output: y = x W^T + s (x A^T) B^T (arXiv 2106.09685).

peft computes the two terms, scales the second and adds them: three passes over [T, out] forward and two backward, for
matrices of rank 16. Here the scale is applied to [T, r] and the second product adds into the first.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear


class FusedLora(torch.autograd.Function):
    """The whole layer, its own weight frozen."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float
    ) -> Tensor:
        """Tensors x [..., in], weight [out, in], bias [out] or None, a [r, in], b [out, r] -> [..., out]."""
        flat = x.reshape(-1, x.shape[-1])
        low = (flat @ a.t()).mul_(scale)
        out = linear(flat, weight, bias).addmm_(low, b.t())
        ctx.save_for_backward(flat, low, weight, a, b)
        ctx.scale = scale
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Gradients of the inputs and of the adapter."""
        flat, low, weight, a, b = ctx.saved_tensors
        needs_x, _, _, needs_a, needs_b, _ = ctx.needs_input_grad
        grad_x = grad_a = grad_b = None
        shape = (*grad.shape[:-1], flat.shape[-1])
        grad = grad.reshape(-1, grad.shape[-1])
        if needs_x or needs_a:
            grad_low = (grad @ b).mul_(ctx.scale)
            if needs_x:
                grad_x = (grad @ weight).addmm_(grad_low, a).view(shape)
            if needs_a:
                grad_a = grad_low.t() @ flat
        if needs_b:
            grad_b = grad.t() @ low
        return grad_x, None, None, grad_a, grad_b, None


def _parts(layer: LoraLinear) -> tuple[nn.Module, nn.Module, nn.Module, float] | None:
    """Base layer, A, B and scale, if the layer computes nothing else at the moment."""
    active = layer.active_adapters
    if layer.disable_adapters or layer.merged or len(active) != 1 or active[0] not in layer.lora_A:
        return None
    name = active[0]
    base, a, b = layer.get_base_layer(), layer.lora_A[name], layer.lora_B[name]
    dropout = layer.lora_dropout[name]
    dropped = isinstance(dropout, nn.Dropout) and dropout.training and dropout.p > 0
    if dropped or not isinstance(dropout, nn.Dropout | nn.Identity) or name in getattr(layer, "lora_variant", {}):
        return None
    if type(base) is not nn.Linear or getattr(layer, "use_dora", {}).get(name) or b.bias is not None:
        return None
    for module in (base, a, b):
        weight: Any = module.weight
        # Sharded weights are gathered by hooks, and whoever hooks into a layer wants it to be called.
        if type(weight) is not nn.Parameter or hasattr(weight, "ds_id") or hasattr(module, "_hf_hook"):
            return None
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
            return None
    if base.weight.requires_grad or (base.bias is not None and base.bias.requires_grad):
        return None
    return base, a, b, float(layer.scaling[name])


def _forward(layer: LoraLinear, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """What stands in for the forward of an adapted layer."""
    parts = None if args or kwargs else _parts(layer)
    if parts is not None:
        base, a, b, scale = parts
        tensors: list[Any] = [x, base.weight, base.bias, a.weight, b.weight]
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            tensors = [None if tensor is None else tensor.to(dtype) for tensor in tensors]
        # Adapters in another precision than what they adapt are peft's own affair.
        if len({tensor.dtype for tensor in tensors if tensor is not None}) == 1:
            return FusedLora.apply(*tensors, scale)
    return type(layer).forward(layer, x, *args, **kwargs)


def fuse_adapters(model: nn.Module) -> int:
    """Let the adapted linear layers of a model compute as `FusedLora` wherever they compute nothing else.

    Everything else stays peft's: dropout that is on, DoRA, several adapters, quantised or sharded weights, layers that
    someone hooks into.

    Returns:
        The number of layers.
    """
    layers: list[Any] = [module for module in model.modules() if type(module) is LoraLinear]
    for layer in layers:
        layer.forward = MethodType(_forward, layer)
    return len(layers)
