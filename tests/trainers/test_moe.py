"""Mixtures of experts: the balance loss and the router's diagnostics, for every strategy."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from harness import (
    NAMES,
    ONLINE,
    CaptureGradients,
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
)
from torch import Tensor, nn

from hf_strategies.batch import Batch

MOE_METRICS = (
    "moe/router_entropy",
    "moe/dead_expert_fraction",
    "moe/load_imbalance_mean",
    "moe/load_imbalance_max",
)
ROUTER = "mlp.gate.weight"


def moe(name: str, data: Any = None, coefficient: float = 1.0, **options: Any) -> tuple[Any, CaptureGradients]:
    model = options.pop("model", None) or policy("mixtral")
    return run(name, model, data, trainer=needs(name, "mixtral"), router_aux_loss_coef=coefficient, **options)


def aux_gradient(name: str, data: Any = None, **options: Any) -> dict[str, Tensor]:
    """Gradient of the balance loss alone: with coefficient 1 less the one with coefficient 0."""
    on, off = (moe(name, data, coefficient, **options)[1].steps[0] for coefficient in (1.0, 0.0))
    return {key: on[key] - off[key] for key in on}


def router_of(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value for key, value in gradients.items() if key.endswith(ROUTER)}


def aux_loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """The model's own balance loss, called by hand."""
    return model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask.long(),
        position_ids=batch.position_ids,
        output_router_logits=True,
    ).aux_loss


@pytest.mark.parametrize("name", NAMES)
def test_accumulation_does_not_multiply_the_balance_loss(name: str) -> None:
    """Pitfall E-79: four copies of a micro-batch give the loss and the gradients of one."""
    data = rows(name, 1)
    options: dict[str, Any] = {"per_device_train_batch_size": 4 if name in ONLINE else 1}
    if name == "seq":
        options["max_length"] = len(data[0]["text"]) + 1  # a packed row holds one document and its end
    one_trainer, one = moe(name, data, **options)
    four_trainer, four = moe(name, data * 4, gradient_accumulation_steps=4, **options)
    assert len(one.steps) == len(four.steps) == 1
    assert difference(router_of(four.steps[0]), router_of(one.steps[0])) < 1e-5
    assert difference(four.steps[0], one.steps[0]) < 1e-5
    for key in ("loss", "aux_loss", "aux_loss_weighted"):
        assert logged(four_trainer, key) == pytest.approx(logged(one_trainer, key), rel=1e-5, abs=1e-7)
    # The balance loss is a visible part of the router's gradient, so that the comparison says something.
    assert difference(router_of(one.steps[0]), router_of(moe(name, data, 0.0, **options)[1].steps[0])) > 1e-2


@pytest.mark.parametrize("name", ["sft", "online_grpo"])
def test_different_micro_batches_are_weighted_by_their_tokens(name: str) -> None:
    """Pitfall E-79: a product of batch means has no exact split; this is what is promised instead."""
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    if name in ONLINE:
        options |= {"num_generations": 2}
    data = rows(name, 4 if name in ONLINE else 8)
    trainer = build(name, policy("mixtral"), data, trainer=needs(name, "mixtral"), **options)
    calls = record(trainer)
    trainer.train()
    got = aux_gradient(name, data, **options)
    model = policy("mixtral").train()
    tokens = [int(batch.num_tokens) for _, batch in calls]
    assert len(set(tokens)) > 1
    losses = [aux_loss_of(model, batch) for _, batch in calls]
    weighted = sum(n * value for n, value in zip(tokens, losses, strict=True)) / sum(tokens)
    weighted.backward()
    expected = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    assert difference(router_of(got), router_of(expected)) < 1e-4  # the difference of two float32 gradients
    on, _ = moe(name, data, 0.5, **options)
    assert logged(on, "aux_loss") == pytest.approx([float(weighted)], rel=1e-5)
    assert logged(on, "aux_loss_weighted") == pytest.approx([0.5 * float(weighted)], rel=1e-5)


