"""The reward interface: what functions get, what they may return, and what goes wrong."""

from __future__ import annotations

import asyncio
import functools
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from conftest import BOS, VOCAB, make_tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig, LlamaForSequenceClassification

from hf_strategies.rollout.rewards import ModelReward, RewardError, Rewards
from hf_strategies.trainers.reward_functions import resolve_rewards

PROMPTS, COMPLETIONS, IDS = ["p", "p", "q"], ["aa", "b", "ccc"], [[7, 7], [8], [9, 9, 9]]
COLUMNS = {"answer": ["x", "x", "y"]}


def score(rewards: Rewards, **changes: Any) -> Any:
    inputs = {"prompts": PROMPTS, "completions": COMPLETIONS, "completion_ids": IDS, "columns": COLUMNS}
    return rewards.score(**{**inputs, **changes})


def length(completions: list[str]) -> list[float]:
    return [float(len(c)) for c in completions]


# ---- what functions get ----


def test_what_functions_get() -> None:
    """Pitfall A-42: everything by keyword and aligned; without **kwargs only what is declared."""
    seen: dict[str, Any] = {}

    def everything(**kwargs: Any) -> list[float]:
        seen.update(kwargs)
        return [1.0] * 3

    def some(completions: list[str], answer: list[str]) -> list[float]:
        return [float(len(c)) if a == "x" else 0.0 for c, a in zip(completions, answer, strict=True)]

    def nothing() -> list[float]:
        return [0.25] * 3

    def positional(prompts: list[str], completions: list[str], *rest: Any, scale: float = 1.0) -> list[float]:
        assert rest == ()
        return [scale] * 3

    total = score(Rewards([everything, some, nothing, positional], [1.0, 2.0, 1.0, 1.0]), trainer_state="state").total
    # 1 + 2 * [2, 1, 0] + 0.25 + 1
    assert total.tolist() == [6.25, 4.25, 2.25]
    assert seen.keys() == {
        "prompts", "completions", "completion_ids", "answer", "trainer_state", "log_extra", "log_metric",
    }  # fmt: skip
    assert (seen["prompts"], seen["completions"], seen["completion_ids"]) == (PROMPTS, COMPLETIONS, IDS)
    assert (seen["answer"], seen["trainer_state"]) == (COLUMNS["answer"], "state")


@pytest.mark.parametrize("name", ["prompts", "completions", "completion_ids", "trainer_state", "log_metric"])
def test_a_dataset_column_never_replaces_what_was_sampled(name: str) -> None:
    """Pitfall A-42: a dataset of scored groups has a column ``completions`` of its own."""
    seen: dict[str, Any] = {}

    def keep(**kwargs: Any) -> list[float]:
        seen.update(kwargs)
        return [0.0] * 3

    score(Rewards([keep]), columns={name: ["gold"] * 3, **COLUMNS})
    assert seen[name] != ["gold"] * 3
    assert seen["completions"] == COMPLETIONS


def test_conversations_stay_conversations() -> None:
    """Pitfall A-42: message lists for chat."""
    prompts = [[{"role": "user", "content": p}] for p in PROMPTS]
    answers = [[{"role": "assistant", "content": c}] for c in COMPLETIONS]

    def read(prompts: list[Any], completions: list[Any]) -> list[float]:
        assert all(p[-1]["role"] == "user" for p in prompts)
        return [float(len(c[0]["content"])) for c in completions]

    assert score(Rewards([read]), prompts=prompts, completions=answers).total.tolist() == [2.0, 1.0, 3.0]


def test_the_callers_lists_stay_as_they_are() -> None:
    def greedy(completions: list[str], completion_ids: list[list[int]]) -> list[float]:
        completions.clear()
        completion_ids.clear()
        return [0.0] * 3

    mine, ids = list(COMPLETIONS), list(IDS)
    score(Rewards([greedy]), completions=mine, completion_ids=ids)
    assert (mine, ids) == (COMPLETIONS, IDS)


# ---- kinds of callables ----


