"""Six steps equal three, a checkpoint, and three more, bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import NAMES, ONLINE, build, logged, lora, policy, record, rows, weights
from safetensors.torch import load_file
from torch import Tensor
from transformers import TrainerCallback

from hf_strategies import StrategyTrainer
from hf_strategies.modeling.critic import critic_of
from hf_strategies.modeling.reference import FrozenAdapter, FrozenModel

# What depends on the clock, or on when the last log was.
TIMES = ("per_second", "runtime")


class AtStart(TrainerCallback):
    """What a run holds when its first step begins."""

    def __init__(self, trainer: StrategyTrainer) -> None:
        self.trainer = trainer
        self.found: dict[str, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.found = contents(self.trainer, model)


def contents(trainer: StrategyTrainer, model: Any) -> dict[str, Any]:
    """Everything that training changes and a checkpoint must hold."""
    held: dict[str, Any] = {
        "weights": weights(model),
        "optimizer": [
            {key: value.clone() for key, value in trainer.optimizer.state[parameter].items()}
            for parameter in model.parameters()
            if parameter.requires_grad
        ],
        "learning_rate": trainer.lr_scheduler.get_last_lr(),
        "num_tokens": trainer.num_tokens,
    }
    if trainer.rollouts is not None:
        numbers, tensors = trainer.rollouts.buffer.state()
        held |= {"version": trainer.rollouts.version.current, "buffer": numbers, "rows": tensors}
    return held


def assert_equal(got: Any, expected: Any, path: str = "") -> None:
    """Bit for bit, at any depth."""
    assert type(got) is type(expected), path
    if isinstance(expected, Tensor):
        assert torch.equal(got, expected), path
    elif isinstance(expected, dict):
        assert got.keys() == expected.keys(), path
        for key, value in expected.items():
            assert_equal(got[key], value, f"{path}/{key}")
    elif isinstance(expected, list):
        assert len(got) == len(expected), path
        for i, value in enumerate(expected):
            assert_equal(got[i], value, f"{path}/{i}")
    else:
        assert got == expected, path


def options_of(name: str, folder: Path) -> dict[str, Any]:
    options: dict[str, Any] = {
        "per_device_train_batch_size": 4 if name in ONLINE else 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "linear",
        "optim": "adamw_torch",
        "max_steps": 6,
        "num_train_epochs": 6,
        "save_strategy": "steps",
        "save_steps": 3,
        "output_dir": str(folder),
    }
    if name in ONLINE:
        # One rollout serves 4 micro-steps twice: 4 optimizer steps, so step 3 lies within the first rollout, and step
        # 5 needs a second one. Temperature 1, drawn for real.
        options |= {"steps_per_generation": 4, "num_iterations": 2, "engine": None}
    return options


def assert_resumes(
    name: str, make_model: Any, folder: Path, **changes: Any
) -> tuple[StrategyTrainer, StrategyTrainer]:
    """Run straight, then again from the middle with a fresh trainer on the same starting model."""
    data = rows(name, 8)
    first = {**options_of(name, folder / "straight"), **changes}
    straight = build(name, make_model(), data, **first)
    straight.train()
    resumed = build(name, make_model(), data, **{**first, "output_dir": str(folder / "resumed")})
    start = weights(resumed.model)
    begin = AtStart(resumed)
    resumed.add_callback(begin)
    resumed.train(resume_from_checkpoint=str(folder / "straight" / "checkpoint-3"))
    assert straight.state.global_step == resumed.state.global_step == 6

    # It started from the checkpoint and not from the beginning, ...
    assert not all(torch.equal(value, start[key]) for key, value in begin.found["weights"].items())
    # ... took three steps only, ...
    log = [entry for entry in resumed.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in log] == [1, 2, 3, 4, 5, 6]
    # ... and ended where the straight run did.
    assert_equal(contents(resumed, resumed.model), contents(straight, straight.model))
    assert any(not torch.equal(begin.found["weights"][key], value) for key, value in weights(resumed.model).items())
    expected = [entry for entry in straight.state.log_history if "loss" in entry]
    for mine, theirs in zip(log, expected, strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            assert key.endswith(TIMES) or mine[key] == value, key
    return straight, resumed


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", NAMES)
def test_resume_is_exact(name: str, adapter: bool, tmp_path: Path) -> None:
    """Pitfalls F-86, F-87, F-89, B-48: weights, optimizer, critic, rollouts, versions, counters, losses, rewards."""
    straight, resumed = assert_resumes(name, lambda: policy("llama", adapter), tmp_path)
    checkpoint = tmp_path / "straight" / "checkpoint-3"
    if name in ONLINE:
        assert resumed.rollouts.version.current == 6
        state = json.loads((checkpoint / "rollouts-0.json").read_text())
        assert state["policy_version"] == 3
        assert state["buffer"]["micro_step"] == 6  # of the 8 that the first rollout serves
        assert load_file(checkpoint / "rollouts-0.safetensors")
        assert [entry["policy_version"] for entry in resumed.state.log_history if "loss" in entry] == [
            1,
            2,
            3,
            4,
            5,
            6,
        ]
        assert len(set(logged(straight, "loss"))) > 2
    if adapter:
        # Pitfall F-86: the adapter alone.
        assert not (checkpoint / "model.safetensors").exists()
        assert all("lora_" in key for key in load_file(checkpoint / "adapter_model.safetensors"))


@pytest.mark.parametrize(
    ("name", "kind", "changes"),
    [
        # A full mixture of experts is saved in another layout than it has in memory.
        ("sft", "gpt2", {"disable_dropout": False}),
        ("seq", "mixtral", {"router_aux_loss_coef": 0.1}),
        ("online_grpo", "mixtral", {"router_aux_loss_coef": 0.1, "temperature": 0.7, "top_p": 0.9}),
        ("online_ppo", "gpt2", {"num_iterations": 1}),
        # A rollout for half a step: step 3 ends between two rollouts.
        ("online_grpo", "gpt2", {"steps_per_generation": 1, "num_iterations": 1}),
        # Three uses at accumulation 2: step 3 ends within the second rollout.
        ("online_grpo", "llama", {"steps_per_generation": 1, "num_iterations": 4}),
    ],
)
def test_resume_is_exact_elsewhere(name: str, kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Pitfall F-89: dropout's random numbers, other models, other positions within a rollout."""
    assert_resumes(name, lambda: policy(kind), tmp_path, **changes)


