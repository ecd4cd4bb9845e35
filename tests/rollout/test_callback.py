"""Rollouts of a tiny model through the callback: rows, noise, versions, evaluation, checkpoints."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import EOS, PAD, make_model, make_tokenizer
from harness import ReplayEngine
from torch import Tensor

from hf_strategies.data.encoding import Encoder
from hf_strategies.modeling.sampling import Completion
from hf_strategies.rollout.callback import RolloutCallback
from hf_strategies.rollout.engine import RolloutGroup
from hf_strategies.rollout.hf_engine import GenerateEngine
from hf_strategies.rollout.options import RolloutOptions
from hf_strategies.rollout.rewards import RewardError, Rewards
from hf_strategies.rollout.version import PolicyVersionError
from hf_strategies.stats import Mean

TOKENIZER = make_tokenizer()
CHAT = [{"role": "user", "content": "hi"}]


def examples(*prompts: Any, **columns: list[Any]) -> list[dict[str, Any]]:
    return [
        {"prompt": p, "prompt_ids": Encoder(TOKENIZER).prompt(p), **{k: v[i] for k, v in columns.items()}}
        for i, p in enumerate(prompts)
    ]


def count_letters(completions: list[str]) -> list[float]:
    return [float(len(c)) for c in completions]


def callback(
    model: Any = None, rewards: Any = count_letters, engine: Any = None, steps: int = 2, lag: int = 1, **options: Any
) -> RolloutCallback:
    if engine is None:
        engine = GenerateEngine(TOKENIZER)
        engine.sync_weights(model if model is not None else make_model(), 0)
    placed = {key: options.pop(key) for key in ("seed", "process_index", "positions") if key in options}
    options = {"num_generations": 3, "max_completion_length": 6, **options}
    return RolloutCallback(
        engine,
        Rewards(rewards if isinstance(rewards, list) else [rewards]),
        TOKENIZER,
        RolloutOptions(**options),
        steps_per_generation=steps,
        max_policy_lag=lag,
        **placed,
    )


def texts(rollout: Any) -> list[list[int]]:
    batch = rollout.batch
    return [batch.completion_ids[i][batch.completion_mask[i]].tolist() for i in range(batch.num_rows)]


def numbers(metrics: dict[str, Any]) -> dict[str, float]:
    return {
        name: float(stat.total / stat.count) if isinstance(stat, Mean) else float(stat.value)
        for name, stat in metrics.items()
    }


def step(rollouts: RolloutCallback, model: Any = None, skipped: bool = False) -> None:
    """What the trainer reports around an optimizer step."""
    rollouts.on_pre_optimizer_step(None, None, None)
    rollouts.on_step_end(None, None, None, model=model, optimizer=SimpleNamespace(step_was_skipped=skipped))


# ---- rows ----


def test_rows_of_a_rollout() -> None:
    """Pitfalls A-17, A-42, B-49: sampled ids, their log-probabilities, rewards, groups, columns aligned."""
    seen: dict[str, Any] = {}

    def keep(**kwargs: Any) -> list[float]:
        seen.update(kwargs)
        return [float(i) for i in range(len(kwargs["completions"]))]

    rollouts = callback(rewards=keep)
    got = rollouts.rollout(examples("ab", "c", answer=["x", "y"]), state="trainer state")
    batch = got.batch
    assert batch.group.tolist() == [0, 0, 0, 1, 1, 1]
    assert batch.rewards.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert seen["prompts"] == ["ab"] * 3 + ["c"] * 3
    assert seen["answer"] == ["x"] * 3 + ["y"] * 3
    assert seen["trainer_state"] == "trainer state"
    assert "prompt" not in seen
    assert "prompt_ids" not in seen
    assert seen["completion_ids"] == texts(got)
    assert [TOKENIZER.decode(ids, skip_special_tokens=True) for ids in texts(got)] == seen["completions"]
    assert torch.equal(batch.loss_mask, batch.completion_mask)
    prompts = [batch.prompt_ids[i][batch.prompt_mask[i]].tolist() for i in (0, 3)]
    assert prompts == [Encoder(TOKENIZER).prompt(p) for p in ("ab", "c")]
    for ids, truncated in zip(texts(got), batch.truncated.tolist(), strict=True):
        assert truncated == (ids[-1] != EOS)
    assert (batch.sampling_logprobs[batch.completion_mask] < 0).all()
    assert [row["completion"] for row in got.table] == seen["completions"]
    assert [row["reward"] for row in got.table] == batch.rewards.tolist()
    assert [row["answer"] for row in got.table] == seen["answer"]
    assert rollouts.last_table is got.table


def test_chat_and_plain_prompts() -> None:
    """Pitfall A-42: messages for chat, texts for text; what is fed to the model is the rendered conversation."""
    seen: list[Any] = []

    def keep(prompts: list[Any], completions: list[Any]) -> list[float]:
        seen.extend(zip(prompts, completions, strict=True))
        return [0.0] * len(prompts)

    got = callback(rewards=keep, num_generations=2).rollout(examples(CHAT))
    for prompt, completion in seen:
        assert prompt == CHAT
        assert [m["role"] for m in completion] == ["assistant"]
    first = got.batch.prompt_ids[0][got.batch.prompt_mask[0]].tolist()
    assert TOKENIZER.decode(first) == "<user>hi<eos><assistant>"


def test_special_tokens_are_not_shown_to_rewards() -> None:
    class Ended:
        def generate(self, prompt_ids: Any, n: int, sampling: Any, keys: Any) -> list[RolloutGroup]:
            return [RolloutGroup(p, [Completion([6, 7, EOS], [-1.0] * 3, "stop")] * n) for p in prompt_ids]

    seen: list[str] = []

    def keep(completions: list[str]) -> list[float]:
        seen.extend(completions)
        return [0.0] * len(completions)

    got = callback(rewards=keep, engine=Ended()).rollout(examples("a"))
    assert seen == ["ab"] * 3
    assert texts(got) == [[6, 7, EOS]] * 3


def test_a_gold_column_stays_out_of_the_table() -> None:
    """Datasets of prompts and gold completions are common."""
    data = examples("a", "b", completion=["gold"] * 2, reward=[9.0] * 2, other=[1, 2])
    for row in callback().rollout(data).table:
        assert row["completion"] != "gold"
        assert row["reward"] == float(len(row["completion"])) == row["count_letters"]
        assert row["other"] in (1, 2)


def test_tokens_that_are_seen_but_not_trained() -> None:
    class Tools:
        def generate(self, prompt_ids: Any, n: int, sampling: Any, keys: Any) -> list[RolloutGroup]:
            completions = [Completion([6, 7, 8, EOS], [-1.0] * 4, "stop"), Completion([9], [-1.0], "length")]
            masks = [[True, False, False, True], [True]]
            return [RolloutGroup(p, completions, 0, masks) for p in prompt_ids]

    batch = callback(engine=Tools(), num_generations=2).rollout(examples("a")).batch
    assert batch.loss_mask.tolist() == [[True, False, False, True], [True, False, False, False]]
    assert batch.completion_mask.sum(dim=1).tolist() == [4, 1]


# ---- metrics ----


def test_metrics_of_a_rollout() -> None:
    """Pitfalls A-2, A-5, A-9: lengths, shares cut off, rewards per function without the rows it does not apply to."""

    class Fixed:
        def generate(self, prompt_ids: Any, n: int, sampling: Any, keys: Any) -> list[RolloutGroup]:
            ended, cut = Completion([6, EOS], [-1.0] * 2, "stop"), Completion([6, 7, 8, 9], [-1.0] * 4, "length")
            longer = Completion([6, 7, 8, EOS], [-1.0] * 4, "stop")
            return [RolloutGroup(prompt_ids[0], [ended, cut]), RolloutGroup(prompt_ids[1], [longer, cut])]

    def some(completions: list[str], log_metric: Any) -> list[float | None]:
        log_metric("mine/share", 0.25)
        return [1.0, 3.0, None, None]

    def all_(completions: list[str]) -> list[float]:
        return [0.0, 0.0, 2.0, 2.0]

    def never(completions: list[str]) -> list[None]:
        return [None] * 4

    got = callback(rewards=[some, all_, never], engine=Fixed(), num_generations=2).rollout(examples("a", "b"))
    values = numbers(got.metrics)
    assert values.pop("rollout/tokens_per_second") > 0
    assert values == pytest.approx(
        {
            "completions/mean_length": 3.5,
            "completions/min_length": 2.0,
            "completions/max_length": 4.0,
            "completions/mean_terminated_length": 3.0,
            "completions/min_terminated_length": 2.0,
            "completions/max_terminated_length": 4.0,
            "completions/clipped_ratio": 0.5,
            "rewards/some/mean": 2.0,
            "rewards/some/std": 2**0.5,
            "rewards/all_/mean": 1.0,
            "rewards/all_/std": (4 / 3) ** 0.5,
            "mine/share": 0.25,
            "reward": 2.0,
            "reward_std": 2**0.5 / 2,
            "frac_reward_zero_std": 0.5,
            "rows_dropped/unscorable": 0.0,
        }
    )


def test_metrics_where_nothing_terminated_and_groups_are_single() -> None:
    class Cut:
        def generate(self, prompt_ids: Any, n: int, sampling: Any, keys: Any) -> list[RolloutGroup]:
            return [RolloutGroup(p, [Completion([6], [-1.0], "length")] * n) for p in prompt_ids]

    values = numbers(callback(engine=Cut(), num_generations=1).rollout(examples("a", "b")).metrics)
    assert values["completions/clipped_ratio"] == 1.0
    assert not [name for name in values if "terminated" in name]
    assert "reward_std" not in values
    assert "frac_reward_zero_std" not in values


# ---- rows without a reward ----


def test_rows_without_any_reward(caplog: pytest.LogCaptureFixture) -> None:
    """Pitfall A-4: kept as NaN, with a warning that names the first."""

    def some(completions: list[str]) -> list[float | None]:
        return [1.0, None, 3.0]

    with caplog.at_level(logging.WARNING):
        got = callback(rewards=some).rollout(examples("a"))
    assert got.batch.rewards.isnan().tolist() == [False, True, False]
    assert numbers(got.metrics)["rows_dropped/unscorable"] == pytest.approx(1 / 3)
    assert "1 of 3 completions got no reward from any function (first: row 1" in caplog.text
    assert repr(got.table[1]["completion"]) in caplog.text


def test_a_first_rollout_without_any_reward_is_an_error() -> None:
    """Pitfall A-4: a forgotten ``return``; later on it may be chance, and is a warning."""
    given: list[float | None] = [1.0]

    def maybe(completions: list[str]) -> list[float | None]:
        return [given[0]] * len(completions)

    rollouts = callback(rewards=maybe, steps=1)
    rollouts.buffer.fill([rollouts.rollout(examples("a")).batch])
    rollouts.next_batch()
    given[0] = None
    assert rollouts.rollout(examples("a")).scores.total.isnan().all()
    fresh = callback(rewards=maybe)
    with pytest.raises(RewardError, match=r"no reward returned a number for any of the first 3 .*\(rewards: maybe\)"):
        fresh.rollout(examples("a"))
    assert fresh.evaluate(make_model(), examples("a"), 0).scores.total.isnan().all()


# ---- noise ----


def test_noise_of_each_generation_and_seed() -> None:
    rollouts = callback(steps=1)
    first = texts(rollouts.rollout(examples("a", "b")))
    assert texts(rollouts.rollout(examples("a", "b"))) == first, "asking again for the same generation"
    rollouts.buffer.fill([rollouts.rollout(examples("a", "b")).batch])
    rollouts.next_batch()
    second = texts(rollouts.rollout(examples("a", "b")))
    assert second != first
    assert texts(callback(seed=1).rollout(examples("a", "b"))) != first
    same = texts(callback(num_generations=2).rollout(examples("a", "a")))
    assert same[:2] != same[2:], "the same prompt at another place of a rollout"


def test_two_processes_sample_what_one_does() -> None:
    """Pitfall A-25: noise belongs to the place of a prompt among those of all processes."""
    data = examples("a", "bc", "d", "efg")
    whole = texts(callback().rollout(data))
    halves = [texts(callback(process_index=i).rollout(data[2 * i : 2 * i + 2])) for i in (0, 1)]
    assert halves[0] + halves[1] == whole
    turns = [texts(callback(process_index=i, positions=[i, 2 + i]).rollout([data[i], data[2 + i]])) for i in (0, 1)]
    assert turns[0][:3] + turns[1][:3] + turns[0][3:] + turns[1][3:] == whole


# ---- versions ----


def test_versions_travel_with_the_rows() -> None:
    model = make_model()
    rollouts = callback(model, steps=1)
    rollouts.on_train_begin(None, None, None, model=model)
    assert rollouts.rollout(examples("a")).batch.policy_version.tolist() == [0] * 3
    step(rollouts, model)
    step(rollouts, model, skipped=True)
    step(rollouts, model)
    assert rollouts.version.current == 2
    assert rollouts.rollout(examples("a")).batch.policy_version.tolist() == [2] * 3


def test_no_rollout_while_weights_change() -> None:
    rollouts = callback()
    rollouts.on_pre_optimizer_step(None, None, None)
    with pytest.raises(PolicyVersionError, match="between a weight change and its publication"):
        rollouts.rollout(examples("a"))


def test_old_rollouts_are_not_used() -> None:
    """The oldest and the newest row count, not the first."""
    rollouts = callback(steps=4, lag=1)
    batch = rollouts.rollout(examples("a", "b")).batch
    rollouts.buffer.fill(batch.split(4))
    rollouts.next_batch()
    step(rollouts)
    rollouts.next_batch()
    step(rollouts)
    with pytest.raises(PolicyVersionError, match=r"lag 2 exceeds max_policy_lag=1 \(rollout=0, live=2\)"):
        rollouts.next_batch()

    mixed = callback(steps=1, lag=0)
    batch = mixed.rollout(examples("a")).batch
    for versions, message in (([0, -1, 0], "lag 1 exceeds"), ([0, 0, 1], "future policy version")):
        mixed.buffer = type(mixed.buffer)(1, 1)
        mixed.buffer.fill([batch.replace(policy_version=torch.tensor(versions))])
        with pytest.raises(PolicyVersionError, match=message):
            mixed.next_batch()


# ---- evaluation ----


def test_evaluation_is_thrown_away() -> None:
    """Pitfall A-38: own noise, own options, and nothing of training moves."""
    model = make_model()
    rollouts = callback(model, steps=2, num_generations_eval=5, temperature_eval=0.0)
    data = examples("a", "b")
    fresh = rollouts.rollout(data)
    rollouts.buffer.fill(fresh.batch.split(2))
    rollouts.next_batch()
    before, held = rollouts.buffer.state()
    table, modes = rollouts.last_table, [m.training for m in model.modules()]
    got = rollouts.evaluate(model, data, 0)
    after, still = rollouts.buffer.state()
    assert before == after
    assert all(torch.equal(still[key].nan_to_num(0), value.nan_to_num(0)) for key, value in held.items())
    assert rollouts.version.current == 0
    assert rollouts.last_table is table
    assert [m.training for m in model.modules()] == modes
    assert len(got.table) == 10
    assert "rollout/tokens_per_second" not in got.metrics
    for group in (texts(got)[:5], texts(got)[5:]):
        assert len({tuple(ids) for ids in group}) == 1, "temperature_eval=0 is greedy"
    assert len({tuple(ids) for ids in texts(fresh)[:3]}) > 1


def test_noise_of_evaluation_is_its_own() -> None:
    model = make_model()
    rollouts = callback(model)
    data = examples("a", "b", "c")
    got = texts(rollouts.evaluate(model, data, 0))
    assert got != texts(rollouts.rollout(data))
    assert texts(rollouts.evaluate(model, data, 0)) == got, "the same every time"
    # Batches of the evaluation set: what counts is the place in the set.
    assert texts(rollouts.evaluate(model, data[:1], 0)) + texts(rollouts.evaluate(model, data[1:], 1)) == got


def test_evaluation_temperature() -> None:
    options = RolloutOptions(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.2, min_new_tokens=2)
    assert options.eval_sampling() == options.sampling()
    other = RolloutOptions(temperature=0.7, temperature_eval=0.3).eval_sampling()
    assert (other.temperature, other.greedy) == (0.3, False)
    assert RolloutOptions(temperature_eval=0.0).eval_sampling().greedy
    assert not RolloutOptions(temperature_eval=0.0).sampling().greedy
    assert (options.sampling().top_k, options.sampling().min_p, options.sampling().min_new_tokens) == (5, 0.1, 2)


# ---- checkpoints ----


@pytest.mark.parametrize("used", [0, 1, 2, 4])
def test_save_and_load(used: int, tmp_path: Path) -> None:
    """Pitfall F-89: version, position, unused rows and the noise of the next generation."""
    model = make_model()
    straight = callback(model, num_iterations=2, process_index=1)
    straight.buffer.fill(straight.rollout(examples("a", "b")).batch.split(2))
    for _ in range(used):
        straight.next_batch()
    step(straight)
    straight.save(tmp_path / "new")
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["rollouts-1.json", "rollouts-1.safetensors"]

    resumed = callback(model, num_iterations=2, process_index=1)
    resumed.load(tmp_path / "new")
    assert resumed.version.current == 1
    assert resumed.buffer.micro_step == used
    for _ in range(used, 4):
        mine, theirs = resumed.next_batch(), straight.next_batch()
        for name, value in theirs.tensors().items():
            assert torch.equal(mine.tensors()[name], value), name
    for rollouts in (straight, resumed):
        rollouts.on_train_begin(None, None, None, model=model)
    assert texts(resumed.rollout(examples("c"))) == texts(straight.rollout(examples("c")))
    assert resumed.rollout(examples("c")).batch.policy_version.tolist() == [1] * 3


def test_saved_state_is_plain(tmp_path: Path) -> None:
    rollouts = callback()
    rollouts.save(tmp_path)
    content = json.loads((tmp_path / "rollouts-0.json").read_text())
    assert content == {"policy_version": 0, "buffer": {"micro_step": 0, "window": 2, "pad_token_ids": []}}


def test_missing_state(tmp_path: Path) -> None:
    callback().save(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"rollouts-3.json is missing: .*another number of processes"):
        callback(process_index=3).load(tmp_path)


def test_pad_of_the_batch_is_the_tokenizers() -> None:
    batch = callback(engine=ReplayEngine()).rollout(examples("a", "bcd")).batch
    assert batch.pad_token_id == PAD
    padding: Tensor = batch.prompt_ids[~batch.prompt_mask]
    assert padding.numel() > 0
    assert set(padding.tolist()) == {PAD}
