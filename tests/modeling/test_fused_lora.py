"""Adapted layers in fewer passes, against peft's own."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from conftest import make_model
from harness import gradients, lora
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from hf_strategies.modeling import fused_lora
from hf_strategies.modeling.fused_lora import FusedLora, fuse_adapters

IDS = torch.tensor([[7, 8, 9, 10, 11], [12, 13, 14, 15, 16]])


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every fused call adds an entry."""
    made: list[int] = []
    apply = FusedLora.apply
    monkeypatch.setattr(FusedLora, "apply", lambda *args: made.append(1) or apply(*args), raising=False)
    return made


def step(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    logits = model(IDS).logits
    (logits.float() * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
    return logits.detach(), gradients(model)


def compare(model: Any, calls: list[int], used: int, tolerance: float = 1e-5) -> None:
    """Outputs and gradients of a model and of its fused copy; ``used`` fused calls per pass."""
    plain, fused = model, copy.deepcopy(model)
    fuse_adapters(fused)
    expected, expected_gradients = step(plain)
    assert not calls
    got, got_gradients = step(fused)
    assert len(calls) == used
    calls.clear()
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
    assert set(got_gradients) == set(expected_gradients)
    for name, gradient in expected_gradients.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(got_gradients[name], gradient, atol=tolerance * max(scale, 1e-3), rtol=tolerance)


def test_gradcheck() -> None:
    """Weights in double precision, with and without a bias, of inputs that do and do not need a gradient."""
    torch.manual_seed(0)
    x, w, a, b = (torch.randn(shape, dtype=torch.float64) for shape in ((2, 3, 4), (5, 4), (2, 4), (5, 2)))
    for bias in (None, torch.randn(5, dtype=torch.float64)):
        for x_needs in (False, True):
            inputs = (x.requires_grad_(x_needs), w, bias, a.requires_grad_(), b.requires_grad_(), 0.7)
            assert torch.autograd.gradcheck(FusedLora.apply, inputs)
            expected = x @ w.t() + 0.7 * (x @ a.t()) @ b.t() + (0.0 if bias is None else bias)
            torch.testing.assert_close(FusedLora.apply(*inputs), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_peft(calls: list[int], dtype: torch.dtype) -> None:
    model = lora(make_model("llama")).to(dtype)
    compare(model, calls, used=14, tolerance=1e-5 if dtype == torch.float32 else 1e-10)


@pytest.mark.parametrize("reentrant", [False, True])
def test_with_activation_checkpointing(calls: list[int], reentrant: bool) -> None:
    model = lora(make_model("llama")).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    compare(model, calls, used=28)


def test_under_autocast(calls: list[int]) -> None:
    """Products in half precision, gradients in the adapters' own."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        compare(lora(make_model("llama")), calls, used=14, tolerance=5e-2)


def test_left_to_peft(calls: list[int]) -> None:
    """Whatever is more than two products, or wants its parts to be called."""
    config = {"target_modules": "all-linear", "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    cases: dict[str, Any] = {
        "DoRA": get_peft_model(make_model("llama"), LoraConfig(use_dora=True, **config)),
        "adapter biases": get_peft_model(make_model("llama"), LoraConfig(lora_bias=True, **config)),
        "half precision": get_peft_model(make_model("llama").to(torch.bfloat16), LoraConfig(**config)),
        "Conv1D": lora(make_model("gpt2")),
        "two adapters": lora(make_model("llama")),
        "hooks": lora(make_model("llama")),
    }
    cases["two adapters"].add_adapter("other", LoraConfig(**config))
    cases["two adapters"].base_model.set_adapter(["default", "other"])
    for name, module in cases["hooks"].named_modules():
        if name.endswith("lora_A.default"):
            module.register_forward_hook(lambda *args: None)
    for model in cases.values():
        compare(model, calls, used=0, tolerance=1e-6)


def test_dropout_is_left_to_peft_while_it_is_on(calls: list[int]) -> None:
    model = lora(make_model("llama"), lora_dropout=0.5)
    fuse_adapters(model)
    model.train()(IDS)
    assert not calls
    model.eval()(IDS)
    assert len(calls) == 14


def test_switching_adapters(calls: list[int]) -> None:
    """Off, merged and another one: what peft computes."""
    plain = lora(make_model("llama")).eval()
    plain.add_adapter("other", LoraConfig(target_modules="all-linear", init_lora_weights=False))
    fused = copy.deepcopy(plain)
    fuse_adapters(fused)
    for used, change in ((0, "off"), (14, "other"), (0, "merged")):
        for model in (plain, fused):
            if change == "other":
                model.set_adapter("other")
            if change == "merged":
                model.merge_adapter()
        with torch.no_grad():
            with plain.disable_adapter() if change == "off" else nullcontext():
                expected = plain(IDS).logits
            with fused.disable_adapter() if change == "off" else nullcontext():
                torch.testing.assert_close(fused(IDS).logits, expected, atol=1e-5, rtol=1e-5)
        assert len(calls) == used
        calls.clear()


def test_a_copy_is_a_copy() -> None:
    """The forward of a copied model reads the copy's weights."""
    model = lora(make_model("llama"))
    fuse_adapters(model)
    other = copy.deepcopy(model)
    before = model(IDS).logits.detach()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    torch.testing.assert_close(model(IDS).logits, before, atol=0, rtol=0)
    assert not other(IDS).logits.any()
    layers = [module for module in other.modules() if isinstance(module, fused_lora.LoraLinear)]
    assert all(layer.forward.__self__ is layer for layer in layers)
    assert isinstance(layers[0].get_base_layer(), nn.Linear)
