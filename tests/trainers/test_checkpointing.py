"""Activation checkpointing: the layers run twice, the numbers are the same."""

from __future__ import annotations

from typing import Any

import pytest
from harness import NAMES, difference, lora, policy, run


@pytest.mark.parametrize("path", ["stream", "padded"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_adapters_get_the_same_gradients(name: str, reentrant: bool, path: str) -> None:
    """Pitfall A-33: with LoRA too, whose inputs want no gradient of their own; every B matrix gets one."""

    def gradients(**options: Any) -> dict[str, Any]:
        _, capture = run(name, lora(policy("llama")), attention_path=path, **options)
        return capture.steps[0]

    expected = gradients()
    got = gradients(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    assert difference(got, expected) < 1e-5
    assert all(bool(g.any()) for key, g in got.items() if "lora_B" in key)
