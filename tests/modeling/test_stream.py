"""The token stream against each row alone: same numbers, same gradients, fewer tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import BOS, EOS, PAD, VOCAB, make_model
from harness import difference, gradients, lora
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    GptOssConfig,
    GraniteConfig,
    Llama4TextConfig,
    MambaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen3Config,
)

from hf_strategies import Batch, Row
from hf_strategies.modeling import attention as attention_module
from hf_strategies.modeling.attention import enable_stream
from hf_strategies.modeling.critic import attach_critic
from hf_strategies.modeling.forward import CheckedForward, Forward
from hf_strategies.modeling.head import EXTRAS, LogitShape
from hf_strategies.modeling.policy import disable_dropout
from hf_strategies.modeling.stream import Stream
from hf_strategies.modeling.unwrap import causal_lm_of

SMALL: dict[str, Any] = {
    "vocab_size": len(VOCAB),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
WINDOW = 6
# Each asks its attention function for something of its own.
CONFIGS: dict[str, PretrainedConfig] = {
    "qwen3": Qwen3Config(**SMALL),
    "mistral": MistralConfig(**SMALL, sliding_window=WINDOW),
    "gemma2": Gemma2Config(
        **SMALL,
        sliding_window=WINDOW,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
        query_pre_attn_scalar=8,
    ),
    "granite": GraniteConfig(**SMALL, logits_scaling=3.0, attention_multiplier=0.2),
}
KINDS = ("llama", "gpt2", "mixtral", *CONFIGS)


def model_of(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """A tiny model; ``eager`` where the fused kernels of its own path cannot do what it asks for."""
    if kind not in CONFIGS:
        return make_model(kind, initializer_range=0.3).to(dtype)
    torch.manual_seed(0)
    own = "eager" if kind == "gemma2" else "sdpa"
    return AutoModelForCausalLM.from_config(CONFIGS[kind], dtype=dtype, attn_implementation=own).eval()


def ids(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(6, len(VOCAB), (count,), generator=generator).tolist()


def batch_of(*groups: tuple[int, list[int]]) -> Batch:
    """Groups of (prompt length, completion lengths)."""
    rows = []
    for number, (prompt, completions) in enumerate(groups):
        prompt_ids = ids(prompt, 1000 * number)
        rows += [Row(prompt_ids, ids(c, 1000 * number + j + 1), group=number) for j, c in enumerate(completions)]
    return Batch.from_rows(rows)


# Ragged, one-token completions, an empty one, groups of one, prompts of one token, longer than any window.
RAGGED = batch_of((5, [3, 7, 1, 7]), (19, [4]), (9, [2, 19, 0, 5]), (1, [6, 1]))


def alone(model: Any, batch: Batch) -> Tensor:
    """Log-probabilities [N, C] with each row run by itself, unpadded."""
    out = torch.zeros(batch.completion_ids.shape, dtype=next(model.parameters()).dtype)
    for i in range(batch.num_rows):
        prompt, completion = (
            getattr(batch, f"{part}_ids")[i][getattr(batch, f"{part}_mask")[i]] for part in ("prompt", "completion")
        )
        row = torch.cat([prompt, completion]).unsqueeze(0)
        logits = model(input_ids=row, use_cache=False).logits[0, len(prompt) - 1 : -1]
        if len(completion):
            scored = logits.log_softmax(dim=-1).gather(1, completion.unsqueeze(1)).squeeze(1)
            out[i, : len(completion)] = scored
    return out


def weighted_loss(logprobs: Tensor, batch: Batch) -> Tensor:
    """A loss in which every token has a weight of its own."""
    weights = torch.linspace(-1, 1, logprobs.numel(), dtype=logprobs.dtype).view_as(logprobs)
    return torch.where(batch.loss_mask, logprobs * weights, 0.0).sum()


# ---- exactness ----


@pytest.mark.parametrize("fused_head", [False, True], ids=["logits", "fused"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "mixtral"])
def test_logprobs_in_double_precision(kind: str, fused_head: bool) -> None:
    """Within 1e-10 of each row alone (Gemma 2's normalisation computes in float32: 1e-6)."""
    model = model_of(kind, torch.float64)
    expected = alone(model, RAGGED)
    got = Forward(model, stream=True, fused_head=fused_head)(model, RAGGED).policy.logprobs
    tolerance = 2e-6 if kind == "gemma2" else 1e-10
    assert float((got - expected).abs().max()) < tolerance
    assert float(expected.abs().max()) > 1


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("fused_head", [False, True], ids=["logits", "fused"])
@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_and_gradients_in_single_precision(kind: str, fused_head: bool, adapter: bool) -> None:
    """Within 1e-4, gradients relative: full fine-tuning (a trained, for most a tied head) and LoRA (a frozen one)."""
    model = lora(model_of(kind)) if adapter else model_of(kind)
    expected = alone(model, RAGGED)
    weighted_loss(expected, RAGGED).backward()
    expected_gradients = gradients(model)
    model.zero_grad()
    got = Forward(model, stream=True, fused_head=fused_head)(model, RAGGED).policy.logprobs
    weighted_loss(got, RAGGED).backward()
    assert float((got - expected).detach().abs().max()) < 1e-4
    assert difference(gradients(model), expected_gradients) < 1e-4


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3"])
def test_mixed_precision_differs_by_its_own_rounding(kind: str) -> None:
    """Under bfloat16 autocast both paths are off by the same small amount, and gradients still flow."""
    model = lora(model_of(kind))
    exact = alone(model, RAGGED).detach()
    errors = []
    for stream in (False, True):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            logprobs = Forward(model, stream=stream, fused_head=stream)(model, RAGGED).policy.logprobs
        assert logprobs.dtype == torch.float32
        weighted_loss(logprobs, RAGGED).backward()
        assert all(bool(g.isfinite().all()) for g in gradients(model).values())
        errors.append(float((logprobs.detach() - exact)[RAGGED.completion_mask].abs().mean()))
    padded, streamed = errors
    assert 0 < streamed < 1.5 * padded


def test_what_waits_for_the_backward_pass_grows_with_what_is_new() -> None:
    """A further completion of 4 tokens under a prompt of 64: less than a fifth of what a padded row keeps."""
    model = model_of("llama")

    def kept(rows: int, stream: bool) -> int:
        seen: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            seen[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = Forward(model, stream=stream, fused_head=True)(model, batch_of((64, [4] * rows)))
        assert result.computed_tokens == (64 + 4 * rows if stream else 68 * rows)
        return sum(seen.values())

    streamed, padded = (kept(8, stream) - kept(2, stream) for stream in (True, False))
    assert 0 < streamed < padded / 5


@pytest.mark.parametrize("kind", ["mistral", "gemma2"])
def test_windows_and_caps_matter(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that ignores them is wrong by tenths of nats: the tests above would see it."""
    model = model_of(kind, torch.float64)
    expected = alone(model, RAGGED)
    monkeypatch.setattr(attention_module, "Rules", lambda scaling, *ignored: _RULES(scaling))
    got = Forward(model, stream=True)(model, RAGGED).policy.logprobs
    assert float((got - expected).abs().max()) > 0.1


_RULES = attention_module.Rules


def test_attention_sinks() -> None:
    """GPT-OSS: a key without a value in every softmax, windows in every other layer."""
    torch.manual_seed(0)
    config = GptOssConfig(**SMALL, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.normal_()
    got = Forward(model, stream=True, fused_head=True)(model, RAGGED).policy.logprobs
    assert float((got - alone(model, RAGGED)).detach().abs().max()) < 1e-4


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_activation_checkpointing_changes_nothing(kind: str, reentrant: bool) -> None:
    """The layers run again in the backward pass and must find the stream again."""
    model = lora(model_of(kind)).train()
    disable_dropout(model)
    model.enable_input_require_grads()
    forward = Forward(model, stream=True, fused_head=True)
    results = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.zero_grad()
        logprobs = forward(model, RAGGED).policy.logprobs
        weighted_loss(logprobs, RAGGED).backward()
        results.append(gradients(model))
    assert difference(results[1], results[0]) < 1e-6


def test_packed_documents_are_isolated() -> None:
    """Documents of a packed row: the same as each of them alone, though nothing is shared."""
    model = model_of("llama", torch.float64)
    packed = batch_of((1, [12]), (1, [5]), (1, [30]))
    got = Forward(model, stream=True)(model, packed).policy.logprobs
    assert float((got - alone(model, packed)).abs().max()) < 1e-10


def test_mixtures_of_experts_count_shared_prompts_for_every_row() -> None:
    """Aux loss and router load are those of the padded path, and so is the aux loss's gradient."""
    model = model_of("mixtral")
    results = []
    for stream in (False, True):
        model.zero_grad()
        result = Forward(model, stream=stream)(model, RAGGED, router=True)
        result.aux_loss.backward()
        results.append((result, gradients(model)))
    (padded, padded_gradients), (streamed, streamed_gradients) = results
    assert float(streamed.aux_loss) == pytest.approx(float(padded.aux_loss), rel=1e-5)
    assert difference(streamed_gradients, padded_gradients) < 1e-4
    torch.testing.assert_close(streamed.router_load.assignments, padded.router_load.assignments)
    torch.testing.assert_close(streamed.router_load.tokens, padded.router_load.tokens)
    torch.testing.assert_close(streamed.router_load.entropy, padded.router_load.entropy, atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_entropy_values_and_vocabulary_mean(temperature: float) -> None:
    """Everything a strategy can ask for, and only where a token trains."""
    model = model_of("llama")
    critic = attach_critic(causal_lm_of(model))
    torch.nn.init.normal_(critic.head.weight)
    mask = RAGGED.loss_mask.clone()
    mask[::2, ::2] = False
    batch = RAGGED.replace(loss_mask=mask)
    wanted = {"wanted": EXTRAS, "values": True}
    expected = Forward(model, temperature)(model, batch, **wanted).policy
    got = Forward(model, temperature, stream=True, fused_head=True)(model, batch, **wanted).policy
    for name in ("logprobs", *EXTRAS, "values"):
        theirs = getattr(expected, name)
        assert float(theirs.detach()[mask].abs().max()) > 0.1
        torch.testing.assert_close(getattr(got, name)[mask], theirs[mask], atol=1e-4, rtol=1e-4)
        assert not getattr(got, name).detach()[~mask].any()


def test_a_batch_that_trains_nothing_stays_attached() -> None:
    model = model_of("llama")
    batch = RAGGED.replace(loss_mask=torch.zeros_like(RAGGED.loss_mask))
    for fused_head in (False, True):
        model.zero_grad()
        logprobs = Forward(model, stream=True, fused_head=fused_head)(model, batch).policy.logprobs
        torch.where(batch.loss_mask, logprobs, 0.0).sum().backward()
        assert all(not g.any() for g in gradients(model).values())
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


# ---- layout ----


def test_layout_by_hand() -> None:
    """Prompt [10, 11] with [20, 21] and [30], then a row [12] [40, 41] that shares nothing."""
    batch = Batch.from_rows(
        [
            Row([10, 11], [20, 21], group=0),
            Row([10, 11], [30], group=0),
            Row([12], [40, 41], group=1, loss_mask=[False, True]),
        ]
    )
    stream = Stream.of(batch)
    assert stream.input_ids.tolist() == [[10, 11, 20, 21, 30, 12, 40, 41]]
    assert stream.position_ids.tolist() == [[0, 1, 2, 3, 2, 0, 1, 2]]
    assert stream.prompts == [(0, 2)]
    # Token 20 and token 30 are scored by the last prompt token, 21 by 20, and 41 by 40.
    assert stream.scoring.tolist() == [1, 2, 1, 6]
    assert stream.targets.tolist() == [20, 21, 30, 41]
    assert stream.scatter(torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist() == [[1.0, 2.0], [3.0, 0.0], [0.0, 4.0]]
    # The prompt stands for two rows.
    assert stream.weights.tolist() == [2, 2, 1, 1, 1, 1, 1, 1]
    assert (stream.num_tokens, stream.padded_tokens) == (8, 12)


def test_only_the_same_prompt_of_the_same_group_is_shared() -> None:
    """Equal prompts of other groups, and other prompts of one group (a blank row), are separate."""
    rows = [Row([10, 11], [20], group=g) for g in (0, 0, 1)] + [Row([10, 12], [20], group=2)] * 2
    assert Stream.of(Batch.from_rows(rows)).num_tokens == (2 + 2) + (2 + 1) + (2 + 2)
    mixed = Batch.from_rows([Row([10, 11], [20], group=0), Row([10, 12], [20], group=0)])
    assert Stream.of(mixed).num_tokens == 6


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_growth_is_in_what_is_new(rows: int) -> None:
    """Tokens grow by the completions, not by prompt times rows."""
    stream = Stream.of(batch_of((50, [4] * rows)))
    assert stream.num_tokens == 50 + 4 * rows
    assert stream.padded_tokens == 54 * rows


def test_similar_lengths_share_a_call() -> None:
    """Lengths 10, 9 and 8 go together; 3 would be mostly padding beside them."""
    stream = Stream.of(batch_of((5, [10, 3, 9, 8])))
    assert [block.tokens.shape for block in stream.blocks] == [torch.Size([3, 10]), torch.Size([1, 3])]
    assert [int(block.real.sum()) for block in stream.blocks] == [27, 3]


# ---- fallback ----


def test_models_that_need_the_padded_path(caplog: pytest.LogCaptureFixture) -> None:
    """Known ones are refused before a batch is there, with the reason."""
    sizes = {"vocab_size": len(VOCAB), "hidden_size": 32, "num_hidden_layers": 2}
    llama4 = Llama4TextConfig(
        **SMALL, intermediate_size_mlp=48, num_local_experts=2, attention_chunk_size=8, moe_layers=[]
    )
    for config, reason in (
        (BloomConfig(vocab_size=len(VOCAB), hidden_size=32, n_layer=2, n_head=4), "attention cannot be exchanged"),
        (MambaConfig(**sizes, state_size=4), "attention cannot be exchanged|recurrent state"),
        (llama4, "chunked_attention"),
    ):
        model = AutoModelForCausalLM.from_config(config)
        with pytest.raises(ValueError, match=f"attention_path='stream': .* needs the padded path, .*({reason})"):
            CheckedForward(model, path="stream")
        assert not CheckedForward(model).stream
        assert "trains on the padded path" in caplog.text


def test_attention_dropout_needs_the_padded_path() -> None:
    model = make_model("gpt2")
    model.transformer.h[0].attn.attn_dropout.p = 0.1
    assert not CheckedForward(model).stream
    model.transformer.h[0].attn.attn_dropout.p = 0.0
    for block in model.transformer.h:
        block.attn.attn_dropout.p = 0.0
    assert CheckedForward(model).stream


def test_first_batch_is_compared(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """An attention that is wrong is found, named and left."""
    model = model_of("mistral")
    right = CheckedForward(model)
    right.check(model, RAGGED, largest=float)
    assert right.stream
    assert right.fused_head
    monkeypatch.setattr(attention_module, "Rules", lambda scaling, *ignored: _RULES(scaling))
    wrong = CheckedForward(model)
    wrong.check(model, RAGGED, largest=float)
    assert not wrong.stream
    assert not wrong.fused_head
    assert "differ from the padded path's by" in caplog.text
    with pytest.raises(RuntimeError, match="differ from the padded path"):
        CheckedForward(model, path="stream").check(model, RAGGED, largest=float)


@pytest.mark.parametrize("rows", ["masked", "empty"])
def test_first_rows_that_do_not_train_prove_nothing_against_the_stream(rows: str) -> None:
    """A tool's answer first, a reward that is missing, an empty completion: the path stays the fast one."""
    if rows == "masked":
        batch = RAGGED.replace(loss_mask=torch.zeros_like(RAGGED.loss_mask))
    else:
        batch = batch_of((5, [0, 0]), (4, [3]))
    forward = CheckedForward(model_of("llama"), path="stream")
    forward.check(model_of("llama"), batch, largest=float)
    assert forward.stream
    assert forward.fused_head


def test_a_head_that_does_more_than_a_product_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its logits are read instead; the stream stays."""
    model = model_of("granite")
    monkeypatch.setattr(LogitShape, "of", lambda config, temperature: LogitShape(1 / temperature))
    forward = CheckedForward(model)
    forward.check(model, RAGGED, largest=float)
    assert forward.stream
    assert not forward.fused_head


def test_other_processes_are_heard() -> None:
    """One process that differs takes all of them to the padded path."""
    model = model_of("llama")
    forward = CheckedForward(model)
    forward.check(model, RAGGED, largest=lambda value: max(value, 1.0))
    assert not forward.stream


def test_a_stream_that_is_never_read_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sharing that is silently off would be silently wrong."""
    model = model_of("llama")
    enable_stream(model)
    model.config._attn_implementation = "stream_sdpa"
    forward = Forward(model, stream=True)
    original = attention_module.stream_attention
    monkeypatch.setattr(
        attention_module, "stream_attention", lambda *args, stream=None, **kwargs: original(*args, **kwargs)
    )
    with pytest.raises(RuntimeError, match="never saw the token stream"):
        forward(model, RAGGED)


def test_ordinary_calls_stay_as_they_are() -> None:
    """Switched over, a model still generates and scores padded batches as before."""
    model = model_of("llama")
    inputs = {"input_ids": RAGGED.input_ids, "attention_mask": RAGGED.attention_mask.long()}
    before = model(**inputs).logits
    text = model.generate(RAGGED.prompt_ids[5:6], max_new_tokens=8, do_sample=False)
    enable_stream(model)
    enable_stream(model)
    assert model.config._attn_implementation == "stream_sdpa"
    torch.testing.assert_close(model(**inputs).logits, before, atol=0, rtol=0)
    assert model.generate(RAGGED.prompt_ids[5:6], max_new_tokens=8, do_sample=False).tolist() == text.tolist()
    assert "stream" not in str(model.config.to_dict())
