"""Sampling with every prompt computed once, against `model.generate`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import EOS, PAD, VOCAB, make_model, make_tokenizer
from harness import lora
from test_generation import SMALL, next_logits
from test_stream import CONFIGS, KINDS, model_of
from transformers import AutoModelForCausalLM, BloomConfig

from hf_strategies import Batch, Row
from hf_strategies.modeling import attention as attention_module
from hf_strategies.modeling import decoding as decoding_module
from hf_strategies.modeling.decoding import decoding_error, stream_completions
from hf_strategies.modeling.forward import Forward
from hf_strategies.modeling.generation import sample_completions
from hf_strategies.modeling.sampling import Completion, Sampling, StopStrings
from hf_strategies.rollout.hf_engine import ENGINES, GenerateEngine, StreamEngine

# One longer than the windows of the models that have one; a prompt of one token.
PROMPTS = [[7, 8, 9], [10, 11, 12, 13, 14, 15], list(range(6, 30)), [20]]
N = 3
KEYS = [[(5, i, j) for j in range(N)] for i in range(len(PROMPTS))]
# Many ids end a text, so that rows leave at different times.
ENDS = [EOS, 17, 8, 30]
SAMPLINGS = {
    "greedy": Sampling(12, greedy=True),
    "plain": Sampling(16),
    "all options": Sampling(
        14, temperature=0.7, top_k=12, top_p=0.9, min_p=0.02, repetition_penalty=1.3, min_new_tokens=3
    ),
}


def by_generate(model: Any, sampling: Sampling, ends: list[int] = ENDS) -> list[Completion]:
    prompts = [prompt for prompt in PROMPTS for _ in range(N)]
    return sample_completions(model, prompts, sampling, [key for keys in KEYS for key in keys], ends, PAD)


def by_stream(model: Any, sampling: Sampling, ends: list[int] = ENDS) -> list[Completion]:
    groups = stream_completions(model, PROMPTS, N, sampling, KEYS, ends)
    assert [len(group) for group in groups] == [N] * len(PROMPTS)
    return [completion for group in groups for completion in group]


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_same_completions_as_generate(kind: str, sampling: Sampling, adapter: bool) -> None:
    """Token for token, sampled ones too: the noise is the same. Log-probabilities within 1e-4, reasons equal."""
    model = lora(model_of(kind)) if adapter else model_of(kind)
    expected, got = by_generate(model, sampling), by_stream(model, sampling)
    assert [c.ids for c in got] == [c.ids for c in expected]
    assert [c.finish_reason for c in got] == [c.finish_reason for c in expected]
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
    assert len({tuple(c.ids) for c in got}) >= 3


@pytest.mark.parametrize("leave", [0.0, 0.01, 1.1], ids=["at once", "soon", "never"])
def test_when_rows_leave_does_not_matter(leave: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of one prompt leave at different times; the others go on undisturbed."""
    model = model_of("llama")
    monkeypatch.setattr(decoding_module, "DONE_BEFORE_LEAVING", leave)
    got = by_stream(model, Sampling(16))
    lengths = [len(c.ids) for c in got]
    assert len(set(lengths)) > 4
    assert got == [
        Completion(c.ids, pytest.approx(c.logprobs, abs=1e-4), c.finish_reason)
        for c in by_generate(model, Sampling(16))
    ]