@pytest.mark.parametrize("asked_by_config", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_balance_loss_is_added_once(name: str, asked_by_config: bool) -> None:
    """Pitfalls E-78, C-61: loss with coefficient c less loss with 0 is c * aux, also where the model's config asks."""

    def model() -> Any:
        return policy("mixtral", output_router_logits=asked_by_config, router_aux_loss_coef=0.7)

    with_it, _ = moe(name, coefficient=0.3, model=model())
    without, _ = moe(name, coefficient=0.0, model=model())
    aux = logged(without, "aux_loss")[0]
    assert aux > 1.0  # coefficient 0 still reports it
    assert logged(without, "aux_loss_weighted") == [0.0]
    assert logged(with_it, "aux_loss")[0] == pytest.approx(aux, rel=1e-6)
    difference_of_losses = logged(with_it, "loss")[0] - logged(without, "loss")[0]
    assert difference_of_losses == pytest.approx(0.3 * aux, rel=1e-5)


def test_balance_loss_through_a_wrapper() -> None:
    """Pitfall C-61: the coefficient is the config's and the loss the model's, whatever wraps the model."""

    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, **kwargs: Any) -> Any:
            return self.module(**kwargs)

    trainer = build("dpo", policy("mixtral"), trainer=needs("dpo", "mixtral"), router_aux_loss_coef=0.3)
    calls = record(trainer)
    trainer.train()
    batch = calls[0][1]
    plain = trainer.compute_loss(trainer.model.train(), {"batch": batch})
    wrapped = trainer.compute_loss(Wrapper(trainer.model).train(), {"batch": batch})
    assert torch.equal(plain, wrapped)
    aux = float(aux_loss_of(trainer.model, batch))
    assert float(plain) == pytest.approx(logged(trainer, "dpo_loss")[0] + 0.3 * aux, rel=1e-5)


def test_default_of_the_model_is_silence() -> None:
    """Pitfall E-78: without being asked for, Mixtral's balance loss is None."""
    model = policy("mixtral")
    assert model(input_ids=torch.tensor([[7, 8, 9]])).aux_loss is None
    assert model.config.output_router_logits is False
    assert build("sft", model, router_aux_loss_coef=0.001).args.router_aux_loss_coef == 0.001
    trainer, _ = moe("sft", model=model)
    assert trainer.model.config.output_router_logits is False  # the saved config stays the model's


@pytest.mark.parametrize("name", NAMES)
def test_padding_does_not_count(name: str) -> None:
    """Pitfall E-77: balance loss and diagnostics with more padding, and garbage in it, are those without."""
    plain, plain_gradients = moe(name)
    more, more_gradients = moe(name, transform=padded)
    for key in ("aux_loss", "aux_loss_weighted", *MOE_METRICS):
        assert logged(more, key) == pytest.approx(logged(plain, key), rel=1e-5, abs=1e-7), key
    assert difference(more_gradients.steps[0], plain_gradients.steps[0]) < 1e-5


def test_rows_that_only_fill_a_place_do_not_count() -> None:
    """One pair in four micro-batches: the three blank ones add no balance loss, no load and no tokens."""
    data = rows("online_dpo", 1)
    whole, one = moe("online_dpo", data, per_device_train_batch_size=4)
    cut, four = moe("online_dpo", data, per_device_train_batch_size=1, gradient_accumulation_steps=4)
    for key in ("loss", "num_tokens", "aux_loss", "aux_loss_weighted", *MOE_METRICS):
        assert logged(cut, key) == pytest.approx(logged(whole, key), rel=1e-5, abs=1e-7), key
    assert difference(four.steps[0], one.steps[0]) < 1e-5


