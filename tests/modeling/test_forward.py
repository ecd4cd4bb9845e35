"""From a batch to numbers per completion token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import VOCAB, make_model
from harness import lora, scored_alone
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BloomConfig

from hf_strategies import Batch, Row
from hf_strategies.modeling import forward as forward_module
from hf_strategies.modeling.critic import attach_critic
from hf_strategies.modeling.forward import Forward
from hf_strategies.modeling.policy import disable_dropout
from hf_strategies.modeling.unwrap import causal_lm_of

KINDS = ["llama", "gpt2", "mixtral"]


def some_batch() -> Batch:
    """Rows of unequal prompts and completions, one of them without a completion."""
    generator = torch.Generator().manual_seed(2)

    def ids(count: int) -> list[int]:
        return torch.randint(6, len(VOCAB), (count,), generator=generator).tolist()

    sizes = [(3, 5), (9, 2), (1, 7), (4, 0)]
    return Batch.from_rows([Row(ids(p), ids(c), group=i) for i, (p, c) in enumerate(sizes)])


def real(values: Tensor, batch: Batch) -> list[Tensor]:
    return [values[i][batch.completion_mask[i]] for i in range(batch.num_rows)]


class OnlyIds(nn.Module):
    """A causal LM that takes neither ``position_ids`` nor ``logits_to_keep``."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self.config = inner.config

    def forward(self, input_ids: Tensor, attention_mask: Tensor, use_cache: bool = True) -> Any:
        positions = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
        return self.inner(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=positions, use_cache=use_cache
        )


