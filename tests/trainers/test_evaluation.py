"""Evaluation: what it reports, that the best checkpoint is found by it, and that training does not notice it."""

from __future__ import annotations

import math
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_tokenizer
from datasets import Dataset
from harness import NAMES, ONLINE, build, logged, lora, policy, rows, scored_alone, weights
from transformers import TrainerCallback

from hf_strategies import Batch
from hf_strategies.data.formats import collate

PROMPTS = rows("online_grpo", 5)


def count(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    return [float(sum(ids) % 7) for ids in completion_ids]


class Recorder:
    """A reward that remembers what it scored, and can be told the values to give."""

    name = "recorded"

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, **kwargs: Any) -> list[float]:
        values = count(**kwargs)
        self.calls.append({**kwargs, "values": values})
        return values


def online(name: str = "online_grpo", reward: Any = None, evaluation: Any = None, **options: Any) -> Any:
    return build(
        name,
        data=rows(name, 4),
        engine=None,
        reward_funcs=reward or count,
        trainer={"eval_dataset": PROMPTS if evaluation is None else evaluation},
        **options,
    )


# ---- what it reports ----


@pytest.mark.parametrize("name", NAMES)
def test_evaluation_before_training(name: str) -> None:
    """Pitfall A-38: a fresh trainer evaluates; every number is finite and has its prefix, and the run goes on."""
    trainer = build(name, data=rows(name, 4), engine=None, trainer={"eval_dataset": rows(name, 4)}, learning_rate=0.01)
    metrics = trainer.evaluate()
    assert all(key.startswith("eval_") for key in metrics if key != "epoch"), metrics
    assert all(math.isfinite(value) for value in metrics.values())
    assert "eval_loss" in metrics
    assert trainer.evaluate()["eval_loss"] == metrics["eval_loss"]
    if name in ONLINE:
        assert {"eval_reward", "eval_rewards/reward/mean", "eval_completions/mean_length"} <= metrics.keys()
        assert "eval_rollout/tokens_per_second" not in metrics
        assert trainer.rollouts.version.current == 0
        assert trainer.rollouts.buffer.micro_step == 0
    trainer.train()
    assert logged(trainer, "loss")
    assert trainer.evaluate()["eval_loss"] != metrics["eval_loss"]


@pytest.mark.parametrize("name", ONLINE)
@pytest.mark.parametrize("generations", [None, 1, 3])
def test_reported_reward_is_the_mean_of_all_rewards(name: str, generations: int | None) -> None:
    """Pitfalls A-38, A-39: exact over unequal batches, also with completions that have none to compare with."""
    reward = Recorder()
    trainer = online(name, reward, num_generations_eval=generations, per_device_eval_batch_size=2)
    metrics = trainer.evaluate()
    given = [value for call in reward.calls for value in call["values"]]
    size = generations or trainer.args.num_generations
    assert [len(call["values"]) for call in reward.calls] == [2 * size, 2 * size, size]
    assert metrics["eval_reward"] == pytest.approx(sum(given) / len(given), abs=1e-12)
    assert metrics["eval_rewards/recorded/mean"] == pytest.approx(metrics["eval_reward"], abs=1e-12)
    asked = [prompt for call in reward.calls for prompt in call["prompts"][::size]]
    assert asked == [row["prompt"] for row in PROMPTS]
    assert [row["reward"] for row in trainer.last_eval_table] == given
    assert ("eval_reward_std" in metrics) == (size > 1)
    assert ("eval_loss" in metrics) == (size > 1 or name == "online_ppo")
    (entry,) = [entry for entry in trainer.state.log_history if "eval_reward" in entry]
    assert entry["eval_reward"] == metrics["eval_reward"]


def test_sampling_of_evaluation_is_its_own() -> None:
    """Its temperature (0: greedy) and its number of completions; training keeps its own."""
    reward = Recorder()
    trainer = online(reward=reward, num_generations_eval=3, temperature_eval=0.0, temperature=0.9)
    trainer.evaluate()
    (call,) = reward.calls
    groups = list(zip(*[iter(call["completion_ids"])] * 3, strict=True))
    assert len(groups) == len(PROMPTS)
    assert all(group[0] == group[1] == group[2] for group in groups)
    model = trainer.model.eval()
    for row, group in zip(trainer.eval_dataset, groups, strict=True):
        ids = torch.tensor([row["prompt_ids"]])
        greedy = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
        assert greedy[0, ids.shape[1] :].tolist() == group[0]
    reward.calls.clear()
    trainer.train()
    first = reward.calls[0]["completion_ids"][:4]
    assert len({tuple(ids) for ids in first}) > 1


