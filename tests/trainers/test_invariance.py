"""What must not change loss or gradient: the cut of the batch, padding, order, the pad token, the model around it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from conftest import make_tokenizer
from harness import (
    NAMES,
    ONLINE,
    CaptureGradients,
    ReplayEngine,
    build,
    difference,
    logged,
    lora,
    needs,
    padded,
    policy,
    record,
    rows,
    run,
    scored_alone,
)
from torch import Tensor

from hf_strategies.batch import Batch
from hf_strategies.data.formats import collate
from hf_strategies.rollout.engine import RolloutGroup
from hf_strategies.rollout.hf_engine import GenerateEngine
from hf_strategies.trainers.sampler import RolloutSampler, prompt_positions

TOLERANCE = 1e-5
KINDS = ("llama", "gpt2", "mixtral")
EVERYTHING = [(name, kind, adapter) for name in NAMES for kind in KINDS for adapter in (False, True)]
# Each name, each model and both kinds of training, not all of their products.
TRIMMED = [(name, *model) for name in NAMES for model in (("llama", True), ("gpt2", False), ("mixtral", False))]


def ids(case: Any) -> str:
    return "-".join({True: "lora", False: "full"}.get(part, str(part)) for part in case)


everything = pytest.mark.parametrize("case", EVERYTHING, ids=ids)
trimmed = pytest.mark.parametrize("case", TRIMMED, ids=ids)


@dataclass
class Result:
    losses: list[float]
    gradients: list[dict[str, Tensor]]


def train(case: tuple[str, str, bool], data: Any = None, **options: Any) -> Result:
    name, kind, adapter = case
    trainer, captured = run(name, policy(kind, adapter), data, trainer=needs(name, kind), **options)
    return Result(logged(trainer, "loss"), captured.steps)


@cache
def one_batch(case: tuple[str, str, bool]) -> Result:
    """All rows in one micro-batch and one step: what every other cut is compared with."""
    result = train(case)
    assert len(result.gradients) == 1
    return result


def assert_same(got: Result, expected: Result) -> None:
    assert len(got.gradients) == len(expected.gradients)
    assert got.losses == pytest.approx(expected.losses, rel=TOLERANCE)
    for mine, theirs in zip(got.gradients, expected.gradients, strict=True):
        assert difference(mine, theirs) < TOLERANCE


@everything
def test_eight_micro_batches_of_one(case: tuple[str, str, bool]) -> None:
    """Pitfalls D-71, C-60, A-20, A-21: lengths are unequal, so a mean of micro-batch means would differ."""
    assert_same(train(case, per_device_train_batch_size=1, gradient_accumulation_steps=8), one_batch(case))


@trimmed
def test_two_micro_batches_of_four(case: tuple[str, str, bool]) -> None:
    assert_same(train(case, per_device_train_batch_size=4, gradient_accumulation_steps=2), one_batch(case))


@trimmed
def test_order_of_rows(case: tuple[str, str, bool]) -> None:
    name = case[0]
    data = rows(name, 2 if name in ONLINE else 8)[::-1]
    # Packing fills its rows in another order; the documents and their tokens are the same.
    assert_same(train(case, data, per_device_train_batch_size=2, gradient_accumulation_steps=4), one_batch(case))


@trimmed
def test_more_padding_with_garbage_in_it(case: tuple[str, str, bool]) -> None:
    """Pitfalls A-16, B-51: padding on both sides, random ids and NaN in every padded slot."""
    seen: list[Batch] = []

    def pad(batch: Batch) -> Batch:
        seen.append(padded(batch))
        return seen[-1]

    got = train(case, per_device_train_batch_size=4, gradient_accumulation_steps=2, transform=pad)
    assert_same(got, one_batch(case))
    assert all(int(batch.attention_mask.sum(dim=1).max()) < batch.input_ids.shape[1] - 5 for batch in seen)


@trimmed
def test_pad_token_is_the_end_token(case: tuple[str, str, bool]) -> None:
    """Pitfalls D-63, A-10: no mask comes from an id, so the end token still trains and padding does not."""
    tokenizer = make_tokenizer(pad_is_eos=True)
    got = train(case, per_device_train_batch_size=4, gradient_accumulation_steps=2, tokenizer=tokenizer)
    assert_same(got, one_batch(case))


def masked(examples: list[dict[str, Any]]) -> dict[str, Batch]:
    batch = collate(examples, pad_token_id=0)["batch"]
    return {"batch": batch.replace(loss_mask=torch.zeros_like(batch.loss_mask))}


@trimmed
def test_nothing_trains(case: tuple[str, str, bool]) -> None:
    """Pitfalls A-7, D-66: zero and finite, and still attached (backward runs on every rank)."""
    name, kind, adapter = case
    arguments = needs(name, kind) | ({} if name in ONLINE else {"data_collator": masked})
    trainer, captured = run(
        name,
        policy(kind, adapter),
        trainer=arguments,
        engine=ReplayEngine(trains=False),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
    )
    assert logged(trainer, "loss") == [0.0]
    assert all(torch.count_nonzero(value) == 0 for value in captured.steps[0].values())
    assert all(p.grad is None or p.grad.isfinite().all() for p in trainer.model.parameters())


@pytest.mark.parametrize("name", ["grpo", "online_grpo", "online_ppo", "online_dpo"])
def test_no_row_can_be_scored_in_one_of_two_steps(name: str) -> None:
    """Pitfall A-4: rows without a reward leave the loss; the other step is what it is without them."""
    if name == "grpo":
        data = rows(name, 4)
        for example in data[2:]:
            example["rewards"] = [None] * len(example["rewards"])
        # The order of the rows within the step does not matter, see above.
        trainer, captured = run(name, data=data, per_device_train_batch_size=1, gradient_accumulation_steps=4)
        _, alone = run(name, data=data[:2], per_device_train_batch_size=2)
        assert difference(captured.steps[0], alone.steps[0]) < TOLERANCE
        return
    calls = []

    def only_first(completion_ids: list[list[int]], **kwargs: Any) -> list[float | None]:
        calls.append(len(completion_ids))
        return [float(sum(row) % 5) if len(calls) == 1 else None for row in completion_ids]

    trainer, captured = run(name, data=rows(name, 4), reward_funcs=only_first)
    assert len(captured.steps) == 2
    assert any(torch.count_nonzero(value) for value in captured.steps[0].values())
    assert all(torch.count_nonzero(value) == 0 for value in captured.steps[1].values())
    assert logged(trainer, "loss")[1] == 0.0


@trimmed
def test_short_last_window(case: tuple[str, str, bool]) -> None:
    """Pitfall D-71: 5 micro-batches at accumulation 4; the step of the fifth alone is a step of its full size."""
    name = case[0]
    group = 2
    count = 5 if name in ONLINE else 10
    options = {"per_device_train_batch_size": 2, "learning_rate": 0.0}
    if name in ONLINE:
        options |= {"num_generations": group, "steps_per_generation": 1}
    if name == "seq":
        # One document per packed row: 10 rows, 5 micro-batches.
        options["max_length"] = 24
        data = [
            {"text": example["text"][:3] + "abcdefghijklmnop"[: 10 + i]} for i, example in enumerate(rows(name, 10))
        ]
        options["max_length"] = 20
    else:
        data = rows(name, count)
    short = train(case, data, gradient_accumulation_steps=4, **options)
    plain = train(case, data, gradient_accumulation_steps=1, **options)
    assert (len(short.gradients), len(plain.gradients)) == (2, 5)
    assert difference(short.gradients[1], plain.gradients[4]) < TOLERANCE
    assert short.losses[1] == pytest.approx(plain.losses[4], rel=TOLERANCE)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
@pytest.mark.parametrize("name", ["grpo", "online_grpo"])
def test_loss_types_do_not_depend_on_the_cut(name: str, loss_type: str) -> None:
    """Pitfalls A-20, A-21; ``bnpo`` is a mean of micro-batch means by definition."""
    results = [
        run(
            name,
            trainer=needs(name, "llama"),
            loss_type=loss_type,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=8 // size,
        )
        for size in (8, 2, 1)
    ]
    for trainer, captured in results[1:]:
        assert difference(captured.steps[0], results[0][1].steps[0]) < TOLERANCE
        assert logged(trainer, "loss") == pytest.approx(logged(results[0][0], "loss"), rel=TOLERANCE, abs=1e-7)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("name", ["grpo", "online_grpo"])
def test_scales_of_rewards_do_not_depend_on_the_cut(name: str, scale: str) -> None:
    """The statistics are those of the whole rollout or step, not of a micro-batch."""
    whole = run(name, scale_rewards=scale)[1]
    parts = run(name, scale_rewards=scale, per_device_train_batch_size=2, gradient_accumulation_steps=4)[1]
    assert difference(parts.steps[0], whole.steps[0]) < TOLERANCE


def test_loss_types_differ() -> None:
    losses = [logged(run("grpo", loss_type=t)[0], "policy_loss")[0] for t in ("dapo", "grpo", "dr_grpo", "bnpo")]
    assert len({round(value, 6) for value in losses[:3]}) == 3
    assert losses[3] == pytest.approx(losses[0], rel=TOLERANCE)  # one micro-batch: its mean is the step's


@pytest.mark.parametrize("name", ["seq", "sft"])
def test_label_smoothing_does_not_depend_on_the_cut(name: str) -> None:
    """Pitfall D-72."""
    whole = run(name, label_smoothing=0.2)
    parts = run(name, label_smoothing=0.2, per_device_train_batch_size=1, gradient_accumulation_steps=8)
    assert difference(parts[1].steps[0], whole[1].steps[0]) < TOLERANCE
    assert difference(whole[1].steps[0], run(name)[1].steps[0]) > 0.01


def test_generation_window_does_not_change_the_denominator() -> None:
    """Pitfall A-20: two steps over one rollout, weighted by their tokens, are the one step over all of it."""
    whole = run("online_grpo", trainer=needs("online_grpo", "llama"))[1].steps[0]
    capture = CaptureGradients()
    trainer = build(
        "online_grpo",
        trainer=needs("online_grpo", "llama"),
        callbacks=[capture],
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        steps_per_generation=4,
    )
    calls = record(trainer)
    trainer.train()
    tokens = [int(batch.loss_mask.sum()) for _, batch in calls]
    first, second = sum(tokens[:2]), sum(tokens[2:])
    assert first != second
    joined = {
        name: (first * capture.steps[0][name] + second * capture.steps[1][name]) / (first + second) for name in whole
    }
    assert difference(joined, whole) < TOLERANCE


# ---- first pass over a rollout ----


def ratios(calls: list[tuple[Tensor, Batch]]) -> list[Tensor]:
    out = []
    for logprobs, batch in calls:
        assert batch.old_logprobs is not None
        out.append((logprobs - batch.old_logprobs)[batch.loss_mask].exp())
    return out


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize(
    ("name", "kind", "adapter"),
    [
        ("online_grpo", "llama", False),
        ("online_grpo", "gpt2", True),
        ("online_ppo", "gpt2", False),
        ("online_ppo", "mixtral", False),
    ],
)
def test_first_pass_has_ratio_one_and_the_second_has_not(name: str, kind: str, adapter: bool, size: int) -> None:
    """Pitfalls A-14, A-15, A-11: sampled for real, at temperature 0.5, with dropout in the model."""
    model = policy(kind)
    if adapter:
        model = lora(model, lora_dropout=0.5)  # refused by peft where experts are adapted
    trainer = build(
        name,
        model,
        engine=None,
        num_iterations=2,
        temperature=0.5,
        learning_rate=0.05,
        disable_dropout=None,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=8 // size,
    )
    calls = record(trainer)
    by_hand: list[Tensor] = []

    class BeforeTheFirstStep(GenerateEngine):
        def generate(self, *args: Any, **kwargs: Any) -> list[RolloutGroup]:
            groups = super().generate(*args, **kwargs)
            model = self._model
            for group in groups:
                for completion in group.completions:
                    row = torch.tensor([*group.prompt_ids, *completion.ids])
                    with torch.no_grad():
                        logits = model.eval()(input_ids=row.unsqueeze(0)).logits[0]
                    scores = torch.log_softmax(logits / 0.5, dim=-1)[len(group.prompt_ids) - 1 : -1]
                    by_hand.append(scores.gather(1, torch.tensor(completion.ids).unsqueeze(1)).squeeze(1))
            return groups

    trainer.rollouts.engine = BeforeTheFirstStep(trainer.processing_class)
    trainer.train()
    passes = 8 // size
    assert len(calls) == 2 * passes
    for ratio in ratios(calls[:passes]):
        assert (ratio - 1).abs().max() < TOLERANCE
    assert max(float((ratio - 1).abs().max()) for ratio in ratios(calls[passes:])) > 1e-3
    for name_of in ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"):
        assert logged(trainer, name_of)[0] == 0.0
    for name_of, atol in (("old_logprobs", 1e-5), ("sampling_logprobs", 1e-4)):
        got = [
            getattr(batch, name_of)[i][batch.completion_mask[i]]
            for _, batch in calls[:passes]
            for i in range(batch.num_rows)
        ]
        for mine, expected in zip(got, by_hand, strict=True):
            torch.testing.assert_close(mine, expected, atol=atol, rtol=atol)


def test_loss_is_zero_on_policy_but_the_gradient_is_not() -> None:
    """Pitfall A-1: equal lengths, rewards that differ, no KL."""
    trainer, captured = run("online_grpo", beta=0.0, engine=ReplayEngine(lengths=(4,)))
    assert abs(logged(trainer, "loss")[0]) < 1e-6
    assert max(float(value.norm()) for value in captured.steps[0].values()) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_left_padded_prompts_score_like_rows_alone(kind: str) -> None:
    """Pitfall A-16: GPT-2 has absolute positions, on which a shift would show."""
    trainer = build("sft", policy(kind), per_device_train_batch_size=8)
    calls = record(trainer)
    trainer.train()
    ((logprobs, batch),) = calls
    lengths = batch.prompt_mask.sum(dim=1)
    assert int(lengths.min()) < int(lengths.max())
    alone = scored_alone(trainer.model.eval(), batch)
    for i, expected in enumerate(alone):
        torch.testing.assert_close(logprobs[i][batch.completion_mask[i]], expected, atol=1e-5, rtol=1e-5)


# ---- reuse of rollouts ----

GRID = [
    (accumulation, steps, uses)
    for accumulation in (1, 2, 4)
    for steps in (accumulation, 2 * accumulation)
    for uses in (1, 2)
]
# Rollouts smaller than a step, also such that a step falls within a rollout's uses.
SMALL = [(4, 1, 1), (4, 1, 2), (4, 2, 1), (4, 2, 2), (4, 1, 3), (2, 1, 3), (4, 2, 3), (4, 1, 5)]


@pytest.mark.parametrize(("accumulation", "steps", "uses"), GRID + SMALL)
@pytest.mark.parametrize("name", ["online_grpo", "online_ppo"])
def test_reuse_of_rollouts(name: str, accumulation: int, steps: int, uses: int) -> None:
    """Pitfalls A-19, A-20: calls of the engine, optimizer steps, uses of every sample, old log-probs kept or not."""
    chunks = 3
    prompts = steps  # per rollout: 2 completions per micro-step, 2 per prompt
    engine = ReplayEngine(counted=True, lengths=(4, 8, 6, 5, 7))
    trainer = build(
        name,
        data=rows(name, prompts * chunks),
        engine=engine,
        num_generations=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=steps,
        num_iterations=uses,
        learning_rate=0.02,
    )
    calls = record(trainer)
    trainer.train()
    micro_steps = chunks * steps * uses
    assert engine.calls == chunks
    assert len(calls) == micro_steps
    assert trainer.state.global_step == -(-micro_steps // accumulation)
    assert trainer.rollouts.version.current == trainer.state.global_step

    served: dict[tuple[int, ...], list[int]] = {}
    for micro_step, (_, batch) in enumerate(calls):
        for i in range(batch.num_rows):
            served.setdefault(tuple(batch.completion_ids[i][batch.completion_mask[i]].tolist()), []).append(micro_step)
    assert len(served) == chunks * prompts * 2
    assert {len(steps_of) for steps_of in served.values()} == {uses}

    for micro_step, (logprobs, batch) in enumerate(calls):
        rollout_started = micro_step // (steps * uses) * (steps * uses)
        stepped = micro_step // accumulation > rollout_started // accumulation
        assert set(batch.policy_version.tolist()) == {rollout_started // accumulation}
        if batch.old_logprobs is None:
            assert not stepped, "an update fell within the rollout, but its old log-probs were not kept"
            continue
        distance = float((logprobs - batch.old_logprobs)[batch.loss_mask].abs().max())
        assert distance > 1e-5 if stepped else distance < TOLERANCE


@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_a_step_takes_the_same_prompts_on_any_number_of_processes(num_processes: int) -> None:
    """Pitfall A-22: rollouts of 16 prompts for 4 steps; every prompt once per use, none twice, none left out."""
    prompts, uses = 16 // num_processes, 3
    sampler = RolloutSampler(30, prompts, num_processes, uses, seed=1, block=4 // num_processes)
    order = list(RolloutSampler(30, 16, 1, uses, seed=1))
    served = list(sampler)
    assert len(served) == len(sampler) == len(order) == 2 * uses * 16
    assert set(served) == set(range(30))
    for start in range(0, len(served), 16):
        mine = served[start : start + 16]
        assert sorted(mine) == sorted(order[start : start + 16])
        for step in range(4):
            size = 4 // num_processes
            of_step = {
                mine[process * prompts + step * size + i] for process in range(num_processes) for i in range(size)
            }
            assert of_step == set(order[start + 4 * step : start + 4 * step + 4])
    places = [
        prompt_positions(prompts, process, num_processes, 4 // num_processes) for process in range(num_processes)
    ]
    assert sorted(place for of_process in places for place in of_process) == list(range(16))
    for process, of_process in enumerate(places):
        assert [order[place] for place in of_process] == served[process * prompts : (process + 1) * prompts]


def test_every_sample_is_scored_once_per_rollout() -> None:
    """Pitfall A-19: the second use finds rewards and advantages of the first."""
    seen: list[int] = []

    def counting(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        seen.append(len(completion_ids))
        return [float(sum(row) % 7) for row in completion_ids]

    trainer = build("online_grpo", reward_funcs=counting, num_iterations=3, learning_rate=0.01)
    calls = record(trainer)
    trainer.train()
    assert seen == [8]
    for _, batch in calls[1:]:
        assert torch.equal(batch.advantages, calls[0][1].advantages)