@pytest.mark.parametrize(("adapter", "kind"), [(False, FrozenModel), (True, FrozenAdapter)], ids=["full", "lora"])
def test_reference_after_resume_is_that_of_the_start(adapter: bool, kind: type, tmp_path: Path) -> None:
    """Not the checkpoint's policy: the reference is taken before the checkpoint is loaded."""
    _, resumed = assert_resumes("dpo", lambda: policy("llama", adapter), tmp_path)
    reference = resumed.prepare.reference
    assert type(reference) is kind
    start = policy("llama", adapter).eval()
    ids = torch.tensor([[7, 8, 9, 10]])
    with torch.no_grad(), reference.activated(resumed.model.eval()) as model:
        assert torch.equal(model(input_ids=ids).logits, start(input_ids=ids).logits)
    with torch.no_grad():
        assert not torch.equal(resumed.model(input_ids=ids).logits, start(input_ids=ids).logits)


@pytest.mark.parametrize("adapter_name", ["default", "mine"])
def test_resume_of_adapters(adapter_name: str, tmp_path: Path) -> None:
    """Pitfall F-87: on experts and router too, and under a name of its own, which makes a folder of its own."""
    straight, _ = assert_resumes(
        "online_grpo", lambda: lora(policy("mixtral"), adapter_name=adapter_name), tmp_path, beta=0.1
    )
    assert straight.model.active_adapter == adapter_name