def test_evaluation_does_not_depend_on_its_batches() -> None:
    """The same completions, rewards and loss, two prompts at a time or all at once."""
    results = []
    for size in (1, 2, 8):
        reward = Recorder()
        metrics = online(reward=reward, per_device_eval_batch_size=size, beta=0.0).evaluate()
        results.append((metrics, [ids for call in reward.calls for ids in call["completion_ids"]]))
    for metrics, completions in results[1:]:
        assert completions == results[0][1]
        for key in ("eval_reward", "eval_loss", "eval_entropy", "eval_reward_std", "eval_completions/mean_length"):
            assert metrics[key] == pytest.approx(results[0][0][key], rel=1e-5, abs=1e-6), key


@pytest.mark.parametrize("name", ["seq", "sft"])
def test_evaluation_loss_is_weighted_by_tokens(name: str) -> None:
    """Pitfall D-71: not a mean of means, for rows of unequal length in batches of unequal size."""
    data = rows(name, 5)
    losses = []
    for size in (1, 2, 8):
        trainer = build(name, data=data, trainer={"eval_dataset": data}, per_device_eval_batch_size=size)
        losses.append(trainer.evaluate()["eval_loss"])
    whole: Batch = collate(list(trainer.eval_dataset), 0)["batch"]
    logprobs = torch.cat(scored_alone(trainer.model.eval(), whole))
    assert losses == pytest.approx([-float(logprobs.mean())] * 3, rel=1e-5)
    by_row = [float(-row.mean()) for row in scored_alone(trainer.model, whole)]
    assert sum(by_row) / len(by_row) != pytest.approx(losses[0], rel=5e-4), (
        "the two means must differ to be told apart"
    )


def test_several_evaluation_sets() -> None:
    trainer = online(evaluation={"easy": PROMPTS[:2], "hard": PROMPTS[2:]})
    metrics = trainer.evaluate()
    assert {"eval_easy_reward", "eval_hard_reward", "eval_easy_loss", "eval_hard_loss"} <= metrics.keys()
    alone = online(evaluation=PROMPTS[:2]).evaluate()
    assert metrics["eval_easy_reward"] == alone["eval_reward"]


def test_another_set_with_loaders_that_are_kept() -> None:
    """Trainer keeps the loader of workers that stay; it is that of the set it was made for."""
    workers = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    trainer = build("sft", trainer={"eval_dataset": rows("sft", 3)}, **workers)
    own = trainer.evaluate()["eval_loss"]
    other = trainer.evaluate(rows("sft", 6)[3:])["eval_loss"]
    assert own != other
    assert other == build("sft").evaluate(rows("sft", 6)[3:])["eval_loss"]


def test_prompts_given_to_the_call() -> None:
    """Online, with a reward column that has the name of an encoded one."""
    trainer = online()
    raw = Dataset.from_list([{**row, "rows": 1} for row in PROMPTS])
    assert trainer.evaluate(raw)["eval_reward"] == trainer.evaluate()["eval_reward"]


def test_names_and_sets_given_to_the_call() -> None:
    trainer = build("sft", trainer={"eval_dataset": rows("sft", 3)})
    assert "final_loss" in trainer.evaluate(metric_key_prefix="final")
    output = trainer.predict(trainer.eval_dataset)
    assert output.metrics["test_loss"] == trainer.evaluate()["eval_loss"]


# ---- the best checkpoint ----


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_best_model_by_reward(kind: str, tmp_path: Path) -> None:
    """Pitfall A-39: ``metric_for_best_model="eval_reward"``; the middle one of three checkpoints is the best."""
    values = iter([0.1, 0.9, 0.3])
    evaluating: list[float] = []

    def reward(completion_ids: list[list[int]], trainer_state: Any, **kwargs: Any) -> list[float]:
        # An evaluation asks for one completion per prompt, a rollout for four.
        if len(completion_ids) == len(PROMPTS):
            evaluating.append(next(values))
            return [evaluating[-1]] * len(completion_ids)
        return count(completion_ids)

    seen: dict[int, Any] = {}

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            seen[state.global_step] = weights(model)

    trainer = build(
        "online_grpo",
        lora(policy("llama")) if kind == "lora" else policy("llama"),
        rows("online_grpo", 6),
        engine=None,
        reward_funcs=reward,
        trainer={"eval_dataset": PROMPTS},
        callbacks=[Watch()],
        output_dir=str(tmp_path),
        learning_rate=0.05,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        max_steps=3,
        num_generations_eval=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_reward",
    )
    trainer.train()
    assert evaluating == [0.1, 0.9, 0.3]
    assert trainer.state.best_metric == pytest.approx(0.9)
    assert trainer.state.best_global_step == 2
    assert Path(trainer.state.best_model_checkpoint).name == "checkpoint-2"
    ended = weights(trainer.model)
    assert all(torch.equal(ended[name], value) for name, value in seen[2].items())
    for step in (1, 3):
        assert not all(torch.equal(ended[name], value) for name, value in seen[step].items())


