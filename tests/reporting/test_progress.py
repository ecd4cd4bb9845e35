"""What the progress bar says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerControl, TrainerState

from hf_strategies.reporting.progress import StrategyProgress


def test_figures_of_a_rollout_stay_while_it_is_used_again(capsys: pytest.CaptureFixture[str]) -> None:
    """The second log of a rollout has no reward: the bar keeps it, in its place, beside the new loss."""
    bar, args, control = StrategyProgress(), SimpleNamespace(), TrainerControl()
    state = TrainerState(is_world_process_zero=True, is_local_process_zero=True, max_steps=2)

    def shown() -> Any:
        return bar.training_bar.postfix

    bar.on_train_begin(args, state, control)
    bar.on_log(args, state, control, {"loss": 0.5, "reward": 0.25, "epoch": 1.0})
    assert shown() == "reward=0.25, loss=0.5"
    bar.on_log(args, state, control, {"loss": 0.125})
    assert shown() == "reward=0.25, loss=0.125"
    bar.on_log(args, state, control, {"train_runtime": 1.0})
    assert shown() == "reward=0.25, loss=0.125"
    bar.on_train_end(args, state, control)
    bar.on_train_begin(args, state, control)
    bar.on_log(args, state, control, {"loss": 1.0})
    assert shown() == "loss=1"
    bar.on_train_end(args, state, control)
    assert "it/s" in capsys.readouterr().err