@pytest.mark.parametrize(
    ("name", "kind", "adapter_name"),
    [
        ("sft", "mixtral", None),
        ("sft", "gpt2", None),
        ("online_ppo", "llama", None),
        ("sft", "llama", "default"),
        ("sft", "llama", "mine"),
    ],
)
def test_best_model_is_loaded_at_the_end(name: str, kind: str, adapter_name: str | None, tmp_path: Path) -> None:
    """Pitfall A-39: the weights in memory, and those that are saved from there, are the best checkpoint's."""
    model = policy(kind) if adapter_name is None else lora(policy(kind), adapter_name=adapter_name)
    options = {**options_of(name, tmp_path), "save_steps": 1, "max_steps": 3, "learning_rate": 0.02, "optim": "sgd"}
    seen: dict[int, dict[str, Tensor]] = {}

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            seen[state.global_step] = {k: v for k, v in weights(model).items() if "critic" not in k}

    trainer = build(
        name,
        model,
        rows(name, 8),
        trainer={"eval_dataset": rows(name, 4)},
        callbacks=[Watch()],
        eval_strategy="steps",
        eval_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=True,  # of a loss that falls: the best is not the last
        **options,
    )
    trainer.train()
    best = trainer.state.best_global_step
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert best == 1 + losses.index(max(losses))
    ended = {k: v for k, v in weights(trainer.model).items() if "critic" not in k}
    assert_equal(ended, seen[best])
    assert best != 3, losses


def test_rows_after_resume_are_those_of_the_straight_run(tmp_path: Path) -> None:
    """Pitfall F-89: the same completions, used as often, with the advantages and old log-probs of their rollout."""
    options = options_of("online_grpo", tmp_path / "straight")
    straight = build("online_grpo", data=rows("online_grpo", 8), **options)
    all_calls = record(straight)
    straight.train()
    resumed = build("online_grpo", data=rows("online_grpo", 8), **{**options, "output_dir": str(tmp_path / "resumed")})
    calls = record(resumed)
    resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-3"))
    assert (len(all_calls), len(calls)) == (12, 6)
    for (logprobs, batch), (expected_logprobs, expected) in zip(calls, all_calls[6:], strict=True):
        assert torch.equal(logprobs, expected_logprobs)
        assert_equal(batch.tensors(), expected.tensors())


def test_critic_is_trained_on_from_where_it_was(tmp_path: Path) -> None:
    """Pitfall B-48: a resumed critic that started from zero would pass for weights of the policy alone."""
    straight, resumed = assert_resumes("online_ppo", lambda: policy("llama"), tmp_path)
    saved = load_file(tmp_path / "straight" / "checkpoint-3" / "critic.safetensors")
    ended = critic_of(resumed.model).state_dict()
    assert_equal(dict(ended), dict(critic_of(straight.model).state_dict()))
    assert not torch.equal(saved["head.weight"], ended["head.weight"])


