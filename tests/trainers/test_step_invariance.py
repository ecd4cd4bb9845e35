"""How an optimizer step is cut, padded or ordered must not matter: one matrix over all strategies."""

from __future__ import annotations

import pytest
import torch
from conftest import EOS, make_model, make_tokenizer
from harness import NAMES, ONLINE, ReplayEngine, build, difference, logged, policy, rows, run, word

from hf_strategies import Batch, Row
from hf_strategies.modeling.forward import Forward

TOLERANCE = 1e-5


def step(name: str, kind: str, adapter: bool, per_device: int, accumulation: int, **options: object) -> tuple:
    """One step of 8 rows (offline) or 2 groups of 4 (online): its gradients and logged loss."""
    trainer, capture = run(
        name,
        policy(kind, adapter),
        per_device_train_batch_size=per_device,
        gradient_accumulation_steps=accumulation,
        max_steps=1,
        **options,
    )
    return capture.steps[0], logged(trainer, "loss")[0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("kind", "adapter"), [("llama", False), ("llama", True), ("gpt2", False), ("mixtral", True)])
def test_splits(name: str, kind: str, adapter: bool) -> None:
    """Pitfalls A-20, A-21, C-60, D-71: 8 x 1, 4 x 2 and 1 x 8 give one loss and one gradient."""
    whole, loss = step(name, kind, adapter, 8, 1)
    for per_device, accumulation in ((4, 2), (1, 8)):
        parts, part_loss = step(name, kind, adapter, per_device, accumulation)
        assert difference(parts, whole) < TOLERANCE
        assert part_loss == pytest.approx(loss, abs=1e-5, rel=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_pad_token_is_eos(name: str) -> None:
    """Pitfalls A-10, D-63: pad == eos changes nothing."""
    whole, loss = step(name, "gpt2", False, 8, 1)
    same, same_loss = step(name, "gpt2", False, 8, 1, tokenizer=make_tokenizer(pad_is_eos=True))
    assert difference(same, whole) < TOLERANCE
    assert same_loss == pytest.approx(loss, abs=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_row_order(name: str) -> None:
    data = rows(name, 2 if name in ONLINE else 8)
    whole = run(name, policy("llama", False), data, max_steps=1)[1].steps[0]
    turned = run(name, policy("llama", False), data[::-1], max_steps=1)[1].steps[0]
    assert difference(turned, whole) < TOLERANCE


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ONLINE])
def test_short_last_window(name: str) -> None:
    """Five micro-batches at accumulation 4: the lone last one weighs as much as if it were a step of its own."""
    # Documents that fill a packed row each, so that five rows are five micro-batches.
    data = [{"text": word(i, 21)} for i in range(5)] if name == "seq" else rows(name, 5)
    trainer, capture = run(
        name, policy("llama", False), data, per_device_train_batch_size=1, gradient_accumulation_steps=4
    )
    assert trainer.state.global_step == 2
    # The second step's gradient is that of some single row trained alone.
    alone = [
        run(name, policy("llama", False), [row], per_device_train_batch_size=1, max_steps=1)[1].steps[0]
        for row in data
    ]
    assert min(difference(capture.steps[1], single) for single in alone) < TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_nothing_to_train(name: str) -> None:
    """Pitfall A-7: an all-masked batch gives a finite zero that is attached to the graph."""
    trainer = build(name)
    batch = Batch.from_rows([Row([7, 8], [9, 10, EOS], loss_mask=[False] * 3, reward=1.0) for _ in range(2)])
    zeros = torch.zeros(2, 3)
    batch = batch.replace(
        group=torch.full((2,), -1), ref_logprobs=zeros, old_logprobs=zeros, advantages=zeros, returns=zeros
    )
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, {"batch": batch})
    loss.backward()
    assert loss.item() == 0.0
    gradients = [p.grad for p in trainer.model.parameters() if p.grad is not None]
    assert gradients
    assert all(torch.equal(g, torch.zeros_like(g)) for g in gradients)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("per_device", [4, 8])
