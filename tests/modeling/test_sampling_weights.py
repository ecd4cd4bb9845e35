"""Sampling with the adapter added into the weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import make_model
from harness import gradients, lora
from peft import LoraConfig, get_peft_model
from torch import nn

from hf_strategies.modeling.sampling_weights import sampling_weights

IDS = torch.tensor([[7, 8, 9, 10, 11]])


def snapshot(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_same_outputs_and_the_very_weights_back(kind: str) -> None:
    """Outputs within float32 noise; afterwards bit-equal weights, the same storage, the same trainable parameters."""
    model = lora(make_model(kind)).eval()
    before, expected = snapshot(model), model(IDS).logits.detach()
    pointers = {name: p.data_ptr() for name, p in model.named_parameters()}
    trainable = {name: p.requires_grad for name, p in model.named_parameters()}
    base_layer = next(m for m in model.modules() if hasattr(m, "lora_A")).get_base_layer()
    with torch.no_grad(), sampling_weights(model) as merged:
        assert merged
        assert not torch.equal(base_layer.weight, before_of(before, base_layer, model))
        with model.disable_adapter():
            pass
        torch.testing.assert_close(model(IDS).logits, expected, atol=1e-4, rtol=1e-4)
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name])
        assert p.data_ptr() == pointers[name]
        assert p.requires_grad == trainable[name]
    torch.testing.assert_close(model(IDS).logits, expected, atol=0, rtol=0)
    model(IDS).logits.sum().backward()
    assert any(bool(g.any()) for g in gradients(model).values())


def before_of(before: dict[str, torch.Tensor], layer: nn.Module, model: Any) -> torch.Tensor:
    name = next(name for name, module in model.named_modules() if module is layer)
    return before[f"{name}.weight"]


def test_no_adapter_code_runs_while_merged() -> None:
    model = lora(make_model("llama")).eval()
    called: list[str] = []
    for name, module in model.named_modules():
        if name.endswith("lora_A.default"):
            module.register_forward_hook(lambda *args: called.append("A"))
    model(IDS)
    assert called
    called.clear()
    with sampling_weights(model):
        model(IDS)
    assert not called


def test_weights_come_back_after_an_error() -> None:
    model = lora(make_model("llama"))
    before = snapshot(model)
    with pytest.raises(RuntimeError, match="stop"), sampling_weights(model):
        raise RuntimeError("stop")
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_what_is_not_merged() -> None:
    """More than two matrices, experts, half precision, no adapter: outputs are the model's own all the same."""
    half = make_model("llama").to(torch.bfloat16)
    cases = [
        make_model("llama"),
        get_peft_model(make_model("llama"), LoraConfig(target_modules="all-linear", use_dora=True)),
        get_peft_model(make_model("llama"), LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])),
        lora(make_model("mixtral")),
        get_peft_model(half, LoraConfig(target_modules="all-linear")),
    ]
    for model in cases:
        model.eval()
        expected = model(IDS).logits
        with torch.no_grad(), sampling_weights(model) as merged:
            assert not merged
            torch.testing.assert_close(model(IDS).logits, expected, atol=0, rtol=0)


def test_a_tied_head_is_not_merged() -> None:
    """Pitfall F-81: the head's adapter would move the input embedding too."""
    for tied in (True, False):
        base = make_model("llama", tie_word_embeddings=tied)
        base.tie_weights()
        model = lora(base, target_modules=["lm_head", "q_proj"]).eval()
        expected = model(IDS).logits
        with torch.no_grad(), sampling_weights(model) as merged:
            assert merged is not tied
            torch.testing.assert_close(model(IDS).logits, expected, atol=1e-4, rtol=1e-4)