@pytest.mark.parametrize("name", ["online_dpo", "online_ppo"])
def test_every_online_strategy_has_a_reward_to_choose_by(name: str, tmp_path: Path) -> None:
    """Pitfall A-39, with groups that are compared: the name is there at every step."""
    trainer = online(
        name,
        output_dir=str(tmp_path),
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        max_steps=2,
        learning_rate=0.02,
        load_best_model_at_end=True,
        metric_for_best_model="eval_reward",
    )
    trainer.train()
    found = [entry["eval_reward"] for entry in trainer.state.log_history if "eval_reward" in entry]
    assert len(found) == 2
    assert trainer.state.best_metric == max(found)
    assert len(logged(trainer, "reward")) == 2


# ---- training does not notice ----


@pytest.mark.parametrize("name", ["sft", "seq", "online_grpo"])
def test_random_state_is_left_alone(name: str) -> None:
    """Pitfalls A-38, C-57: torch's, numpy's and Python's, though loaders and dropout draw from them."""
    trainer = build(name, policy("gpt2"), engine=None, trainer={"eval_dataset": rows(name, 3)}, disable_dropout=False)
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    trainer.evaluate()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])
    assert random.getstate() == before[2]


@pytest.mark.parametrize("name", ["sft", "seq"])
def test_training_with_dropout_is_the_same_with_and_without_evaluation(name: str) -> None:
    """Pitfall A-38, where dropout draws from the state that an evaluation could disturb."""
    ended, losses = [], []
    for evaluation in (False, True):
        more = {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True} if evaluation else {}
        trainer = build(
            name,
            policy("gpt2"),
            trainer={"eval_dataset": rows(name, 3)},
            disable_dropout=False,
            learning_rate=0.05,
            per_device_train_batch_size=2,
            num_train_epochs=2,
            **more,
        )
        trainer.train()
        assert ("eval_loss" in str(trainer.state.log_history)) == evaluation
        ended.append(weights(trainer.model))
        losses.append(logged(trainer, "loss"))
    assert losses[0] == losses[1]
    assert all(torch.equal(ended[0][key], value) for key, value in ended[1].items())
    # The test can tell: another seed draws other dropout.
    other = build(
        name,
        policy("gpt2"),
        disable_dropout=False,
        learning_rate=0.05,
        per_device_train_batch_size=2,
        num_train_epochs=2,
        seed=1,
        data_seed=42,
    )
    other.train()
    assert logged(other, "loss") != losses[0]


def test_training_metrics_are_left_alone() -> None:
    """What a window of steps collected stays collected over an evaluation within it."""
    entries = []
    for evaluation in (False, True):
        more = {"eval_strategy": "steps", "eval_steps": 1} if evaluation else {}
        trainer = online(logging_steps=2, max_steps=4, num_train_epochs=4, learning_rate=0.02, **more)
        trainer.train()
        entries.append([entry for entry in trainer.state.log_history if "loss" in entry])
    for plain, evaluated in zip(*entries, strict=True):
        assert plain.keys() == evaluated.keys()
        for key, value in plain.items():
            assert key.endswith("per_second") or evaluated[key] == value, key


def test_modes_and_weights_are_left_alone() -> None:
    trainer = online(output_dir=tempfile.mkdtemp())
    trainer.model.train()
    modes, held = [m.training for m in trainer.model.modules()], weights(trainer.model)
    trainer.evaluate()
    assert all(torch.equal(held[key], value) for key, value in weights(trainer.model).items())
    # `Trainer` itself leaves a model in evaluation mode; rollouts within it must not undo that.
    assert len({m.training for m in trainer.model.modules()}) == 1
    assert len(modes) == len(list(trainer.model.modules()))


def test_evaluation_with_pad_that_is_eos() -> None:
    """Pitfall D-63: the same numbers whichever id padding has."""
    results = [
        build(
            "online_grpo",
            tokenizer=make_tokenizer(pad_is_eos=pad_is_eos),
            engine=None,
            trainer={"eval_dataset": PROMPTS},
        ).evaluate()
        for pad_is_eos in (False, True)
    ]
    for key in ("eval_loss", "eval_reward", "eval_completions/mean_length", "eval_entropy"):
        assert results[1][key] == pytest.approx(results[0][key], rel=1e-6, abs=1e-7), key
