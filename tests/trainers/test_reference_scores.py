"""The reference's log-probabilities, computed once before training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_tokenizer
from datasets import Dataset
from harness import build, logged, lora, needs, policy, rows, weights
from torch import Tensor

from hf_strategies import DPOConfig, SFTConfig
from hf_strategies.batch import Batch
from hf_strategies.trainers.preparation import Preparation

OPTIONS: dict[str, Any] = {
    "per_device_train_batch_size": 3,
    "gradient_accumulation_steps": 2,
    "per_device_eval_batch_size": 4,
    "num_train_epochs": 2,
    "learning_rate": 0.05,
}
POLICIES: dict[str, Callable[[], Any]] = {
    "full": lambda: policy("llama"),
    "gpt2": lambda: policy("gpt2"),
    "fresh": lambda: lora(policy("llama"), nonzero=False),
    "trained": lambda: lora(policy("llama")),
    "bias": lambda: lora(policy("gpt2"), bias="all"),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_STRATEGIES_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "reference"


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows that a reference was asked about."""
    count: list[int] = []
    score = Preparation.score_reference

    def counting(self: Preparation, model: Any, batch: Batch) -> Tensor:
        count.append(batch.num_rows)
        return score(self, model, batch)

    monkeypatch.setattr(Preparation, "score_reference", counting)
    return count


def made(kind: str, precompute: bool, name: str = "dpo", explicit: bool = False, **options: Any) -> Any:
    trainer = {"eval_dataset": rows(name, 6), **(needs(name, "llama") if explicit else {})}
    options = {**OPTIONS, "precompute_ref_log_probs": precompute, **options}
    return build(name, POLICIES[kind](), rows(name, 8), trainer=trainer, **options)