def test_async_rewards_run_together() -> None:
    """Each waits for the other, in both directions: one after the other would never end."""
    gate: list[str] = []

    async def first(completions: list[str]) -> list[float]:
        gate.append("first")
        while "second" not in gate:
            await asyncio.sleep(0)
        return [1.0] * len(completions)

    async def second(completions: list[str], answer: list[str]) -> list[float]:
        gate.append("second")
        while "first" not in gate:
            await asyncio.sleep(0)
        return [2.0 * (a == "x") for a in answer]

    class Third:
        async def __call__(self, completions: list[str]) -> list[float]:
            return [8.0] * len(completions)

    async def scaled(completions: list[str], by: float) -> list[float]:
        return [by] * len(completions)

    @functools.wraps(first)
    def wrapped(**kwargs: Any) -> Any:  # a decorator that hides that the function is async
        return scaled(kwargs["completions"], 32.0)

    wrapped.name = "wrapped"  # type: ignore[attr-defined]
    rewards = Rewards([first, length, second, Third(), partial(scaled, by=16.0), wrapped])
    assert rewards.names == ["first", "length", "second", "Third", "scaled", "wrapped"]
    scores = score(rewards)
    assert scores.by_name["second"].tolist() == [2.0, 2.0, 0.0]
    assert scores.total.tolist() == [61.0, 60.0, 60.0]


def test_async_rewards_inside_a_running_loop() -> None:
    """A notebook runs a loop already."""

    async def reward(completions: list[str]) -> list[float]:
        await asyncio.sleep(0)
        return [1.0] * len(completions)

    async def notebook() -> Any:
        return score(Rewards([reward]))

    assert asyncio.run(notebook()).total.tolist() == [1.0] * 3


def test_objects_and_partials_have_names() -> None:
    class Scorer:
        def __call__(self, completions: list[str]) -> list[float]:
            return [1.0] * len(completions)

    class Named(Scorer):
        name = "my_score"

    def scaled(completions: list[str], by: float) -> list[float]:
        return [by] * len(completions)

    rewards = Rewards([Scorer(), Named(), partial(partial(scaled), by=3.0)])
    assert rewards.names == ["Scorer", "my_score", "scaled"]
    assert score(rewards).total.tolist() == [5.0] * 3


def test_functions_and_weights_are_checked() -> None:
    def scaled(completions: list[str], by: float) -> list[float]:
        return [by] * len(completions)

    with pytest.raises(ValueError, match=r"names must differ, got \['scaled'\]"):
        Rewards([partial(scaled, by=1.0), length, partial(scaled, by=2.0)])
    with pytest.raises(ValueError, match="reward_funcs is empty"):
        Rewards([])
    with pytest.raises(TypeError, match="reward_funcs: 3 cannot be called"):
        Rewards([3])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="reward_weights has 2 entries, reward_funcs 1"):
        Rewards([length], [1.0, 2.0])
    with pytest.raises(ValueError, match="allowed are finite numbers"):
        Rewards([length], [float("nan")])


def test_weights() -> None:
    def one(completions: list[str]) -> list[float]:
        return [1.0, 10.0, 100.0]

    scores = score(Rewards([length, one], [0.5, -2.0]))
    assert scores.total.tolist() == [0.5 * 2 - 2, 0.5 * 1 - 20, 0.5 * 3 - 200]
    # By name they are what the function returned, unweighted.
    assert scores.by_name["one"].tolist() == [1.0, 10.0, 100.0]
    assert scores.total.dtype == torch.float64


# ---- what they may return ----


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


