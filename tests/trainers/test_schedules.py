"""Learning-rate schedules from a YAML file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import make_model, make_tokenizer

from hf_strategies import SFTConfig, SFTTrainer
from hf_strategies.cli.parser import StrategyParser

PAGE = (Path(__file__).parents[2] / "docs" / "sft.md").read_text(encoding="utf-8")
COSINE = [1.0, 0.854, 0.5, 0.146]
EXPECTED = {
    "cosine_with_min_lr": [0.0, 0.5, 1.0, 0.966, 0.868, 0.722, 0.55, 0.378, 0.232, 0.134],
    "warmup_stable_decay": [0.0, 0.5, 1.0, 1.0, 1.0, 1.0, *COSINE],
    "cosine_with_restarts": [0.0, 0.5, *COSINE, *COSINE],
}


def documented() -> list[dict[str, Any]]:
    """Schedules of the page."""
    section = PAGE.split("\n## Learning rates\n")[1].split("\n## ")[0]
    return [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)]


@pytest.mark.parametrize("schedule", documented(), ids=lambda schedule: schedule["lr_scheduler_type"])
def test_schedules_of_the_page(schedule: dict[str, Any], tmp_path: Path) -> None:
    """Ten steps, two of them warm-up, towards a rate of 1."""
    run = {
        "output_dir": str(tmp_path / "out"),
        "use_cpu": True,
        "max_steps": 10,
        "warmup_steps": 2,
        "learning_rate": 1.0,
        "max_grad_norm": 1.0,
        "logging_steps": 1,
        "per_device_train_batch_size": 1,
        "report_to": "none",
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run | schedule))
    (args,) = StrategyParser([SFTConfig]).parse(["--config", str(tmp_path / "run.yaml")])
    trainer = SFTTrainer(make_model(), args, [{"text": "abc"}] * 10, processing_class=make_tokenizer())
    trainer.train()
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert rates == pytest.approx(EXPECTED[schedule["lr_scheduler_type"]], abs=1e-3)


def test_the_page_has_them_all() -> None:
    assert {schedule["lr_scheduler_type"] for schedule in documented()} == set(EXPECTED)