# ---- alignment ----


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("kind", KINDS)
def test_padded_rows_score_like_rows_alone(kind: str, adapter: bool) -> None:
    """Pitfall A-16: the first completion token is scored by the last prompt token, wherever padding put it."""
    model = lora(make_model(kind)) if adapter else make_model(kind)
    batch = some_batch()
    got = real(Forward(model)(model, batch).policy.logprobs.detach(), batch)
    for mine, alone in zip(got, scored_alone(model, batch), strict=True):
        torch.testing.assert_close(mine, alone, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_what_padding_holds_does_not_matter(kind: str) -> None:
    model = make_model(kind)
    batch = some_batch()
    expected = Forward(model)(model, batch, wanted=("entropy", "vocab_mean")).policy
    garbage = batch.replace(
        prompt_ids=torch.where(batch.prompt_mask, batch.prompt_ids, torch.full_like(batch.prompt_ids, 17)),
        completion_ids=torch.where(
            batch.completion_mask, batch.completion_ids, torch.full_like(batch.completion_ids, 23)
        ),
    )
    got = Forward(model)(model, garbage, wanted=("entropy", "vocab_mean")).policy
    for name in ("logprobs", "entropy", "vocab_mean"):
        for mine, theirs in zip(real(getattr(got, name), batch), real(getattr(expected, name), batch), strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_needed_logits_are_asked_for(kind: str) -> None:
    """With and without ``logits_to_keep`` the numbers are the same; with it the prompt's logits are never built."""
    model = make_model(kind)
    batch = some_batch()
    shapes: list[torch.Size] = []
    hook = model.lm_head.register_forward_hook(lambda module, args, output: shapes.append(output.shape))
    kept = Forward(model)(model, batch).policy.logprobs
    width = batch.completion_ids.shape[1]
    assert shapes == [torch.Size([batch.num_rows, width + 1, len(VOCAB)])]
    plain = OnlyIds(model)
    full = Forward(plain)(plain, batch).policy.logprobs
    assert shapes[1][1] == batch.input_ids.shape[1]
    hook.remove()
    for mine, theirs in zip(real(full, batch), real(kept, batch), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def test_a_model_without_positions() -> None:
    """Pitfall A-16: ALiBi reads the mask itself and takes no ``position_ids``."""
    torch.manual_seed(0)
    config = BloomConfig(vocab_size=len(VOCAB), hidden_size=32, n_layer=2, n_head=4, initializer_range=0.3)
    model = AutoModelForCausalLM.from_config(config).eval()
    scores = Forward(model)
    assert not scores.takes_positions
    batch = some_batch()
    got = real(scores(model, batch).policy.logprobs.detach(), batch)
    for mine, alone in zip(got, scored_alone(model, batch), strict=True):
        torch.testing.assert_close(mine, alone, atol=1e-5, rtol=1e-5)


# ---- chunks ----


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunks_change_neither_values_nor_gradients(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pitfall D-74: 1, 3 or all positions at a time."""
    batch = some_batch()
    results = []
    for chunk in (1, 3, 7, 10_000):
        monkeypatch.setattr(forward_module, "POSITIONS_PER_CHUNK", chunk)
        model = make_model("llama")
        policy = Forward(model, temperature)(model, batch, wanted=("entropy", "vocab_mean")).policy
        (policy.logprobs[batch.loss_mask].sum() + policy.vocab_mean[batch.loss_mask].sum()).backward()
        results.append((policy, {name: p.grad for name, p in model.named_parameters()}))
    whole, gradients = results[-1]
    assert max(float(g.abs().max()) for g in gradients.values()) > 0.1
    for policy, grads in results[:-1]:
        for name in ("logprobs", "entropy", "vocab_mean"):
            torch.testing.assert_close(getattr(policy, name), getattr(whole, name), atol=1e-6, rtol=1e-6)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, gradients[name], atol=1e-5, rtol=1e-5)


# ---- numbers ----


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_numbers_against_the_definition(temperature: float) -> None:
    """Pitfall A-11: everything is of logits / temperature."""
    model = make_model("llama")
    batch = some_batch()
    policy = Forward(model, temperature)(model, batch, wanted=("entropy", "vocab_mean")).policy
    with torch.no_grad():
        logits = model(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask.long(), position_ids=batch.position_ids
        ).logits
    start = batch.prompt_ids.shape[1] - 1
    table = (logits[:, start:-1].double() / temperature).log_softmax(-1)
    expected = {
        "logprobs": table.gather(-1, batch.completion_ids.unsqueeze(-1)).squeeze(-1),
        "entropy": -(table.exp() * table).sum(-1),
        "vocab_mean": table.mean(-1),
    }
    for name, values in expected.items():
        got = getattr(policy, name)
        torch.testing.assert_close(
            got[batch.completion_mask].double(), values[batch.completion_mask], atol=1e-4, rtol=0
        )
    assert policy.logprobs.requires_grad
    assert not policy.entropy.requires_grad


def test_nothing_is_computed_that_was_not_asked_for() -> None:
    model = make_model("mixtral")
    result = Forward(model)(model, some_batch())
    assert result.policy.entropy is result.policy.vocab_mean is result.policy.values is None
    assert result.aux_loss is result.router_load is None
    with_router = Forward(model)(model, some_batch(), router=True)
    assert with_router.aux_loss.requires_grad
    assert float(with_router.router_load.tokens) == float(some_batch().attention_mask.sum())
    dense = make_model("llama")
    assert Forward(dense)(dense, some_batch(), router=True).aux_loss is None


def test_half_precision_is_raised_to_float32() -> None:
    """Sums of bfloat16 log-probabilities would lose whole digits."""
    model = make_model("llama").to(torch.bfloat16)
    batch = some_batch()
    policy = Forward(model)(model, batch, wanted=("entropy", "vocab_mean")).policy
    assert {policy.logprobs.dtype, policy.entropy.dtype, policy.vocab_mean.dtype} == {torch.float32}
    with torch.no_grad():
        logits = model(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask.long(), position_ids=batch.position_ids
        ).logits[:, batch.prompt_ids.shape[1] - 1 : -1]
    assert logits.dtype == torch.bfloat16
    exact = logits.float().log_softmax(-1).gather(-1, batch.completion_ids.unsqueeze(-1)).squeeze(-1)
    coarse = logits.log_softmax(-1).float().gather(-1, batch.completion_ids.unsqueeze(-1)).squeeze(-1)
    mask = batch.completion_mask
    torch.testing.assert_close(policy.logprobs[mask].detach(), exact[mask], atol=1e-5, rtol=1e-5)
    assert float((coarse - exact)[mask].abs().max()) > 1e-3


def test_double_precision_stays() -> None:
    model = make_model("llama").double()
    assert Forward(model)(model, some_batch()).policy.logprobs.dtype == torch.float64


def test_values_belong_to_the_state_before_each_token() -> None:
    model = make_model("gpt2")
    critic = attach_critic(model)
    torch.manual_seed(3)
    nn.init.normal_(critic.head.weight)
    batch = some_batch()
    got = real(Forward(model)(model, batch, values=True).policy.values.detach(), batch)
    for i, mine in enumerate(got):
        prompt = batch.prompt_ids[i][batch.prompt_mask[i]]
        row = torch.cat([prompt, batch.completion_ids[i][batch.completion_mask[i]]])
        with torch.no_grad():
            hidden = model.transformer(input_ids=row.unsqueeze(0)).last_hidden_state[0]
            expected = critic(hidden)[len(prompt) - 1 : -1]
        torch.testing.assert_close(mine, expected, atol=1e-4, rtol=1e-4)
    plain = make_model("gpt2")
    with pytest.raises(ValueError, match="carries no critic"):
        Forward(plain)(plain, batch, values=True)


# ---- dropout ----


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_dropout_is_switched_off_everywhere(kind: str, adapter: bool) -> None:
    """Pitfall A-15: the model's own, the attention's and LoRA's; two passes in training mode agree."""
    # GPT-2 has dropout of 0.1 in three places by default.
    model = make_model(kind, **({"attention_dropout": 0.5} if kind == "llama" else {}))
    if adapter:
        model = lora(model, lora_dropout=0.5)
    model.train()
    batch, score = some_batch(), Forward(model)
    with torch.no_grad():
        first, second = (score(model, batch).policy.logprobs for _ in range(2))
        assert float((first - second)[batch.completion_mask].abs().max()) > 1e-3
        disable_dropout(model)
        first, second = (score(model, batch).policy.logprobs for _ in range(2))
        assert torch.equal(first, second)
        assert torch.equal(first, score(model.eval(), batch).policy.logprobs)


def test_the_model_inside() -> None:
    model = make_model("llama")
    assert causal_lm_of(model) is model
    assert causal_lm_of(lora(model)) is model
