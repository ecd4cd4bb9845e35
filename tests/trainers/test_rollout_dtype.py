"""Rollouts from weights of another precision than those that train."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import make_model, make_tokenizer
from harness import lora

from hf_strategies import GRPOConfig, GRPOTrainer, PPOConfig, make_strategy
from hf_strategies.trainers.arguments import strategy_options


@pytest.mark.parametrize("config", [GRPOConfig, PPOConfig])
def test_auto(config: Any, tmp_path: Any) -> None:
    """On where another precision samples, off otherwise, and what is asked for in any case."""

    def resolved(**options: Any) -> str:
        args = config(output_dir=str(tmp_path), use_cpu=True, report_to=[], **options)
        strategy = "online_ppo" if config is PPOConfig else "online_grpo"
        return strategy_options(args, type(make_strategy(strategy).options)).sampler_correction

    assert resolved() == "off"
    assert resolved(rollout_dtype="bfloat16") == "token_truncate"
    assert resolved(rollout_dtype="bfloat16", sampler_correction="off") == "off"
    assert resolved(sampler_correction="sequence_mask") == "sequence_mask"


@pytest.mark.parametrize("engine", ["stream", "generate"])
def test_rollouts_in_half_precision(engine: str, tmp_path: Any) -> None:
    """Sampled from bfloat16 weights, trained in float32: the difference is seen, and the weights are untouched."""
    args = GRPOConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=8,
        max_steps=1,
        logging_steps=1,
        learning_rate=0.0,
        rollout_dtype="bfloat16",
        rollout_engine=engine,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        lora(make_model("llama")),
        lambda completion_ids, **kwargs: [float(len(ids)) for ids in completion_ids],
        args,
        [{"prompt": "abc"}, {"prompt": "de"}],
        processing_class=make_tokenizer(),
    )
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    (log,) = [entry for entry in trainer.state.log_history if "policy_loss" in entry]
    assert 1e-4 < log["sampling/sampling_logp_difference/mean"] < 0.2
    assert log["sampling/importance_sampling_ratio/mean"] == pytest.approx(1.0, abs=0.1)
    assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