def test_first_pass_ratio_is_one(kind: str, per_device: int) -> None:
    """Pitfalls A-11, A-14, A-15: real sampling at temperature 0.7; what training computes is what sampling recorded."""
    trainer = build(
        "online_grpo",
        make_model(kind),
        engine=None,
        per_device_train_batch_size=per_device,
        gradient_accumulation_steps=8 // per_device,
        num_iterations=2,
        temperature=0.7,
        max_steps=1,
        learning_rate=0.5,
    )
    kept: list[Batch] = []
    fill = trainer.rollouts.buffer.fill  # type: ignore[union-attr]

    def keep(batches: list[Batch]) -> None:
        kept.extend(batches)
        fill(batches)

    trainer.rollouts.buffer.fill = keep  # type: ignore[union-attr, method-assign]
    before = make_model(kind)
    trainer.train()
    assert kept
    for batch in kept:
        assert batch.old_logprobs is not None
        assert batch.sampling_logprobs is not None
        for logits_temperature, close in ((0.7, True), (1.0, False)):
            scored = Forward(before, logits_temperature)(before, batch).policy.logprobs
            ratio = (scored - batch.old_logprobs)[batch.loss_mask].exp()
            assert bool(((ratio - 1).abs() < 1e-5).all()) is close
        gap = (batch.old_logprobs - batch.sampling_logprobs)[batch.loss_mask].abs().max()
        assert gap < 1e-4


def test_ratio_moves_after_a_step() -> None:
    """The second pass on a rollout compares with the policy before the first: clipping sets in."""
    trainer, _ = run("online_grpo", num_iterations=2, max_steps=2, learning_rate=2.0, beta=0.0)
    first, second = logged(trainer, "clip_ratio/region_mean")
    assert first == 0.0
    assert second > 0.0


def test_left_padding_on_absolute_positions() -> None:
    """Pitfall A-16: a padded GPT-2 row scores like the row alone."""
    model = make_model("gpt2")
    short, long = Row([7, 8, 9], [10, 11, EOS]), Row(list(range(6, 16)), [20, 21, 22, 23], group=1)
    forward = Forward(model)
    alone = forward(model, Batch.from_rows([short])).policy.logprobs[0]
    beside = forward(model, Batch.from_rows([short, long])).policy.logprobs[0, :3]
    torch.testing.assert_close(beside, alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("accumulation", [1, 2, 4])
@pytest.mark.parametrize("factor", [1, 2])
@pytest.mark.parametrize("iterations", [1, 2])
def test_reuse_grid(accumulation: int, factor: int, iterations: int) -> None:
    """Pitfall A-19: one generation every steps_per_generation micro-steps, every row used num_iterations times."""
    engine = ReplayEngine(lengths=(3, 8, 6, 5, 7, 4), counted=True)
    uses: dict[tuple[int, ...], int] = {}
    trainer = build(
        "online_grpo",
        engine=engine,
        data=rows("online_grpo", 4 * accumulation * factor // 4),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=accumulation * factor,
        num_iterations=iterations,
        num_train_epochs=2,
    )
    score = trainer.compute_loss

    def count(model: object, inputs: dict, *args: object, **kwargs: object) -> torch.Tensor:
        for i in range(inputs["batch"].num_rows):
            key = (*inputs["batch"].prompt_ids[i].tolist(), *inputs["batch"].completion_ids[i].tolist())
            uses[key] = uses.get(key, 0) + 1
        return score(model, inputs, *args, **kwargs)

    trainer.compute_loss = count  # type: ignore[method-assign]
    trainer.train()
    assert engine.calls == 2  # one rollout holds all prompts of an epoch
    # By hand: an epoch is steps_per_generation * iterations micro-steps, accumulation of them make a step.
    assert trainer.state.global_step == 2 * factor * iterations
    assert trainer.rollouts.version.current == trainer.state.global_step  # type: ignore[union-attr]
    assert set(uses.values()) == {iterations}
