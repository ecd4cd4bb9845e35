"""What a run of DPO keeps, logs and prints beside its loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import ReplayEngine, build, logged, policy, rows
from test_resume import assert_resumes

from hf_strategies import OnlineDPOConfig
from hf_strategies.preference import bco_pair

BCO: dict[str, Any] = {"loss_type": "bco_pair", "bco_running_mean": True, "beta": 0.5}

SAVED: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "num_train_epochs": 2}


def test_running_mean_by_hand() -> None:
    """The shift is the mean of all rewards of earlier steps, 0 in the first one; evaluation does not move it."""
    run = build(
        "dpo",
        policy("llama"),
        rows("dpo", 5),
        trainer={"eval_dataset": rows("dpo", 3)},
        eval_strategy="steps",
        eval_steps=1,
        per_device_train_batch_size=1,
        learning_rate=0.05,
        **BCO,
    )
    run.train()
    chosen, rejected = (torch.tensor(logged(run, f"rewards/{side}")) for side in ("chosen", "rejected"))
    seen = torch.stack([chosen, rejected], dim=1).flatten()
    shifts = [float(seen[: 2 * step].mean()) if step else 0.0 for step in range(5)]
    assert max(map(abs, shifts)) > 1e-2
    for step, loss in enumerate(logged(run, "dpo_loss")):
        expected = bco_pair(chosen[step : step + 1], rejected[step : step + 1], shifts[step])
        assert loss == pytest.approx(float(expected), rel=1e-5)
    assert float(run.strategy.sums[0] / run.strategy.sums[1]) == pytest.approx(float(seen.mean()), rel=1e-5)


def test_running_mean_does_not_depend_on_the_cut() -> None:
    losses = []
    for size, accumulation in ((4, 1), (1, 4)):
        run = build(
            "dpo",
            policy("llama"),
            rows("dpo", 12),
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulation,
            learning_rate=0.05,
            **BCO,
        )
        run.train()
        losses.append(logged(run, "loss"))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert len(losses[0]) == 3


def test_running_mean_after_resume(tmp_path: Path) -> None:
    """Pitfall F-89."""
    assert_resumes("dpo", lambda: policy("llama"), tmp_path, **BCO)
    (state,) = tmp_path.rglob("checkpoint-3/strategy_state.json")
    total, count = json.loads(state.read_text())["sums"]
    assert count == 3 * 2 * 2 * 2  # steps, micro-batches, pairs, sides
    assert total != 0
    plain = build("dpo", policy("llama"), rows("dpo", 8), max_steps=2, output_dir=str(tmp_path / "plain"), **SAVED)
    plain.train()
    late = build("dpo", policy("llama"), rows("dpo", 8), max_steps=2, **BCO)
    with pytest.raises(ValueError, match="has no sums of what the strategy has seen"):
        late.train(resume_from_checkpoint=str(tmp_path / "plain" / "checkpoint-1"))


def test_missing_eos_penalty() -> None:
    """Completions at the length limit lose, in reward, table and choice of the pair."""

    def longer_is_better(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        return [float(len(ids)) for ids in completion_ids]

    tables = []
    for penalty in (None, 100.0):
        run = build(
            "online_dpo",
            engine=ReplayEngine(lengths=(8, 3)),
            reward_funcs=longer_is_better,
            num_generations=2,
            per_device_train_batch_size=4,
            missing_eos_penalty=penalty,
            log_completions=True,
        )
        run.train()
        tables.append(run.rollouts.last_table)
    plain, punished = tables
    for before, after in zip(plain, punished, strict=True):
        cut_off = before["reward"] == 8.0
        assert after["reward"] == before["reward"] - 100.0 * cut_off
        assert (before["trained as"], after["trained as"]) == (
            ("chosen", "rejected") if cut_off else ("rejected", "chosen")
        )
    with pytest.raises(ValueError, match="missing_eos_penalty=0"):
        OnlineDPOConfig(output_dir="x", missing_eos_penalty=0.0)


def test_completions_are_printed_with_their_use(capsys: pytest.CaptureFixture[str]) -> None:
    run = build("online_dpo", log_completions=True, num_generations=4)
    run.train()
    printed = capsys.readouterr().out
    assert "trained as" in printed
    table = printed.split("{")[0]  # the figures after it speak of both too
    assert table.count("chosen") == table.count("rejected") == 2  # one pair of each of two prompts


def test_name_that_users_of_trl_know() -> None:
    assert OnlineDPOConfig(output_dir="x", max_new_tokens=7).max_completion_length == 7
    with pytest.raises(ValueError, match="max_new_tokens=7 and max_completion_length=9 are names of one option"):
        OnlineDPOConfig(output_dir="x", max_new_tokens=7, max_completion_length=9)


def test_token_metrics_of_a_run() -> None:
    run = build("dpo", policy("llama"), rows("dpo", 8))
    run.train()
    (entry,) = [entry for entry in run.state.log_history if "loss" in entry]
    names = {f"{kind}/{side}" for kind in ("rewards", "logps", "logits") for side in ("chosen", "rejected")}
    assert names | {"rewards/margins", "rewards/accuracies", "mean_token_accuracy", "entropy"} <= entry.keys()
    # By the model's plain forward, over the chosen completions.
    totals, count = 0.0, 0
    for row in (example["rows"][0] for example in run.train_dataset):
        with torch.no_grad():
            logits = policy("llama").eval()(input_ids=torch.tensor([row["prompt_ids"] + row["completion_ids"]])).logits
        totals += float(logits[0, len(row["prompt_ids"]) - 1 : -1].mean(dim=-1).sum())
        count += len(row["completion_ids"])
    assert entry["logits/chosen"] == pytest.approx(totals / count, abs=1e-4)
