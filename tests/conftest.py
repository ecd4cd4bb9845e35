"""Tiny random models and a character tokenizer. initializer_range is 0.5, because 0.02 hides most bugs."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PreTrainedTokenizerFast,
)

torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def scratch(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What tests and their processes leave in temporary folders goes where pytest cleans up."""
    folder = tmp_path_factory.mktemp("scratch")
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder)


CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 +-=:?.,\n"
SPECIALS = ["<pad>", "<bos>", "<eos>", "<end>", "<user>", "<assistant>"]
VOCAB = {token: i for i, token in enumerate([*SPECIALS, *CHARACTERS])}
PAD, BOS, EOS, END = 0, 1, 2, 3
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer(pad_is_eos: bool = False, chat: bool = True) -> PreTrainedTokenizerFast:
    """One token per character; unknown characters raise no error but are dropped by the BPE model."""
    core = Tokenizer(models.BPE(vocab=VOCAB, merges=[]))
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<eos>" if pad_is_eos else "<pad>",
        additional_special_tokens=["<end>", "<user>", "<assistant>"],
    )
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


COMMON = {
    "vocab_size": len(VOCAB),
    "initializer_range": 0.5,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        **COMMON,
    ),
    "gpt2": lambda: GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=256, **COMMON),
    "mixtral": lambda: MixtralConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=256,
        **COMMON,
    ),
}


def make_model(name: str = "llama", seed: int = 0, **changes: Any) -> Any:
    """A tiny random causal LM in float32."""
    config = CONFIGS[name]()
    for key, value in changes.items():
        setattr(config, key, value)
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def golden_case(case_id: str) -> dict[str, Any]:
    """A case of the seed's golden file, ``expected`` merged: recommended values override the seed's."""
    cases = json.loads((Path(__file__).parent / "golden" / "seed_cases.json").read_text())["cases"]
    case = next(case for case in cases if case["id"] == case_id)
    case["right"] = {**case["expected"]["seed"], **case["expected"].get("recommended", {})}
    return case


def golden_trl() -> dict[str, Any]:
    """Numbers from TRL's formulas."""
    return json.loads((Path(__file__).parent / "golden" / "trl_cases.json").read_text())


def f64(values: Any) -> torch.Tensor:
    """A float64 tensor; None becomes NaN."""

    def clean(v: Any) -> Any:
        return [clean(x) for x in v] if isinstance(v, list) else float("nan") if v is None else v

    return torch.tensor(clean(values), dtype=torch.float64)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture
def llama() -> Any:
    return make_model("llama")
