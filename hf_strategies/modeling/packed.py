"""Linear layers whose weights lie in memory in the order in which a processor reads them.

A product of a few rows, as in decoding, is bound by reading the weights. oneDNN reads weights that it has laid out
itself up to twice as fast as plain ones; what is computed is the same product.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

# Smaller weights stay in the processor's cache either way.
SMALLEST_PACKED = 2**16


def pack(weight: Tensor) -> Tensor:
    """A weight [out, in] in oneDNN's own layout, which only `packed_linear` can read."""
    return torch.ops.mkldnn._reorder_linear_weight(weight)


def packed_linear(packed: Tensor, bias: Tensor | None, inputs: Tensor) -> Tensor:
    """``inputs`` [..., in] times a packed weight [out, in], plus ``bias`` [out]; returns [..., out]."""
    return torch.ops.mkldnn._linear_pointwise(inputs, packed, bias, "none", [], "")


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether this torch on this processor packs weights of a precision, and computes the right thing with them."""
    if dtype not in (torch.float32, torch.bfloat16):
        return False
    weight, bias = torch.linspace(-1, 1, 24 * 16).view(24, 16).to(dtype), torch.linspace(-1, 1, 24).to(dtype)
    inputs = torch.linspace(-1, 1, 3 * 16).view(3, 1, 16).to(dtype)
    try:
        result = packed_linear(pack(weight), bias, inputs)
    except (AttributeError, RuntimeError):  # the operators are not public: builds without oneDNN lack them
        return False
    expected = linear(inputs.double(), weight.double(), bias.double())
    return bool(torch.allclose(result.double(), expected, atol=20 * torch.finfo(dtype).eps))


def packed_forward(layer: nn.Linear) -> Callable[[Tensor], Tensor] | None:
    """What stands in for a layer's forward, without gradient; None where there is nothing to gain.

    Args:
        layer: whose weight is copied as it is now; its bias is read when it is used.
    """
    weight = layer.weight.data
    packable = weight.device.type == "cpu" and weight.numel() >= SMALLEST_PACKED and can_pack(weight.dtype)
    return partial(packed_linear, pack(weight), layer.bias) if packable else None


def plain_linears(model: nn.Module) -> dict[int, list[nn.Linear]]:
    """The layers of a model that are products with a weight and nothing else, by the id of that weight."""
    found: dict[int, list[nn.Linear]] = {}
    for module in model.modules():
        # A forward of its own, or a weight of its own kind, means that someone else computes the product.
        if type(module) is nn.Linear and "forward" not in module.__dict__ and type(module.weight) is nn.Parameter:
            found.setdefault(id(module.weight), []).append(module)
    return found
