"""A run without an accelerator, with an adapter, warns of nothing that a user could do nothing about."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from conftest import make_model, make_tokenizer
from peft import LoraConfig

from hf_strategies import SFTConfig, SFTTrainer


@pytest.mark.skipif(torch.accelerator.is_available(), reason="pinned memory is of use here")
def test_no_warnings_of_other_libraries(tmp_path: Path) -> None:
    """Neither torch's (pinned memory) nor the one that peft provokes in transformers (a renamed property)."""
    args = SFTConfig(output_dir=str(tmp_path), max_steps=1, use_cpu=True, report_to=[], save_strategy="no")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        SFTTrainer(
            make_model("llama"),
            args=args,
            train_dataset=[{"text": "abc"}] * 8,
            processing_class=make_tokenizer(),
            peft_config=LoraConfig(target_modules="all-linear"),
        ).train()
    said = " ".join(str(warning.message) for warning in caught)
    assert "pin_memory" not in said
    assert "is_gradient_checkpointing" not in said