def test_nothing_but_blank_rows() -> None:
    """All pairs tied: no tokens at all, and no division by them."""

    def tied(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        return [1.0] * len(completion_ids)

    trainer, captured = moe("online_dpo", reward_funcs=tied)
    assert logged(trainer, "loss") == [0.0]
    assert logged(trainer, "num_tokens") == [0]
    assert logged(trainer, "frac_pairs_tied") == [1.0]
    assert all(torch.count_nonzero(value) == 0 for value in captured.steps[0].values())


@pytest.mark.parametrize("cut", [(8, 1), (2, 4)])
def test_diagnostics_by_hand(cut: tuple[int, int]) -> None:
    """Counted row by row without padding from the model's own router logits, then averaged over layers."""
    trainer = build(
        "sft",
        policy("mixtral"),
        per_device_train_batch_size=cut[0],
        gradient_accumulation_steps=cut[1],
    )
    calls = record(trainer)
    trainer.train()
    model = policy("mixtral").eval()
    experts, k = 4, 2
    load = torch.zeros(2, experts)
    entropy = torch.zeros(2)
    tokens = 0
    for _, batch in calls:
        for i in range(batch.num_rows):
            ids = batch.input_ids[i][batch.attention_mask[i]]
            with torch.no_grad():
                logits = model(input_ids=ids.unsqueeze(0), output_router_logits=True).router_logits
            tokens += len(ids)
            for layer, values in enumerate(logits):
                probs = values.reshape(-1, experts).softmax(dim=-1)
                entropy[layer] += -(probs * probs.log()).sum()
                for chosen in probs.topk(k, dim=-1).indices.flatten().tolist():
                    load[layer, chosen] += 1
    ideal = tokens * k / experts
    expected = {
        "moe/router_entropy": float((entropy / tokens).mean()),
        "moe/dead_expert_fraction": float((load == 0).float().mean()),
        "moe/load_imbalance_mean": float((load / ideal - 1).abs().mean()),
        "moe/load_imbalance_max": float((load / ideal).amax(dim=-1).mean()),
    }
    for key, value in expected.items():
        assert logged(trainer, key) == pytest.approx([value], rel=1e-5, abs=1e-7), key
    assert 0 < expected["moe/router_entropy"] < math.log(experts)


def test_perfect_balance_is_top_k() -> None:
    """The balance loss of a router that spreads evenly is the number of experts a token goes to."""
    model = policy("mixtral")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(ROUTER):
                parameter.zero_()
    trainer, _ = moe("sft", model=model)
    assert logged(trainer, "aux_loss") == pytest.approx([2.0], rel=1e-6)
    assert logged(trainer, "moe/router_entropy") == pytest.approx([math.log(4)], rel=1e-6)


def test_dense_models_log_nothing_of_it() -> None:
    trainer, _ = run("sft")
    assert not [key for entry in trainer.state.log_history for key in entry if "moe/" in key or "aux" in key]


def test_reference_is_scored_without_it() -> None:
    """The reference of a mixture of experts gets log-probs only; its router leaves no trace in the diagnostics."""
    ours, _ = moe("dpo")
    other = needs("dpo", "mixtral")
    with torch.no_grad():
        for name, parameter in other["ref_model"].named_parameters():
            if name.endswith(ROUTER):
                parameter.neg_()
    theirs = build("dpo", policy("mixtral"), trainer=other, router_aux_loss_coef=1.0)
    theirs.train()
    for key in ("aux_loss", *MOE_METRICS):
        assert logged(theirs, key) == logged(ours, key)
    assert logged(theirs, "dpo_loss") != logged(ours, "dpo_loss")


def test_adapters_on_all_linear_layers_reach_experts_and_router() -> None:
    """Pitfall E-80: stated, because it surprises: the router's gate is adapted too, and its balance loss trains it."""
    model = lora(policy("mixtral"), nonzero=False)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert [name for name in trained if "experts" in name]
    assert [name for name in trained if ".mlp.gate." in name]
    _, captured = moe("sft", model=copy.deepcopy(model), coefficient=1.0)
    _, without = moe("sft", model=copy.deepcopy(model), coefficient=0.0)
    changed = [
        name
        for name, value in captured.steps[0].items()
        if ".mlp.gate." in name and "lora_B" in name and not torch.equal(value, without.steps[0][name])
    ]
    assert changed
