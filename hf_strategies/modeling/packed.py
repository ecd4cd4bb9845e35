"""Linear layers whose weights lie in memory in the order in which a processor reads them.

A product of a few rows, as in decoding, is bound by reading the weights. oneDNN reads weights that it has laid out
itself up to twice as fast as plain ones; what is computed is the same product.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from functools import cache, partial

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.nn.functional import linear

# Smaller weights stay in the processor's cache either way.
SMALLEST_PACKED = 2**16
# Names of layers that models give the same input, one after another.
READ_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


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


class SharedInput:
    """One product for several layers that read the same input, as those of queries, keys and values do.

    The first layer that is called computes for all of them; each of the others takes what lies ready for it. A layer
    that is given another tensor computes anew, so what comes out is right in any order of calls, as long as nobody
    writes into an input that others still have to read.

    Args:
        layers: with weights [out_i, in], which are copied as they are now, with the biases.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        zeros = [layer.weight.new_zeros(layer.out_features) for layer in layers]
        biases = [zero if layer.bias is None else layer.bias.data for zero, layer in zip(zeros, layers, strict=True)]
        self.bias = None if all(layer.bias is None for layer in layers) else torch.cat(biases)
        self.sizes = [layer.out_features for layer in layers]
        self.packed = pack(torch.cat([layer.weight.data for layer in layers]))
        self._input: Tensor | None = None
        self._ready: dict[int, Tensor] = {}

    def product(self, index: int, inputs: Tensor) -> Tensor:
        """What layer ``index`` makes of ``inputs`` [..., in]."""
        if inputs is not self._input or index not in self._ready:
            self._input = inputs
            self._ready = dict(enumerate(packed_linear(self.packed, self.bias, inputs).split(self.sizes, dim=-1)))
        result = self._ready.pop(index)
        if not self._ready:
            self._input = None  # nothing of a long prompt stays behind
        return result


def packed_forwards(layers: Sequence[nn.Linear]) -> list[Callable[[Tensor], Tensor]] | None:
    """What stands in for the forwards of layers with the same input, without gradient; None: nothing to gain.

    Args:
        layers: one or more of the lists of `linears_by_input`. Weights are copied as they are now.
    """
    weights = [layer.weight.data for layer in layers]
    same = len({(weight.dtype, weight.device) for weight in weights}) == 1
    size = sum(weight.numel() for weight in weights)
    if not same or weights[0].device.type != "cpu" or size < SMALLEST_PACKED or not can_pack(weights[0].dtype):
        return None
    if len(layers) == 1:
        return [partial(packed_linear, pack(weights[0]), layers[0].bias)]
    shared = SharedInput(layers)
    return [partial(shared.product, index) for index in range(len(layers))]


def linears_by_input(model: nn.Module, without: Iterable[int] = ()) -> list[list[nn.Linear]]:
    """The layers of a model that are products with a weight and nothing else, those with the same input together.

    Args:
        model: any.
        without: ids of layers to leave out.
    """
    found: list[list[nn.Linear]] = []
    seen = set(without)
    for parent in model.modules():
        plain = {name: layer for name, child in parent.named_children() if (layer := _plain(child, seen))}
        seen.update(map(id, plain.values()))  # an adapted layer is met again within its adapter
        for names in READ_TOGETHER:
            if all(name in plain for name in names):
                found.append([plain.pop(name) for name in names])
        found.extend([layer] for layer in plain.values())
    return found


def _plain(child: nn.Module, without: Container[int]) -> nn.Linear | None:
    """The plain layer that a child is, or that its adapter wraps."""
    layer = child.get_base_layer() if isinstance(child, BaseTunerLayer) else child
    # A subclass, a forward of its own or a weight of its own kind means that someone else computes the product.
    if not isinstance(layer, nn.Linear) or type(layer) is not nn.Linear or "forward" in layer.__dict__:
        return None
    return layer if type(layer.weight) is nn.Parameter and id(layer) not in without else None
