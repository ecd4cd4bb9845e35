"""What must hold for the loss of every strategy with every option that changes its formula.

Policies are looked up by token id (see `pure.policy_from`): every token has its own entry in a table, so a gradient is
known per token, however the batch was cut, padded or sorted. Id 0 is padding, and ids of tokens that are seen but not
trained have entries too: those must never matter.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pure import GARBAGE, NAN, batch_of, booleans, close, number, policy_from
from torch import Tensor

from hf_strategies import Batch, Strategy, make_strategy
from hf_strategies.batch import TOKEN_FIELDS
from hf_strategies.preference import LOSSES
from hf_strategies.stats import Extreme

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "seq": ("seq", {}),
    "seq smoothed": ("seq", {"label_smoothing": 0.2}),
    "sft": ("sft", {}),
    "sft smoothed": ("sft", {"label_smoothing": 0.2}),
    "sft dft": ("sft", {"loss_type": "dft"}),
    "seq dft": ("seq", {"loss_type": "dft"}),
    "dpo": ("dpo", {"beta": 0.3}),
    "dpo mean": ("dpo", {"beta": 0.3, "reduction": "mean"}),
    "online_dpo": ("online_dpo", {"beta": 0.3}),
    **{
        f"dpo {name}": ("dpo", {"loss_type": name, "beta": 0.3, "label_smoothing": 0.1 if loss.smooths else 0.0})
        for name, loss in LOSSES.items()
        if not loss.sorts  # over all pairs of a micro-batch
    },
    "dpo several": ("dpo", {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]}),
    "dpo diverging": ("dpo", {"f_divergence_type": "forward_kl"}),
    "dpo by length": ("dpo", {"ld_alpha": 0.3, "beta": 0.3}),
    "dpo all pairs": ("online_dpo", {"pair_selection": "all_pairs", "beta": 0.3}),
    **{
        f"grpo {how} beta={beta} high={high}": (
            "grpo",
            {"loss_type": how, "beta": beta, "epsilon_high": high, "max_completion_length": 7},
        )
        for how in ("dapo", "grpo", "dr_grpo", "bnpo")
        for beta, high in ((0.0, None), (0.5, 0.4))
    },
    "grpo batch": ("grpo", {"scale_rewards": "batch"}),
    "grpo none": ("online_grpo", {"scale_rewards": False}),
    "ppo": ("online_ppo", {"gamma": 0.9, "kl_coef": 0.1}),
    "ppo without KL": ("online_ppo", {"kl_coef": 0.0, "vf_coef": 2.0}),
}
every_case = pytest.mark.parametrize("case", CASES)

# Two groups of two rows. Holes are a tool's answer; the last row of the first group is empty where rows may be.
MASK = [[1, 1, 0, 1, 0], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 0, 1]]
PAIRS = [[1, 1, 0, 1, 0], [0, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 0, 1]]
GROUP = [0, 0, 1, 1]


def build(case: str) -> tuple[Strategy, Batch, Tensor]:
    """Strategy, batch with credit assigned, and the policy's table."""
    name, options = CASES[case]
    strategy = make_strategy(name, **options)
    generator = torch.Generator().manual_seed(7)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    mask = booleans(PAIRS if strategy.keep_groups else MASK)
    table = -2.0 + 0.3 * noise(3, 21)
    batch = batch_of(mask, GROUP)
    logprobs = table[0][batch.completion_ids]
    batch = batch.replace(
        rewards=torch.tensor([1.0, 0.0, 2.5, 0.5], dtype=torch.float64),
        reward_std=torch.full((4,), 0.8, dtype=torch.float64),
        # Ratios between 0.6 and 1.6: some clipped, some not, none at a bound.
        old_logprobs=logprobs + 0.25 * noise(4, 5),
        ref_logprobs=logprobs + 0.5 * noise(4, 5),
        values=noise(4, 5),
    )
    batch, _ = strategy.select(batch)
    batch, _ = strategy.assign_credit(batch)
    # Credit is stored in float32; what is compared here is compared in float64.
    return (
        strategy,
        batch.replace(**{n: v.double() for n, v in batch.tensors().items() if v.is_floating_point()}),
        table,
    )