def test_finished_rows_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is called with the rows that are left."""
    model = model_of("llama")
    seen: list[int] = []
    hook = model.lm_head.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[0]))
    by_stream(model, Sampling(16))
    hook.remove()
    assert seen[0] == 1  # the prompts, as one stream
    assert seen[1] == N * len(PROMPTS)
    assert seen[-1] < seen[1] / 2
    assert seen[1:] == sorted(seen[1:], reverse=True)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral", "mistral", "gemma2"])
def test_kept_logprobs_equal_a_fresh_scoring(kind: str) -> None:
    """Under the temperature, by the plain forward pass."""
    model = model_of(kind)
    temperature = 0.8
    groups = stream_completions(model, PROMPTS, N, Sampling(12, temperature=temperature), KEYS, ENDS)
    rows = [
        Row(prompt, c.ids, group=i, sampling_logprobs=c.logprobs)
        for i, (prompt, group) in enumerate(zip(PROMPTS, groups, strict=True))
        for c in group
    ]
    batch = Batch.from_rows(rows)
    scored = Forward(model, temperature)(model, batch).policy.logprobs.detach()
    kept = batch.sampling_logprobs
    assert float((scored - kept)[batch.completion_mask].abs().max()) < 1e-4


def test_distribution_of_sampled_tokens() -> None:
    """2,000 draws of the second token against its exact distribution on a small vocabulary: chi-square."""
    from scipy.stats import chisquare

    model = make_model("llama", vocab_size=SMALL, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    prompt, draws = [3, 4, 5], 2000
    (group,) = stream_completions(model, [prompt], draws, Sampling(2), [[(7, j) for j in range(draws)]], ())
    first = next_logits(model, prompt).softmax(dim=-1)[0]
    exact = sum(first[t] * next_logits(model, [*prompt, t]).softmax(dim=-1)[0] for t in range(SMALL))
    counts = torch.bincount(torch.tensor([c.ids[1] for c in group]), minlength=SMALL)
    expected = (exact / exact.sum()).double() * draws
    assert int((expected > 5).sum()) >= 3
    enough = expected > 5
    observed = torch.cat([counts[enough], counts[~enough].sum().view(1)]).double()
    wanted = torch.cat([expected[enough], expected[~enough].sum().view(1)])
    keep = wanted > 0
    assert chisquare(observed[keep].numpy(), (wanted[keep] / wanted[keep].sum() * draws).numpy()).pvalue > 1e-3


def test_no_end_at_all_and_a_single_token() -> None:
    model = model_of("llama")
    assert {len(c.ids) for c in by_stream(model, Sampling(5), ends=[])} == {5}
    one = by_stream(model, Sampling(1))
    assert [c.ids for c in one] == [c.ids[:1] for c in by_generate(model, Sampling(4), ends=[])]
    assert {c.finish_reason for c in by_stream(model, Sampling(1), ends=[])} == {"length"}


def test_stop_strings_end_a_completion() -> None:
    """Both ways, over token boundaries, the completing token included; what is not in the vocabulary never stops."""
    model = model_of("llama")
    free = by_stream(model, Sampling(16), ends=[])
    decode = make_tokenizer().decode
    # Two tokens that some completion holds in the middle.
    wanted = decode(free[4].ids[5:7])
    stop = StopStrings((wanted, "@@"), decode)
    flat_prompts = [prompt for prompt in PROMPTS for _ in range(N)]
    keys = [key for group in KEYS for key in group]
    groups = stream_completions(model, PROMPTS, N, Sampling(16), KEYS, [], stop)
    got = [completion for group in groups for completion in group]
    expected = sample_completions(model, flat_prompts, Sampling(16), keys, [], PAD, stop)
    assert [(c.ids, c.finish_reason) for c in got] == [(c.ids, c.finish_reason) for c in expected]
    assert got[4].ids == free[4].ids[:7]
    assert got[4].finish_reason == "stop"
    for mine, whole in zip(got, free, strict=True):
        assert mine.ids == whole.ids[: len(mine.ids)]
        assert (wanted in decode(mine.ids)) == (mine.finish_reason == "stop")


def test_training_state_is_untouched() -> None:
    """Modes, gradients, checkpointing and the model's own generation settings are found as they were left."""
    model = lora(model_of("gpt2")).train()
    model.gradient_checkpointing_enable()
    modes = [module.training for module in model.modules()]
    by_stream(model, Sampling(4))
    assert [module.training for module in model.modules()] == modes
    assert all(p.grad is None for p in model.parameters())


# ---- engines ----


def rollouts(engine: Any, model: Any, sampling: Sampling) -> list[Any]:
    engine.sync_weights(model, 3)
    return engine.generate(PROMPTS, N, sampling, KEYS)


@pytest.mark.parametrize("max_rows", [1, 7, 64])
def test_engines_agree_in_chunks_of_any_size(max_rows: int) -> None:
    model = lora(model_of("llama"))
    expected = rollouts(GenerateEngine(make_tokenizer()), model, Sampling(10))
    got = rollouts(StreamEngine(make_tokenizer(), max_rows), model, Sampling(10))
    for mine, theirs, prompt in zip(got, expected, PROMPTS, strict=True):
        assert (mine.prompt_ids, mine.policy_version) == (prompt, 3)
        assert [c.ids for c in mine.completions] == [c.ids for c in theirs.completions]


def test_a_model_that_cannot_be_streamed_is_sampled_by_generate(caplog: pytest.LogCaptureFixture) -> None:
    config = BloomConfig(vocab_size=len(VOCAB), hidden_size=32, n_layer=2, n_head=4, initializer_range=0.3)
    model = AutoModelForCausalLM.from_config(config).eval()
    got = rollouts(ENGINES["auto"](make_tokenizer()), model, Sampling(6))
    expected = rollouts(ENGINES["generate"](make_tokenizer()), model, Sampling(6))
    assert [[c.ids for c in g.completions] for g in got] == [[c.ids for c in g.completions] for g in expected]
    assert "sampling with model.generate" in caplog.text
    with pytest.raises(ValueError, match="BloomForCausalLM cannot be sampled with rollout_engine='stream'"):
        rollouts(ENGINES["stream"](make_tokenizer()), model, Sampling(6))


def test_wrong_numbers_are_found_before_the_first_rollout(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An attention that forgets the window is off by tenths of nats, and is not used."""
    model = model_of("mistral")
    prompt = PROMPTS[2]
    assert decoding_error(model, prompt, 1.0) < 1e-4
    expected = rollouts(GenerateEngine(make_tokenizer()), model, Sampling(6))
    rules = attention_module.Rules
    monkeypatch.setattr(attention_module, "Rules", lambda scaling, *ignored: rules(scaling))
    assert decoding_error(model, prompt, 1.0) > 0.1
    engine = StreamEngine(make_tokenizer())
    engine.sync_weights(model, 0)
    got = engine.generate([prompt], N, Sampling(6), KEYS[2:3])
    assert [c.ids for c in got[0].completions] == [c.ids for c in expected[2].completions]
    assert "are off by" in caplog.text


def test_all_models_of_this_file_are_streamed() -> None:
    """None of the comparisons above compares `generate` with itself."""
    for kind in KINDS:
        engine = StreamEngine(make_tokenizer(), required=True)
        rollouts(engine, model_of(kind), Sampling(2))
    assert set(CONFIGS) < set(KINDS)