@pytest.mark.parametrize("name", ["dpo", "grpo"])
@pytest.mark.parametrize("kind", ["full", "gpt2", "fresh", "trained", "bias", "explicit"])
def test_the_same_as_on_the_fly(name: str, kind: str, scored: list[int]) -> None:
    """Pitfalls C-56, C-57: shuffled, over two epochs; the random state, the order of rows and evaluation stay."""
    explicit, kind = kind == "explicit", "full" if kind == "explicit" else kind
    torch.manual_seed(7)
    plain = made(kind, False, name, explicit)
    state = torch.get_rng_state()
    torch.manual_seed(7)
    trainer = made(kind, True, name, explicit)
    assert torch.equal(torch.get_rng_state(), state)
    assert sum(scored) == sum(len(e["rows"]) for e in [*trainer.train_dataset, *trainer.eval_dataset])
    assert trainer.train_dataset["rows"] == plain.train_dataset["rows"]
    scored.clear()
    trainer.train()
    evaluated = trainer.evaluate()
    assert scored == []
    plain.train()
    assert logged(trainer, "loss") == pytest.approx(logged(plain, "loss"), abs=1e-5)
    expected = weights(plain.model)
    assert all(torch.allclose(v, expected[k], atol=1e-5) for k, v in weights(trainer.model).items())
    assert evaluated["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], abs=1e-5)
    assert len(set(logged(trainer, "loss"))) > 2
    kept = kind == "fresh" or explicit
    assert (trainer.prepare.reference is not None) == kept


def test_read_again_until_something_changes(scored: list[int], cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What counts are weights, adapters, rows and precision; neither batch size nor order of evaluation."""
    made("full", True)
    assert sum(scored) == 28
    assert len(list(cache.iterdir())) == 2  # training and evaluation
    for options in ({}, {"precompute_ref_batch_size": 1}, {"seed": 5}, {"beta": 0.3}):
        scored.clear()
        made("full", True, **options)
        assert scored == [], options
    made("fresh", True)
    assert scored == [], "the base model under an adapter that is switched off is the model itself"
    again = POLICIES["fresh"]()
    for parameter in (p for n, p in again.named_parameters() if "lora_A" in n):
        torch.nn.init.zeros_(parameter)
    build("dpo", again, rows("dpo", 8), precompute_ref_log_probs=True, trainer={"eval_dataset": rows("dpo", 6)})
    assert scored == []

    def rotated(theta: float) -> Any:
        given = needs("dpo", "llama")["ref_model"]
        given.config.rope_parameters["rope_theta"] = theta
        given.model.rotary_emb = type(given.model.rotary_emb)(given.config)
        return build(
            "dpo", policy("llama"), rows("dpo", 8), trainer={"ref_model": given}, precompute_ref_log_probs=True
        )

    for change in (
        lambda: made("trained", True),
        lambda: build("dpo", lora(policy("llama"), lora_alpha=32), precompute_ref_log_probs=True),
        lambda: made("full", True, explicit=True),
        lambda: rotated(3.0),
        lambda: made("full", True, max_length=6),
        lambda: made("full", True, bf16=True),
    ):
        scored.clear()
        change()
        assert sum(scored) >= 16
    scored.clear()
    for file in cache.iterdir():
        file.write_bytes(file.read_bytes()[:-4])
    made("full", True)
    assert sum(scored) == 28
    assert "cannot be read" in caplog.text
    assert {file.suffix for file in cache.iterdir()} == {".safetensors"}


def test_a_cache_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The run goes on."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HF_STRATEGIES_CACHE", str(tmp_path / "file"))
    trainer = made("full", True)
    trainer.train()
    assert logged(trainer, "dpo_loss")[0] == pytest.approx(0.6931, abs=1e-4)
    assert "cannot be written" in caplog.text


@pytest.mark.parametrize("precompute", [False, True])
def test_first_step_in_half_precision(precompute: bool) -> None:
    """The copy that is compared with computes in the precision of the policy."""
    trainer = made("full", precompute, bf16=True)
    trainer.train()
    assert logged(trainer, "rewards/margins")[0] == 0.0
    assert logged(trainer, "rewards/margins")[-1] != 0.0


def test_resume(tmp_path: Path) -> None:
    """Pitfall F-89: the numbers are those of the run's first weights, not of the checkpoint's."""
    options = {"save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch"}
    straight = made("full", True, output_dir=str(tmp_path / "run"), **options)
    straight.train()
    for file in (tmp_path / "cache" / "reference").iterdir():
        file.unlink()
    resumed = made("full", True, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert logged(straight, "loss")[2:] == logged(resumed, "loss")[2:] != []
    expected = weights(straight.model)
    assert all(torch.equal(value, expected[name]) for name, value in weights(resumed.model).items())


@pytest.mark.parametrize("kind", ["fresh", "explicit", "full"])
def test_rows_that_were_not_there(kind: str) -> None:
    """A later evaluation of other rows: scored by a reference that is still there, or a clear error."""
    new = [{"prompt": "a", "chosen": "bcd", "rejected": "ef"}, {"prompt": "gh", "chosen": "i", "rejected": "jkl"}]
    trainer = made("full" if kind == "explicit" else kind, True, explicit=kind == "explicit")
    trainer.train()
    if kind == "full":
        with pytest.raises(ValueError, match="the weights the run started from are not kept"):
            trainer.evaluate(new)
        return
    plain = made("full" if kind == "explicit" else kind, False, explicit=kind == "explicit")
    plain.train()
    metrics = trainer.evaluate({"new": new, "list": Dataset.from_list(new)})
    assert metrics["eval_new_loss"] == pytest.approx(plain.evaluate(new)["eval_loss"], abs=1e-5)
    assert metrics["eval_list_loss"] == metrics["eval_new_loss"]
    assert trainer.predict(new).metrics["test_loss"] == metrics["eval_new_loss"]
    with pytest.raises(TypeError, match=r"test_dataset: got a dict of \['new'\]"):
        trainer.predict({"new": new})


def test_sets_by_name() -> None:
    trainer = build(
        "dpo",
        policy("llama"),
        rows("dpo", 8),
        trainer={"eval_dataset": {"a": rows("dpo", 3), "b": rows("dpo", 5)}},
        **OPTIONS,
        precompute_ref_log_probs=True,
    )
    metrics = trainer.evaluate()
    assert metrics["eval_a_loss"] == pytest.approx(0.6931, abs=1e-4)
    assert metrics["eval_b_rewards/margins"] == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("dpo", {"loss_type": "simpo"}, "dpo compares with no reference under these options"),
        ("grpo", {"beta": 0.0}, "grpo compares with no reference under these options"),
        ("online_dpo", {}, "online_dpo samples its rows while it trains; allowed is False"),
        ("dpo", {"sync_ref_model": True}, "contradict each other"),
        ("dpo", {"precompute_ref_batch_size": 0}, "precompute_ref_batch_size=0"),
        (
            "dpo",
            {"precompute_ref_log_probs": False, "precompute_ref_batch_size": 4},
            "precompute_ref_batch_size=4 has no effect without precompute_ref_log_probs=True",
        ),
    ],
)
def test_bad_options(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(name, "no such model is read", **{"precompute_ref_log_probs": True, **options})


def test_streams_are_refused() -> None:
    stream = Dataset.from_list(rows("dpo", 8)).to_iterable_dataset()
    with pytest.raises(ValueError, match="reads a stream, whose rows come while it trains"):
        build("dpo", "no such model is read", stream, precompute_ref_log_probs=True, max_steps=2)


def test_other_strategies_do_not_have_the_options() -> None:
    assert hasattr(DPOConfig(output_dir="x"), "sync_ref_model")
    with pytest.raises(TypeError, match="precompute_ref_log_probs"):
        SFTConfig(output_dir="x", precompute_ref_log_probs=True)


def test_a_reference_of_the_caller_is_left_as_it_was() -> None:
    given = needs("dpo", "llama")["ref_model"]
    before = copy.deepcopy(given.state_dict())
    build(
        "dpo", policy("llama"), trainer={"ref_model": given}, tokenizer=make_tokenizer(), precompute_ref_log_probs=True
    )
    assert all(torch.equal(value, before[name]) for name, value in given.state_dict().items())