def step(strategy: Strategy, batches: list[Batch], table: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and gradient of an optimizer step over micro-batches."""
    table = table.clone().requires_grad_()
    items = torch.stack([strategy.count_items(batch) for batch in batches]).sum().clamp(min=1)
    losses = [strategy.loss(policy_from(table, batch), batch, items)[0] for batch in batches]
    gradients = torch.autograd.grad(torch.stack(losses).sum(), table)
    return torch.stack([loss.detach() for loss in losses]).sum(), gradients[0]


def trained_ids(batch: Batch) -> Tensor:
    return batch.completion_ids[batch.loss_mask]


# The weight of dft is part of the loss and not of the gradient: its gradients are in test_sft.
@pytest.mark.parametrize("case", [case for case in CASES if "dft" not in case])
def test_gradient_is_that_of_finite_differences(case: str) -> None:
    strategy, batch, table = build(case)
    if strategy.needs_old_logprobs or "grpo" in case:
        ratio = (table[0][batch.completion_ids] - batch.old_logprobs).exp()[batch.loss_mask]
        assert ratio.min() < 0.8  # the cut is in the picture
        assert ratio.max() > 1.2
    _, gradient = step(strategy, [batch], table)
    numeric, h = torch.zeros_like(table), 1e-6
    for i in range(table.numel()):
        for sign in (1, -1):
            moved = table.flatten().clone()
            moved[i] += sign * h
            numeric.view(-1)[i] += sign * step(strategy, [batch], moved.view_as(table))[0] / (2 * h)
    close(gradient, numeric, atol=1e-9, rtol=1e-7)
    assert (gradient != 0).any()


@every_case
@pytest.mark.parametrize("garbage", GARBAGE)
def test_masked_slots_do_not_matter(case: str, garbage: float) -> None:
    """Pitfalls A-7, B-51: whatever padding and tool tokens hold, in the policy and in the batch."""
    strategy, batch, table = build(case)
    loss, gradient = step(strategy, [batch], table)
    masked = torch.ones(table.shape[1], dtype=torch.bool)
    masked[trained_ids(batch)] = False
    dirty = {n: getattr(batch, n) for n in TOKEN_FIELDS if getattr(batch, n) is not None}
    dirty = {n: value.masked_fill(~batch.loss_mask, garbage) for n, value in dirty.items()}
    dirty_loss, dirty_gradient = step(strategy, [batch.replace(**dirty)], table.masked_fill(masked, garbage))
    assert torch.equal(dirty_loss, loss)
    assert torch.equal(dirty_gradient, gradient)
    assert torch.equal(gradient[:, masked], torch.zeros(3, int(masked.sum()), dtype=torch.float64))


@every_case
@pytest.mark.parametrize("garbage", GARBAGE)
def test_a_batch_that_trains_nothing(case: str, garbage: float) -> None:
    """Pitfalls A-7, D-66: a zero, and a backward pass that gives zeros: other processes wait for it."""
    strategy, batch, table = build(case)
    blank = batch.blank()
    assert strategy.count_items(blank) == 0
    table = torch.full_like(table, garbage).requires_grad_()
    loss, metrics = strategy.loss(policy_from(table, blank), blank, torch.tensor(3.0, dtype=torch.float64))
    assert loss.item() == 0.0
    (gradient,) = torch.autograd.grad(loss, table)
    assert torch.equal(gradient, torch.zeros_like(gradient))
    for name, metric in metrics.items():
        nothing = float(metric.value) if isinstance(metric, Extreme) else float(metric.total)
        assert nothing == 0.0, name
        assert isinstance(metric, Extreme) or metric.count == 0, name


@every_case
def test_the_cut_does_not_matter(case: str) -> None:
    """Pitfalls A-20, A-21, D-71. bnpo is a mean of micro-batch means by definition, so it does depend on the cut."""
    strategy, batch, table = build(case)
    loss, gradient = step(strategy, [batch], table)
    for parts in (2, 3, 4, 9):
        batches = batch.split(parts, keep_groups=strategy.keep_groups)
        assert len(batches) == parts
        cut_loss, cut_gradient = step(strategy, batches, table)
        if "bnpo" in case:
            assert (cut_gradient - gradient).abs().max() > 1e-3
        else:
            close(cut_loss, loss)
            close(cut_gradient, gradient)


@every_case
def test_order_of_groups_does_not_matter(case: str) -> None:
    strategy, batch, table = build(case)
    loss, gradient = step(strategy, [batch], table)
    turned_loss, turned_gradient = step(strategy, [batch.select([2, 3, 0, 1])], table)
    close(turned_loss, loss)
    close(turned_gradient, gradient)


@every_case
def test_padding_does_not_matter(case: str) -> None:
    """Pitfall B-47: neither loss nor any metric changes when columns of padding are added."""
    strategy, batch, table = build(case)
    table[:, 0] = NAN
    longer = Batch.cat([batch, batch_of(booleans([[1] * 9]), [9]).replace(**_like(batch))])
    padded = longer.replace(**{name: value[:4] for name, value in longer.tensors().items()})
    assert padded.completion_ids.shape == (4, 9)
    loss, gradient = step(strategy, [batch], table)
    padded_loss, padded_gradient = step(strategy, [padded], table)
    close(padded_loss, loss)
    close(padded_gradient, gradient)
    items = torch.tensor(1.0)
    _, metrics = strategy.loss(policy_from(table, batch), batch, items)
    _, padded_metrics = strategy.loss(policy_from(table, padded), padded, items)
    assert {n: number(m) for n, m in padded_metrics.items()} == pytest.approx(
        {n: number(m) for n, m in metrics.items()}, abs=1e-12
    )


def _like(batch: Batch) -> dict[str, Tensor]:
    """Fields that a row beside ``batch`` must have too."""
    one_row = {"rewards": torch.zeros(1), "reward_std": torch.zeros(1)}
    tokens = {name: torch.zeros(1, 9) for name in TOKEN_FIELDS if getattr(batch, name) is not None}
    return {name: value.double() for name, value in (one_row | tokens).items()}


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_result_is_attached_and_metrics_are_not(case: str, dtype: torch.dtype) -> None:
    strategy, batch, table = build(case)
    batch = batch.replace(**{n: getattr(batch, n).to(dtype) for n in TOKEN_FIELDS if getattr(batch, n) is not None})
    policy = policy_from(table.to(dtype).requires_grad_(), batch)
    loss, metrics = strategy.loss(policy, batch, strategy.count_items(batch))
    assert loss.shape == ()
    assert loss.dtype == dtype
    assert loss.requires_grad
    for metric in metrics.values():
        numbers = [metric.value] if isinstance(metric, Extreme) else [metric.total, metric.count]
        assert numbers[0].is_floating_point()
        assert not any(n.requires_grad for n in numbers)
        assert all(n.shape == () for n in numbers)
    assert strategy.count_items(batch).dtype == torch.float64


# Losses that are one term; the others' shares are tested with the strategy.
ONE_TERM = [case for case, (name, o) in CASES.items() if "dpo" in name or not ("ppo" in name or o.get("beta"))]


@pytest.mark.parametrize("case", ONE_TERM)
def test_shares_of_the_loss_add_up(case: str) -> None:
    """The logged part of the task is the loss of the step, from any cut, and its name says whose it is."""
    strategy, batch, table = build(case)
    name = {"seq": "task_loss", "sft": "task_loss", "dpo": "dpo_loss", "online_dpo": "dpo_loss"}
    batches = batch.split(2, keep_groups=strategy.keep_groups)
    items = torch.stack([strategy.count_items(b) for b in batches]).sum()
    results = [strategy.loss(policy_from(table, b), b, items) for b in batches]
    shares = [metrics[name.get(case.split()[0], "policy_loss")] for _, metrics in results]
    assert all(share.total.dtype == torch.float64 for share in shares)  # type: ignore[union-attr]
    assert sum(share.count for share in shares) == items  # type: ignore[union-attr]
    logged = sum(number(share) * share.count for share in shares if share.count) / items  # type: ignore[union-attr]
    close(logged, sum(loss.item() for loss, _ in results))
