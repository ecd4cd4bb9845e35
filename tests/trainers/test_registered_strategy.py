"""Strategies registered from a user's own module, through `StrategyTrainer` and `config_class`."""

from __future__ import annotations

import importlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import make_tokenizer
from harness import CaptureGradients, ReplayEngine, difference, logged, policy, record, reward, rows, weights

from hf_strategies import StrategyTrainer, config_class, make_strategy, register_strategy
from hf_strategies.rollout.hf_engine import GenerateEngine
from hf_strategies.strategies import STRATEGIES


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The user's module, imported; its names leave the table again after the test."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    known = dict(STRATEGIES)
    yield importlib.import_module("own_strategies")
    sys.modules.pop("own_strategies")
    STRATEGIES.clear()
    STRATEGIES.update(known)


def trainer_of(name: str, data: list[dict[str, Any]], **options: Any) -> tuple[StrategyTrainer, CaptureGradients]:
    capture = CaptureGradients()
    defaults = {
        "output_dir": tempfile.mkdtemp(),
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "learning_rate": 0.0,
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "num_train_epochs": 1,
        "per_device_train_batch_size": 8,
    }
    rewards = {"reward_funcs": reward} if STRATEGIES[name].online else {}
    trainer = StrategyTrainer(
        policy("llama"),
        name,
        config_class(name)(**{**defaults, **options}),
        data,
        processing_class=make_tokenizer(),
        callbacks=[capture],
        **rewards,
    )
    if trainer.rollouts is not None:
        trainer.rollouts.engine = ReplayEngine()
    return trainer, capture


def test_online(own: ModuleType) -> None:
    """The gradient is that of the formula in the docstring, row by row without padding, whatever the cut."""
    options = {"num_generations": 4, "max_completion_length": 8, "baseline": 0.5}
    trainer, captured = trainer_of("reinforce", rows("online_grpo", 2), **options)
    assert type(trainer.strategy) is own.Reinforce
    assert trainer.strategy.options.baseline == 0.5
    calls = record(trainer)
    trainer.train()
    ((_, batch),) = calls
    model = policy("llama").train()
    total, tokens = torch.zeros(()), 0
    for i in range(batch.num_rows):
        prompt = batch.prompt_ids[i][batch.prompt_mask[i]]
        completion = batch.completion_ids[i][batch.completion_mask[i]]
        logits = model(input_ids=torch.cat([prompt, completion]).unsqueeze(0)).logits[0]
        table = logits.log_softmax(dim=-1)[len(prompt) - 1 : -1]
        total = total - (float(batch.rewards[i]) - 0.5) * table.gather(1, completion.unsqueeze(1)).sum()
        tokens += len(completion)
    (total / tokens).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    assert difference(captured.steps[0], expected) < 1e-5
    assert logged(trainer, "loss") == pytest.approx([float(total) / tokens], rel=1e-5)
    assert logged(trainer, "reinforce_loss") == pytest.approx([float(total) / tokens], rel=1e-5)
    cut, cut_captured = trainer_of(
        "reinforce",
        rows("online_grpo", 2),
        **{**options, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8},
    )
    cut.train()
    assert difference(cut_captured.steps[0], expected) < 1e-5


def test_online_samples_and_learns(own: ModuleType) -> None:
    """With the trainer's own engine and a real learning rate: weights move and versions count."""
    trainer, _ = trainer_of(
        "reinforce",
        rows("online_grpo", 4),
        num_generations=2,
        max_completion_length=4,
        per_device_train_batch_size=4,
        learning_rate=0.05,
    )
    trainer.rollouts.engine = GenerateEngine(trainer.processing_class)
    before = weights(trainer.model)
    trainer.train()
    assert trainer.rollouts.version.current == trainer.state.global_step == 2
    assert any(not torch.equal(value, before[name]) for name, value in weights(trainer.model).items())


def test_offline(own: ModuleType) -> None:
    trainer, captured = trainer_of("margin", rows("dpo", 8), margin=50.0)
    assert trainer.prepare.reference is None
    trainer.train()
    cut, cut_captured = trainer_of(
        "margin", rows("dpo", 8), margin=50.0, per_device_train_batch_size=1, gradient_accumulation_steps=8
    )
    cut.train()
    assert difference(cut_captured.steps[0], captured.steps[0]) < 1e-5
    assert logged(cut, "loss") == pytest.approx(logged(trainer, "loss"), rel=1e-5)
    satisfied, _ = trainer_of("margin", rows("dpo", 8), margin=0.0)
    calls = record(satisfied)
    satisfied.train()
    ((logprobs, batch),) = calls
    logps = torch.where(batch.loss_mask, logprobs, 0.0).sum(dim=1).view(-1, 2)
    expected = (logps[:, 1] - logps[:, 0]).clamp(min=0.0).mean()
    assert logged(satisfied, "loss") == pytest.approx([float(expected)], rel=1e-5)


def test_config_holds_both_kinds_of_options(own: ModuleType) -> None:
    args = config_class("reinforce")(output_dir=tempfile.mkdtemp(), use_cpu=True, report_to=[], baseline=0.25)
    assert (args.baseline, args.num_generations, args.learning_rate) == (0.25, 8, 5e-5)
    with pytest.raises(ValueError, match=r"margin=-1.0: allowed is a number >= 0.0"):
        config_class("margin")(output_dir=tempfile.mkdtemp(), use_cpu=True, report_to=[], margin=-1.0)
    assert make_strategy("margin", margin=2.0).options.margin == 2.0
    with pytest.raises(ValueError, match=r"strategy 'margin' has no option 'margins', did you mean 'margin'\?"):
        make_strategy("margin", margins=2.0)


def test_documents_are_packed_by_name_as_by_class() -> None:
    # 20 tokens, at most 8 in a row: cut short, the document would lose 12 of them. Pieces share a token.
    data = [{"input_ids": list(range(6, 26))}, {"input_ids": [7]}, {"input_ids": [8, 9]}]
    trainer, _ = trainer_of("seq", data, max_length=8)
    examples = [example["rows"] for example in trainer.train_dataset]
    tokens = [[*row["prompt_ids"], *row["completion_ids"]] for rows_of in examples for row in rows_of]
    assert sorted(tokens) == [list(range(6, 14)), [8, 9], list(range(13, 21)), list(range(20, 26))]
    assert [len(rows_of) for rows_of in examples] == [1, 1, 2]
    assert trainer.dropped == {"train": {"empty_completion": 1}}


def test_rules_of_the_table_hold_for_own_strategies(own: ModuleType) -> None:
    with pytest.raises(ValueError, match="'reinforce' scores its own completions: reward_funcs is needed"):
        StrategyTrainer(policy("llama"), "reinforce", train_dataset=rows("online_grpo", 8))
    with pytest.raises(ValueError, match="strategy 'margin' is registered already, by Margin"):
        register_strategy("margin", own.Margin)
    with pytest.raises(TypeError, match="is not a subclass"):
        register_strategy("other", dict)  # type: ignore[arg-type]


def test_names_are_unknown_without_the_module() -> None:
    with pytest.raises(ValueError, match=r"unknown strategy 'reinforce' \(known: seq, sft, dpo,"):
        config_class("reinforce")
