"""Sampling: what is drawn, what is kept of it, and what must not leak into it."""

from __future__ import annotations

import pytest
import torch
from conftest import EOS, PAD, make_model, make_tokenizer
from scipy.stats import chisquare
from transformers import (
    GenerationConfig,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_strategies import Batch, Row
from hf_strategies.modeling.forward import Forward
from hf_strategies.modeling.generation import (
    Sampling,
    constrain_logits,
    draw,
    eos_token_ids,
    row_noise,
    sample_completions,
)

PROMPTS = [[7, 8, 9], [10, 11, 12, 13, 14, 15], [20]]
KEYS = [(0, 0, 0, 0, i, 0) for i in range(3)]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
def test_greedy_is_generate(kind: str) -> None:
    model = make_model(kind)
    got = sample_completions(model, PROMPTS, Sampling(12, greedy=True), KEYS, [EOS], PAD)
    for prompt, completion in zip(PROMPTS, got, strict=True):
        config = GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=EOS, pad_token_id=PAD)
        alone = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), generation_config=config
        )
        assert completion.ids == alone[0, len(prompt) :].tolist()


def test_kept_logprobs_are_those_of_training() -> None:
    """Pitfalls A-11, A-16: at another temperature, with left padding on absolute positions."""
    model = make_model("gpt2")
    got = sample_completions(model, PROMPTS, Sampling(8, temperature=0.6), KEYS, [EOS], PAD)
    batch = Batch.from_rows([Row(p, c.ids, group=i) for i, (p, c) in enumerate(zip(PROMPTS, got, strict=True))])
    scored = Forward(model, 0.6)(model, batch).policy.logprobs
    for row, completion in zip(scored, got, strict=True):
        torch.testing.assert_close(row[: len(completion.ids)], torch.tensor(completion.logprobs), atol=1e-4, rtol=0)


def test_noise_belongs_to_the_row() -> None:
    """The same completion alone, beside others and in another order; another key gives another one."""
    model = make_model()
    together = sample_completions(model, PROMPTS, Sampling(10), KEYS, [EOS], PAD)
    for i in (2, 0, 1):
        alone = sample_completions(model, PROMPTS[i : i + 1], Sampling(10), KEYS[i : i + 1], [EOS], PAD)
        assert alone[0].ids == together[i].ids
    other = sample_completions(model, PROMPTS, Sampling(10), [(1, *key[1:]) for key in KEYS], [EOS], PAD)
    assert [c.ids for c in other] != [c.ids for c in together]
    assert torch.equal(row_noise(KEYS, 4), row_noise(KEYS, 9)[:, :4])


def test_the_models_own_defaults_stay_out() -> None:
    """Pitfall A-13: top_k=1 and a repetition penalty in generation_config; restored afterwards."""
    model = make_model()
    plain = sample_completions(model, PROMPTS[:1] * 8, Sampling(6), [(0, j) for j in range(8)], [EOS], PAD)
    model.generation_config.top_k = 1
    model.generation_config.repetition_penalty = 1.3
    model.generation_config.do_sample = True
    model.generation_config.suppress_tokens = list(range(6, 40))
    own = model.generation_config
    got = sample_completions(model, PROMPTS[:1] * 8, Sampling(6), [(0, j) for j in range(8)], [EOS], PAD)
    assert [c.ids for c in got] == [c.ids for c in plain]
    assert len({tuple(c.ids) for c in got}) > 1
    assert model.generation_config is own


def test_every_end_of_sequence_id_ends() -> None:
    """Pitfalls A-9, A-10: ids of the model and of the tokenizer; the end token belongs to the completion."""
    model = make_model()
    tokenizer = make_tokenizer(pad_is_eos=True)
    model.generation_config.eos_token_id = [20, 21]
    ends = eos_token_ids(model, tokenizer)
    assert ends == [EOS, 20, 21]
    got = sample_completions(model, PROMPTS[:1] * 64, Sampling(20), [(3, j) for j in range(64)], ends, EOS)
    last = {c.ids[-1] for c in got if c.finish_reason == "stop"}
    assert last >= {20, 21}
    for completion in got:
        assert not set(completion.ids[:-1]) & set(ends)
        assert (completion.finish_reason == "stop") == (completion.ids[-1] in ends)
        assert len(completion.ids) == len(completion.logprobs)


def test_minimum_length() -> None:
    model = make_model()
    ends = list(range(6, 40))
    got = sample_completions(model, PROMPTS, Sampling(9, min_new_tokens=5), KEYS, ends, PAD)
    assert all(len(c.ids) >= 6 or c.finish_reason == "length" for c in got)
    short = sample_completions(model, PROMPTS, Sampling(9), KEYS, ends, PAD)
    assert min(len(c.ids) for c in short) < 5


def test_training_mode_comes_back() -> None:
    model = make_model("gpt2")
    model.train()
    model.transformer.h[0].eval()
    modes = [m.training for m in model.modules()]
    sample_completions(model, PROMPTS, Sampling(2), KEYS, [EOS], PAD)
    assert [m.training for m in model.modules()] == modes


@pytest.mark.parametrize(
    ("sampling", "warper"),
    [
        (Sampling(temperature=0.5), TemperatureLogitsWarper(0.5)),
        (Sampling(top_k=3), TopKLogitsWarper(3)),
        (Sampling(top_p=0.6), TopPLogitsWarper(0.6)),
        (Sampling(min_p=0.2), MinPLogitsWarper(0.2)),
    ],
)
def test_constraints_are_those_of_transformers(sampling: Sampling, warper: object) -> None:
    torch.manual_seed(0)
    logits = torch.randn(50, 12) * 2
    expected = warper(torch.zeros(50, 1, dtype=torch.long), logits.clone())  # type: ignore[operator]
    torch.testing.assert_close(constrain_logits(logits, sampling), expected)


def test_repetition_penalty_counts_real_tokens() -> None:
    """Equal to transformers on an unpadded row; padding on the left changes nothing."""
    model = make_model()
    sampling = Sampling(8, repetition_penalty=1.8, greedy=True)
    got = sample_completions(model, PROMPTS, sampling, KEYS, [EOS], PAD)
    for prompt, completion in zip(PROMPTS, got, strict=True):
        config = GenerationConfig(
            max_new_tokens=8, do_sample=False, repetition_penalty=1.8, eos_token_id=EOS, pad_token_id=PAD
        )
        alone = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), generation_config=config
        )
        assert completion.ids == alone[0, len(prompt) :].tolist()


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([2.0, 0.5, -1.0, -torch.inf, 1.0])
    uniform = torch.rand(20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    drawn = draw(logits.expand(20_000, -1), uniform)
    counts = torch.bincount(drawn, minlength=5).double()
    assert counts[3] == 0
    kept = [0, 1, 2, 4]
    expected = logits.double().softmax(-1) * 20_000
    assert chisquare(counts[kept].numpy(), expected[kept].numpy()).pvalue > 1e-3
    assert draw(logits.unsqueeze(0), torch.tensor([0.0])).item() == 0
    assert draw(logits.unsqueeze(0), torch.tensor([1 - 1e-12], dtype=torch.float64)).item() == 4