@pytest.mark.parametrize(
    "result",
    [
        (1, 2, 3),
        [1, True + 1, 3.0],
        torch.tensor([1, 2, 3]),
        torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16, requires_grad=True),
        np.array([1.0, 2.0, 3.0], dtype=np.float32),
        [torch.tensor(1.0), np.float64(2.0), np.int64(3)],
    ],
    ids=str,
)
def test_lists_of_numbers_of_many_kinds(result: Any) -> None:
    def good(completions: list[str]) -> Any:
        return result

    assert score(Rewards([good])).total.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([1.0], "returned 1 values for 3 completions"),
        (torch.tensor([1.0]), "returned 1 values for 3 completions"),
        ([1.0] * 4, "returned 4 values for 3 completions"),
        ([], "returned 0 values for 3 completions"),
        (1.0, "returned float, expected a list of 3 numbers"),
        (torch.tensor(1.0), "returned float, expected a list of 3 numbers"),
        (None, "returned NoneType, expected a list of 3 numbers"),
        ("123", "returned str, expected a list of 3 numbers"),
        ({"a": 1, "b": 2, "c": 3}, "returned dict, expected a list of 3 numbers"),
        ([[1.0]] * 3, r"returned \[1.0\] for row 0, expected a number or None"),
        (torch.ones(3, 1), r"returned \[1.0\] for row 0, expected a number or None"),
        ([1.0, "2.0", 3.0], "returned '2.0' for row 1, expected a number or None"),
        ([1.0, 2.0, float("-inf")], "returned -inf for row 2: rewards must be finite"),
        (torch.tensor([1.0, float("inf"), 1.0]), "returned inf for row 1: rewards must be finite"),
    ],
    ids=str,
)
def test_wrong_results(result: Any, message: str) -> None:
    """A list of length 1 is not spread over all rows; every message names the reward and, if there is one, the row."""

    def wrong(completions: list[str]) -> Any:
        return result

    with pytest.raises(RewardError, match=f"reward 'wrong' {message}"):
        score(Rewards([length, wrong]))


def test_a_reward_that_raises_is_named_and_located() -> None:
    def sync(completions: list[str]) -> list[float]:
        return [1 / (3 - len(c)) for c in completions]

    async def later(completions: list[str]) -> list[float]:
        await asyncio.sleep(0)
        return [1 / (3 - len(c)) for c in completions]

    for function in (sync, later):
        message = f"reward '{function.__name__}' raised ZeroDivisionError on row 2 \\(completion 'ccc'\\)"
        with pytest.raises(RewardError, match=message) as caught:
            score(Rewards([length, function]))
        assert isinstance(caught.value.__cause__, ZeroDivisionError)

    def whole(completions: list[str]) -> list[float]:
        if len(completions) > 1:
            raise OSError("server gone")
        return [0.0]

    with pytest.raises(RewardError, match="reward 'whole' raised OSError: server gone"):
        score(Rewards([whole]))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_missing_column_at_scoring_time(asynchronous: bool) -> None:
    def sync(gold: list[str]) -> list[float]:
        return [0.0]

    async def later(gold: list[str]) -> list[float]:
        return [0.0]

    with pytest.raises(RewardError, match=r"raised TypeError.*missing 1 required positional argument: 'gold'"):
        score(Rewards([later if asynchronous else sync]))


# ---- logging ----


def test_logging_from_a_reward() -> None:
    """Pitfall A-5: a NaN that a reward logs does not swallow its other values."""

    def talkative(completions: list[str], log_extra: Any, log_metric: Any) -> list[float]:
        log_extra("length", [len(c) for c in completions])
        for value in (3, torch.tensor(5.0), float("nan")):
            log_metric("seen", value)
        log_metric("never", float("nan"))
        return [0.0] * 3

    scores = score(Rewards([talkative]))
    assert scores.extra == {"length": [2, 1, 3]}
    assert scores.metrics == {"seen": [3.0, 5.0]}


def test_extra_columns_must_be_aligned() -> None:
    def short(completions: list[str], log_extra: Any) -> list[float]:
        log_extra("half", [1])
        return [0.0] * len(completions)

    message = r"reward 'short' raised ValueError: log_extra\('half', ...\): got 1 values for 3 completions"
    with pytest.raises(RewardError, match=message):
        score(Rewards([short]))


# ---- models ----


def reward_model(**changes: Any) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(VOCAB), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        initializer_range=0.5, **{"num_labels": 1, "pad_token_id": 0, **changes},
    )  # fmt: skip
    return LlamaForSequenceClassification(config)


def value_of(model: Any, ids: list[int]) -> float:
    with torch.no_grad():
        return float(model(torch.tensor([ids])).logits)