def test_checkpoint_of_other_settings_is_refused(tmp_path: Path) -> None:
    options = options_of("online_grpo", tmp_path)
    build("online_grpo", data=rows("online_grpo", 8), **options).train()
    checkpoint = str(tmp_path / "checkpoint-3")
    other = build("online_grpo", data=rows("online_grpo", 8), **{**options, "num_iterations": 1})
    with pytest.raises(ValueError, match="serve 8 micro-steps, this run's 4"):
        other.train(resume_from_checkpoint=checkpoint)
    (tmp_path / "checkpoint-3" / "rollouts-0.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"rollouts-0.json is missing: the checkpoint cannot resume rollouts"):
        build("online_grpo", data=rows("online_grpo", 8), **options).train(resume_from_checkpoint=checkpoint)


def test_checkpoint_of_another_kind_is_refused(tmp_path: Path) -> None:
    """Weights, optimizer and rollouts of another strategy fit in shape, and would be trained on silently."""
    options = options_of("online_grpo", tmp_path)
    build("online_grpo", data=rows("online_grpo", 8), **options).train()
    checkpoint = str(tmp_path / "checkpoint-3")
    for name in ("sft", "grpo", "online_dpo", "online_ppo"):
        with pytest.raises(ValueError, match=f"checkpoint-3' is of strategy 'online_grpo', this run's is '{name}'"):
            build(name).train(resume_from_checkpoint=checkpoint)
        with pytest.raises(ValueError, match=f"checkpoint-3' is of strategy 'online_grpo', this run's is '{name}'"):
            build(name, resume_from_checkpoint=checkpoint)
    with pytest.raises(ValueError, match="holds a full model, this run trains an adapter"):
        build("online_grpo", lora(policy("llama")), rows("online_grpo", 8), **options).train(checkpoint)
    adapter = {**options, "output_dir": str(tmp_path / "adapter")}
    build("online_grpo", lora(policy("llama")), rows("online_grpo", 8), **adapter).train()
    with pytest.raises(ValueError, match="holds an adapter, this run trains a full model"):
        build("online_grpo", data=rows("online_grpo", 8), **options).train(str(tmp_path / "adapter" / "checkpoint-3"))


def test_broken_checkpoints_are_refused(tmp_path: Path) -> None:
    """Before a model is loaded where the config names the checkpoint, else before anything is restored."""
    options = options_of("online_ppo", tmp_path)
    build("online_ppo", data=rows("online_ppo", 8), **options).train()
    good = tmp_path / "checkpoint-3"

    def refused(folder: Any, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            build("online_ppo", data=rows("online_ppo", 8), **options).train(resume_from_checkpoint=folder)
        if isinstance(folder, str):
            changed = {**options, "resume_from_checkpoint": folder}
            with pytest.raises(error, match=message):
                build("online_ppo", "nowhere/nothing", rows("online_ppo", 8), **changed)

    refused("/nowhere", FileNotFoundError, "resume_from_checkpoint='/nowhere': no such folder")
    refused(5, TypeError, "resume_from_checkpoint=5: allowed are a folder, True and None")
    for name in ("trainer_state.json", "strategy_state.json", "optimizer.pt", "scheduler.pt"):
        folder = tmp_path / f"without-{name}"
        shutil.copytree(good, folder)
        (folder / name).unlink()
        refused(str(folder), FileNotFoundError, f"is no checkpoint to resume from: {name} is missing")
    for file in sorted(good.iterdir()):
        if file.suffix in (".json", ".safetensors", ".pt", ".pth"):
            folder = tmp_path / f"damaged-{file.name}"
            shutil.copytree(good, folder)
            (folder / file.name).write_bytes(file.read_bytes()[:20])
            refused(str(folder), ValueError, f"{file.name} is damaged .*: was the run stopped while saving")
    build("online_ppo", data=rows("online_ppo", 8), **options).train(resume_from_checkpoint=good)
    for value in ("true", "false"):
        build("online_ppo", data=rows("online_ppo", 8), **{**options, "resume_from_checkpoint": value})
    empty = {**options, "output_dir": str(tmp_path / "empty"), "resume_from_checkpoint": "true"}
    with pytest.raises(
        FileNotFoundError, match="resume_from_checkpoint='true': there is no checkpoint in output_dir="
    ):
        build("online_ppo", "nowhere/nothing", rows("online_ppo", 8), **empty)


@pytest.mark.parametrize("name", NAMES)
def test_evaluation_leaves_training_alone(name: str, tmp_path: Path) -> None:
    """Pitfall A-38: with an evaluation after every step the run is, bit for bit, the one without."""
    data = rows(name, 8)
    options = {**options_of(name, tmp_path), "save_strategy": "no"}
    plain = build(name, data=data, **options)
    plain.train()
    evaluated = build(
        name,
        data=data,
        trainer={"eval_dataset": rows(name, 4)},
        eval_strategy="steps",
        eval_steps=1,
        eval_on_start=True,
        **options,
    )
    evaluated.train()
    assert len([entry for entry in evaluated.state.log_history if "eval_loss" in entry]) == 7
    assert_equal(contents(evaluated, evaluated.model), contents(plain, plain.model))
    for key in ("loss", "reward") if name in ONLINE else ("loss",):
        assert logged(evaluated, key) == logged(plain, key)
