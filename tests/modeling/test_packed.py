"""Products with weights in oneDNN's layout against plain ones."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
from conftest import EOS, make_model
from harness import lora
from torch import nn

from hf_strategies.modeling import packed
from hf_strategies.modeling.decoding import stream_completions
from hf_strategies.modeling.sampling import Sampling
from hf_strategies.modeling.sampling_weights import sampling_weights


def packable(dtype: torch.dtype, *values: Any) -> Any:
    """A parameter for a test that packs `dtype`; what packs depends on the processor, bfloat16 needs AVX-512."""
    skip = pytest.mark.skipif(not packed.can_pack(dtype), reason=f"this machine packs no {dtype} weights")
    return pytest.param(*values or (dtype,), marks=skip)


@pytest.fixture
def everything_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "SMALLEST_PACKED", 0)


def packed_layers(model: Any) -> list[nn.Module]:
    return [module for module in model.modules() if type(module) is nn.Linear and "forward" in module.__dict__]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [packable(torch.float32), packable(torch.bfloat16)])
def test_the_same_product(dtype: torch.dtype, bias: bool, everything_packs: None) -> None:
    layer = nn.Linear(48, 80, bias=bias).to(dtype)
    forwards = packed.packed_forwards([layer])
    assert forwards is not None
    (forward,) = forwards
    for shape in [(1, 48), (8, 1, 48), (2, 5, 48)]:
        x = torch.randn(shape).to(dtype)
        with torch.no_grad():
            torch.testing.assert_close(forward(x), layer(x))


def test_what_is_not_packed(everything_packs: None) -> None:
    """Other precisions, layers with a forward of their own, layers that are more than a product."""
    assert packed.packed_forwards([nn.Linear(4, 4).double()]) is None

    class Doubled(nn.Linear):
        pass

    replaced = nn.Linear(4, 4)
    replaced.forward = lambda x: x  # type: ignore[method-assign]
    plain = nn.Linear(4, 4)
    found = packed.linears_by_input(nn.ModuleList([Doubled(4, 4), replaced, plain]))
    assert found == [[plain]]
    mixed = [nn.Linear(4, 4), nn.Linear(4, 4).bfloat16()]
    assert packed.packed_forwards(mixed) is None


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
def test_layers_that_read_the_same_input(adapter: bool) -> None:
    """Queries, keys and values are one product, gate and up another; every layer is found once."""
    model = make_model("llama")
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    expected = [
        [attention.q_proj, attention.k_proj, attention.v_proj],
        [attention.o_proj],
        [mlp.gate_proj, mlp.up_proj],
        [mlp.down_proj],
    ]
    expected = [[id(layer) for layer in together] for together in expected]
    found = packed.linears_by_input(lora(model) if adapter else model)
    together = [[id(layer) for layer in layers] for layers in found]
    assert all(layers in together for layers in expected)
    everything = [number for layers in together for number in layers]
    assert len(everything) == len(set(everything))


@pytest.mark.parametrize("dtype", [packable(torch.float32), packable(torch.bfloat16)])
def test_one_product_for_layers_of_one_input(dtype: torch.dtype, everything_packs: None) -> None:
    """Any order of calls, the same input again, another input in between; biases of some layers; nothing is kept."""
    layers = [nn.Linear(48, size, bias=bias).to(dtype) for size, bias in ((80, True), (16, False), (24, True))]
    forwards = packed.packed_forwards(layers)
    assert forwards is not None
    x, y = torch.randn(4, 48).to(dtype), torch.randn(4, 48).to(dtype)
    with torch.no_grad():
        for index, inputs in [(0, x), (1, x), (2, x), (1, x), (1, y), (0, y), (0, x), (2, y), (2, x), (1, x)]:
            torch.testing.assert_close(forwards[index](inputs), layers[index](inputs))
    shared = packed.SharedInput(layers)
    for index in (2, 0, 1):
        shared.product(index, x)
    assert shared._input is None
    assert not shared._ready


def test_small_weights_stay_as_they_are() -> None:
    assert packed.packed_forwards([nn.Linear(255, 256)]) is None


@pytest.mark.parametrize("dtype", [packable(torch.float32, None), packable(torch.bfloat16)])
@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
def test_sampling_with_packed_weights(adapter: bool, dtype: torch.dtype | None, everything_packs: None) -> None:
    """Completions are those of the plain weights, tied head and adapter included; afterwards nothing is left of it."""
    base = make_model("llama", tie_word_embeddings=True)
    base.tie_weights()
    model = lora(base).eval() if adapter else base.eval()
    keys = [[(1, i, j) for j in range(4)] for i in range(2)]

    def sample() -> Any:
        return stream_completions(model, [[7, 8, 9], [10, 11]], 4, Sampling(12), keys, [EOS])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed, "can_pack", lambda dtype: False)
        with sampling_weights(model, dtype):
            assert not packed_layers(model)
            expected = sample()
    before = {name: (p.data_ptr(), p.detach().clone()) for name, p in model.named_parameters()}
    with sampling_weights(model, dtype):
        assert len(packed_layers(model)) == 2 * 7 + 1
        got = sample()
    assert not packed_layers(model)
    assert all(
        p.data_ptr() == before[name][0] and torch.equal(p, before[name][1]) for name, p in model.named_parameters()
    )
    for mine, theirs in zip(chain(*got), chain(*expected), strict=True):
        assert mine.ids == theirs.ids
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