def test_reward_model_reads_text_with_its_own_tokenizer() -> None:
    """Pitfall B-50: the policy's ids are never shown to it."""
    model = reward_model(attention_dropout=0.5).train()
    reward = ModelReward(model, make_tokenizer(), batch_size=2)
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    got = score(Rewards([reward]), completion_ids=[[0], [0], [0]]).total
    expected = [value_of(model, [VOCAB[c] for c in text]) for text in ("paa", "pb", "qccc")]
    assert len(set(expected)) == 3
    assert got.tolist() == pytest.approx(expected, abs=1e-5)
    with pytest.raises(ValueError, match="has 2 labels, allowed is 1"):
        ModelReward(reward_model(num_labels=2), make_tokenizer())


def test_reward_model_with_a_reversed_vocabulary() -> None:
    """Pitfall B-50: the same text under another numbering of the tokens scores as that tokenizer says."""
    tokenizer = make_tokenizer()
    letters = {c: VOCAB["z"] - (VOCAB[c] - VOCAB["a"]) for c in "abcpq"}

    class Reversed:
        pad_token_id = 0

        def __call__(self, texts: list[str], **kwargs: Any) -> Any:
            table = str.maketrans({c: chr(ord("a") + ord("z") - ord(c)) for c in "abcpq"})
            return tokenizer([t.translate(table) for t in texts], **kwargs)

    model = reward_model()
    got = score(Rewards([ModelReward(model, Reversed())])).total
    assert got.tolist() == pytest.approx(
        [value_of(model, [letters[c] for c in text]) for text in ("paa", "pb", "qccc")], abs=1e-5
    )


def test_reward_model_on_conversations() -> None:
    """The template writes the special tokens: a tokenizer that adds one of its own must not double it."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "<bos>" + tokenizer.chat_template
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", VOCAB["<bos>"])]
    )
    assert tokenizer("a")["input_ids"] == [BOS, VOCAB["a"]]
    model = reward_model()
    reward = ModelReward(model, tokenizer)
    assert score(Rewards([reward])).total[1] == pytest.approx(value_of(model, [BOS, VOCAB["p"], VOCAB["b"]]), abs=1e-5)
    chat = [[{"role": "user", "content": "p"}]]
    answers = [[{"role": "assistant", "content": "b"}]]
    got = score(Rewards([reward]), prompts=chat, completions=answers, completion_ids=[[8]], columns={}).total
    eos = VOCAB["<eos>"]
    expected = value_of(model, [BOS, VOCAB["<user>"], VOCAB["p"], eos, VOCAB["<assistant>"], VOCAB["b"], eos])
    assert float(got) == pytest.approx(expected, abs=1e-5)


def test_reward_model_without_a_pad_token() -> None:
    tokenizer = make_tokenizer()
    tokenizer.pad_token = None
    model = reward_model(pad_token_id=None)
    got = score(Rewards([ModelReward(model, tokenizer)])).total
    alone = [value_of(model, [VOCAB[c] for c in text]) for text in ("paa", "pb", "qccc")]
    assert got.tolist() == pytest.approx(alone, abs=1e-5)


def test_reward_models_by_path(tmp_path: Any) -> None:
    """Pitfall B-50: model and tokenizer come from the same place unless a tokenizer is given."""
    model = reward_model().eval()
    model.save_pretrained(tmp_path / "judge")
    make_tokenizer().save_pretrained(tmp_path / "judge")
    expected = [value_of(model, [VOCAB[c] for c in text]) for text in ("paa", "pb", "qccc")]
    by_path = resolve_rewards([length, str(tmp_path / "judge")], [0.0, 1.0], None, {"train": ["prompt"]})
    assert by_path.names == ["length", "judge"]
    assert score(by_path).total.tolist() == pytest.approx(expected, abs=1e-5)
    loaded = LlamaForSequenceClassification.from_pretrained(tmp_path / "judge")
    assert score(resolve_rewards(loaded, None, None, {})).total.tolist() == pytest.approx(expected, abs=1e-5)
    given = resolve_rewards([reward_model()], None, [make_tokenizer()], {})
    assert score(given).total.tolist() == pytest.approx(expected, abs=1e-5)
    with pytest.raises(ValueError, match="reward_processing_classes has 1 entries, reward_funcs 2"):
        resolve_rewards([length, str(tmp_path / "judge")], None, [make_tokenizer()], {})
