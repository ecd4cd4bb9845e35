"""Rows without advantage are not computed, and nothing changes but the time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from conftest import make_model, make_tokenizer
from harness import CaptureGradients, ReplayEngine, difference, lora

from hf_strategies import GRPOConfig, GRPOTrainer
from hf_strategies.strategies.base import Strategy
from hf_strategies.strategies.grpo import GRPO


def half_decided(completion_ids: Sequence[list[int]], **kwargs: Any) -> list[float]:
    """Groups of four: every second one has equal rewards."""
    return [0.3 if (i // 4) % 2 else float(sum(ids) % 5) for i, ids in enumerate(completion_ids)]


def run(folder: Any, monkeypatch: pytest.MonkeyPatch, skip: bool, kind: str = "llama", **options: Any) -> Any:
    """Gradients of every step, and the log."""
    if not skip:
        monkeypatch.setattr(GRPO, "idle_rows", Strategy.idle_rows)
    capture = CaptureGradients()
    args = GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        num_generations=4,
        num_iterations=2,
        max_completion_length=8,
        max_steps=3,
        logging_steps=1,
        learning_rate=0.05,
        optim="sgd",
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )
    trainer = GRPOTrainer(
        lora(make_model(kind, initializer_range=0.3)),
        half_decided,
        args,
        [{"prompt": p} for p in ("abc", "bcdef", "cd", "defgh", "ea", "fbcd", "gxyz", "hq")],
        processing_class=make_tokenizer(),
        callbacks=[capture],
    )
    trainer.rollouts.engine = ReplayEngine(counted=True)
    trainer.train()
    return capture.steps, [entry for entry in trainer.state.log_history if "policy_loss" in entry]


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
def test_gradients_and_losses_are_the_same(loss_type: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skipped rows still count in the denominator; on the first pass and on a later one."""
    steps, log = run(tmp_path, monkeypatch, skip=True, loss_type=loss_type)
    expected, expected_log = run(tmp_path, monkeypatch, skip=False, loss_type=loss_type)
    assert len(steps) == len(expected) == 3
    for mine, theirs in zip(steps, expected, strict=True):
        assert difference(mine, theirs) < 1e-5
    for mine, theirs in zip(log, expected_log, strict=True):
        for name in ("loss", "policy_loss", "clip_ratio/region_mean", "num_tokens"):
            assert mine[name] == pytest.approx(theirs[name], abs=1e-6), name
        assert theirs.get("frac_reward_zero_std", 0.5) == 0.5
        # Half of the rows are not run; the padded rectangle they would have filled stays the same.
        assert mine["stream/sharing_factor"] > 1.8 * theirs["stream/sharing_factor"]


@pytest.mark.parametrize(("kind", "options"), [("mixtral", {}), ("llama", {"beta": 0.1})])
def test_rows_that_have_a_gradient_are_not_skipped(
    kind: str, options: dict[str, Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router's loss and a KL term come from every row."""
    _, log = run(tmp_path, monkeypatch, skip=True, kind=kind, **options)
    _, expected = run(tmp_path, monkeypatch, skip=False, kind=kind, **options)
    for mine, theirs in zip(log, expected, strict=True):
        assert mine["stream/sharing_factor"] == theirs["stream/sharing_factor"]
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-7)
