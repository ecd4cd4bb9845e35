"""The reward interface: what functions get, and what they may return."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest
import torch
from conftest import VOCAB, make_tokenizer
from transformers import LlamaConfig, LlamaForSequenceClassification

from hf_strategies.rollout.rewards import ModelReward, RewardError, Rewards

PROMPTS, COMPLETIONS, IDS = ["p", "p", "q"], ["aa", "b", "ccc"], [[7, 7], [8], [9, 9, 9]]
COLUMNS = {"answer": ["x", "x", "y"]}


def score(rewards: Rewards, **changes: Any) -> Any:
    inputs = {"prompts": PROMPTS, "completions": COMPLETIONS, "completion_ids": IDS, "columns": COLUMNS}
    return rewards.score(**{**inputs, **changes})


def test_what_functions_get() -> None:
    """Pitfall A-42: everything by keyword and aligned; without **kwargs only what is declared."""
    seen: dict[str, Any] = {}

    def everything(**kwargs: Any) -> list[float]:
        seen.update(kwargs)
        return [1.0] * 3

    def some(completions: list[str], answer: list[str]) -> list[float]:
        return [float(len(c)) if a == "x" else 0.0 for c, a in zip(completions, answer, strict=True)]

    total = score(Rewards([everything, some], [1.0, 2.0]), trainer_state="state").total
    # 1 + 2 * [2, 1, 0]
    assert total.tolist() == [5.0, 3.0, 1.0]
    assert seen.keys() == {
        "prompts", "completions", "completion_ids", "answer", "trainer_state", "log_extra", "log_metric",
    }  # fmt: skip
    assert (seen["prompts"], seen["completion_ids"], seen["trainer_state"]) == (PROMPTS, IDS, "state")


def test_async_rewards_run_together() -> None:
    gate: list[str] = []

    async def first(completions: list[str]) -> list[float]:
        while "second" not in gate:
            await asyncio.sleep(0)
        return [1.0] * len(completions)

    async def second(completions: list[str]) -> list[float]:
        gate.append("second")
        return [2.0] * len(completions)

    assert score(Rewards([first, second])).total.tolist() == [3.0] * 3


def test_objects_and_partials_have_names() -> None:
    class Scorer:
        def __call__(self, completions: list[str]) -> list[float]:
            return [1.0] * len(completions)

    def scaled(completions: list[str], by: float) -> list[float]:
        return [by] * len(completions)

    rewards = Rewards([Scorer(), partial(scaled, by=3.0)])
    assert rewards.names == ["Scorer", "scaled"]
    assert score(rewards).total.tolist() == [4.0] * 3
    with pytest.raises(ValueError, match=r"names must differ, got \['scaled'\]"):
        Rewards([partial(scaled, by=1.0), partial(scaled, by=2.0)])


def test_none_means_does_not_apply() -> None:
    """Pitfalls A-4, A-5: per reward; a row that none applies to is NaN, not 0."""

    def one(completions: list[str]) -> list[float | None]:
        return [1.0, None, float("nan")]

    def two(completions: list[str]) -> torch.Tensor:
        return torch.tensor([float("nan"), 4.0, float("nan")])

    scores = score(Rewards([one, two], [1.0, 0.5]))
    assert scores.total[:2].tolist() == [1.0, 2.0]
    assert scores.total[2].isnan()
    assert scores.by_name["one"].isnan().tolist() == [False, True, True]


@pytest.mark.parametrize("result", [[1.0], [1.0] * 4, 1.0, [[1.0]] * 3, [1.0, 2.0, float("-inf")]])
def test_wrong_results(result: Any) -> None:
    def wrong(completions: list[str]) -> Any:
        return result

    with pytest.raises(RewardError, match="reward 'wrong' returned"):
        score(Rewards([wrong]))


def test_logging_from_a_reward() -> None:
    def talkative(completions: list[str], log_extra: Any, log_metric: Any) -> list[float]:
        log_extra("length", [len(c) for c in completions])
        log_metric("seen", 3)
        return [0.0] * 3

    scores = score(Rewards([talkative]))
    assert scores.extra == {"length": [2, 1, 3]}
    assert scores.metrics == {"seen": [3.0]}


def test_reward_model_reads_text_with_its_own_tokenizer() -> None:
    """Pitfall B-50: the policy's ids are never shown to it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(VOCAB), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_labels=1, initializer_range=0.5, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForSequenceClassification(config).eval()
    reward = ModelReward(model, make_tokenizer(), batch_size=2)
    got = score(Rewards([reward]), completion_ids=[[0], [0], [0]]).total
    for i, text in enumerate(["paa", "pb", "qccc"]):
        ids = torch.tensor([[VOCAB[c] for c in text]])
        assert float(got[i]) == pytest.approx(float(model(ids).logits), abs=1e-5)
    chat = [[{"role": "user", "content": "p"}]] * 3
    answers = [[{"role": "assistant", "content": c}] for c in COMPLETIONS]
    assert len(set(score(Rewards([reward]), prompts=chat, completions=answers).total.tolist())) == 3
    config.num_labels = 2
    with pytest.raises(ValueError, match="has 2 labels, allowed is 1"):
        ModelReward(LlamaForSequenceClassification(config), make_tokenizer())
