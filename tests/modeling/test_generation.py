"""Sampling: what is drawn, what is kept of it, and what must not leak into it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from conftest import EOS, PAD, VOCAB, make_model, make_tokenizer
from harness import build, lora, record
from scipy.stats import chisquare
from tokenizers import Tokenizer, decoders, models
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedTokenizerFast,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_strategies import Batch, Row
from hf_strategies.modeling.forward import Forward
from hf_strategies.modeling.generation import eos_token_ids, sample_completions
from hf_strategies.modeling.sampling import Sampling, constrain_logits, draw, row_noise
from hf_strategies.rollout.hf_engine import GenerateEngine

PROMPTS = [[7, 8, 9], [10, 11, 12, 13, 14, 15], [20]]
KEYS = [(0, 0, 0, 0, i, 0) for i in range(3)]
SMALL = 7  # tokens of the vocabulary on which distributions are counted


def warpers(sampling: Sampling) -> LogitsProcessorList:
    """What `generate` itself does with these options, in its order."""
    chain = LogitsProcessorList()
    if sampling.repetition_penalty != 1.0:
        chain.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.temperature != 1.0:
        chain.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        chain.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        chain.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        chain.append(MinPLogitsWarper(sampling.min_p))
    return chain


def next_logits(model: Any, ids: list[int]) -> torch.Tensor:
    """[1, V] logits of the token after ``ids``, by the model's plain forward."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[:, -1]


def greedy_by_generate(model: Any, prompt: list[int], length: int, **options: Any) -> list[int]:
    config = GenerationConfig(max_new_tokens=length, do_sample=False, eos_token_id=EOS, pad_token_id=PAD, **options)
    alone = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), generation_config=config)
    return alone[0, len(prompt) :].tolist()


# ---- greedy ----


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
def test_greedy_is_generate(kind: str, adapter: bool) -> None:
    """Pitfall A-16: prompts of several lengths side by side, GPT-2's absolute positions among them."""
    model = lora(make_model(kind)) if adapter else make_model(kind)
    got = sample_completions(model, PROMPTS, Sampling(12, greedy=True), KEYS, [EOS], PAD)
    for prompt, completion in zip(PROMPTS, got, strict=True):
        assert completion.ids == greedy_by_generate(model, prompt, 12)
    assert len({completion.ids[0] for completion in got}) > 1


def test_greedy_ignores_the_noise() -> None:
    model = make_model()
    first, second = (
        sample_completions(model, PROMPTS, Sampling(6, greedy=True), [(s, i) for i in range(3)], [EOS], PAD)
        for s in (0, 1)
    )
    assert first == second


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_training_mode_and_checkpointing_change_nothing(kind: str) -> None:
    """Pitfalls A-34, A-15: no dropout while sampling, the cache stays on, and the settings are found as left."""
    changes = {"attention_dropout": 0.5} if kind == "llama" else {}
    model = make_model(kind, **changes)
    expected = sample_completions(model, PROMPTS, Sampling(12, greedy=True), KEYS, [EOS], PAD)
    model.train()
    model.gradient_checkpointing_enable()
    use_cache, own = model.config.use_cache, copy.deepcopy(model.generation_config)
    with torch.no_grad():
        ids = torch.tensor([PROMPTS[1]])
        assert not torch.equal(model(ids).logits, model(ids).logits), "dropout is on in training"
    got = sample_completions(model, PROMPTS, Sampling(12, greedy=True), KEYS, [EOS], PAD)
    assert got == expected
    assert model.config.use_cache is use_cache
    assert model.generation_config.to_dict() == own.to_dict()
    assert model.training
    assert model.is_gradient_checkpointing


def test_training_mode_comes_back_module_by_module() -> None:
    model = make_model("gpt2")
    model.train()
    model.transformer.h[0].eval()
    modes = [m.training for m in model.modules()]
    assert len(set(modes)) == 2
    sample_completions(model, PROMPTS, Sampling(2), KEYS, [EOS], PAD)
    assert [m.training for m in model.modules()] == modes
    with pytest.raises(IndexError):  # an id the embedding does not have
        sample_completions(model, [[10_000]], Sampling(2), KEYS[:1], [EOS], PAD)
    assert [m.training for m in model.modules()] == modes


# ---- the distribution ----

CONSTRAINTS = [
    Sampling(temperature=0.5),
    Sampling(top_k=3),
    Sampling(top_p=0.6),
    Sampling(top_p=0.05),
    Sampling(min_p=0.2),
    Sampling(temperature=1.7, top_k=9, top_p=0.9, min_p=0.05),
    Sampling(temperature=0.7, top_p=0.8, min_p=0.3),
    Sampling(top_k=100),
]


@pytest.mark.parametrize("sampling", CONSTRAINTS, ids=str)
def test_constraints_are_those_of_transformers(sampling: Sampling) -> None:
    """The same tokens are kept, with the same logits, and the rest is ruled out; the argument stays as it was."""
    torch.manual_seed(0)
    logits = torch.randn(200, 12) * 2
    before = logits.clone()
    expected = warpers(sampling)(torch.zeros(200, 1, dtype=torch.long), logits.clone())
    torch.testing.assert_close(constrain_logits(logits, sampling), expected)
    assert torch.equal(logits, before)
    # Repeated sampling of one row and ties: the set may not depend on how the sort breaks them.
    tied = torch.tensor([[1.0, 1.0, 0.0, -1.0]])
    kept = constrain_logits(tied, Sampling(top_k=1)) > -torch.inf
    assert kept.tolist() == [[True, True, False, False]]  # as transformers: nothing below the k-th is kept


def test_the_likeliest_token_always_stays() -> None:
    logits = torch.tensor([[3.0, 1.0, 0.0]])
    for sampling in (Sampling(top_k=1), Sampling(top_p=1e-6), Sampling(min_p=0.999)):
        assert (constrain_logits(logits, sampling) > -torch.inf).tolist() == [[True, False, False]]


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
    # 0 falls on the first token that has any probability.
    assert draw(torch.tensor([[-torch.inf, 0.0]]), torch.tensor([0.0])).item() == 1


@pytest.mark.parametrize("vocab", [2, 255, 256, 257, 5000])
@pytest.mark.parametrize("kept", [1.0, 0.02])
def test_blocks_draw_what_one_sum_draws(vocab: int, kept: float) -> None:
    """The plain way is a cumulative sum over the whole vocabulary."""
    generator = torch.Generator().manual_seed(3)
    logits = 4 * torch.randn(400, vocab, generator=generator, dtype=torch.float64)
    ruled_out = torch.rand(400, vocab, generator=generator) >= kept
    ruled_out[torch.arange(400), torch.randint(vocab, (400,), generator=generator)] = False
    logits = logits.masked_fill(ruled_out, -torch.inf)
    uniform = torch.rand(400, generator=generator, dtype=torch.float64)
    uniform[:4] = torch.tensor([0.0, 1 - 2**-53, 2**-53, 0.5], dtype=torch.float64)
    cumulative = logits.softmax(dim=-1).cumsum(dim=-1)
    target = torch.minimum(uniform * cumulative[:, -1], cumulative[:, -1] * (1 - 2**-52))
    expected = torch.searchsorted(cumulative, target.unsqueeze(1), right=True).squeeze(1)
    assert torch.equal(draw(logits, uniform), expected)
    drawn = draw(logits.float(), uniform)
    assert (drawn == expected).double().mean() > 0.99
    assert logits.gather(1, drawn.unsqueeze(1)).isfinite().all()


def fits(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """p-value of the counts under the probabilities; cells that are expected less than 5 times are one cell."""
    expected = probabilities.double() * counts.sum()
    rare = (expected > 0) & (expected < 5)
    assert counts[expected == 0].sum() == 0, "a token without probability was drawn"
    keep = expected >= 5
    if rare.any() and expected[rare].sum() >= 5:
        counts = torch.cat([counts[keep], counts[rare].sum().view(1)])
        expected = torch.cat([expected[keep], expected[rare].sum().view(1)])
    else:
        counts, expected = counts[keep], expected[keep]
    expected = expected * (counts.sum() / expected.sum())
    return float(chisquare(counts.double().numpy(), expected.numpy()).pvalue) if len(counts) > 1 else 1.0


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1),
        Sampling(1, temperature=0.6),
        Sampling(1, top_k=3),
        Sampling(1, top_p=0.7),
        Sampling(1, min_p=0.25),
        Sampling(1, repetition_penalty=2.0),
        Sampling(1, temperature=1.5, top_k=6, top_p=0.95, min_p=0.02, repetition_penalty=1.3),
    ],
    ids=str,
)
def test_sampled_tokens_follow_the_models_distribution(sampling: Sampling) -> None:
    """Chi-square over a vocabulary of seven tokens, against the model's logits through transformers' own warpers."""
    model = make_model("llama", vocab_size=SMALL, initializer_range=0.3)
    prompt, count = [3, 4, 4, 5], 4000
    got = sample_completions(model, [prompt] * count, sampling, [(0, 0, 0, 0, 0, j) for j in range(count)], [EOS], PAD)
    logits = warpers(sampling)(torch.tensor([prompt]), next_logits(model, prompt))[0]
    counts = torch.bincount(torch.tensor([c.ids[0] for c in got]), minlength=SMALL)
    assert (counts > 0).sum() > 1
    assert fits(counts, logits.double().softmax(-1)) > 1e-3
    # The test can tell: not the distribution of a temperature that is a little different.
    assert fits(counts, torch.where(logits.isinf(), logits, logits / 1.3).double().softmax(-1)) < 1e-3
    # What is kept is the log-probability in the distribution that was drawn from.
    for completion in got[:200]:
        assert completion.logprobs[0] == pytest.approx(float(logits.log_softmax(-1)[completion.ids[0]]), abs=1e-5)


def test_tokens_of_a_row_are_drawn_independently() -> None:
    """The joint distribution of two tokens: a noise that repeats along a row would pass every test of one token."""
    model = make_model("llama", vocab_size=SMALL, initializer_range=0.3)
    prompt, count = [3, 4], 4000
    got = sample_completions(model, [prompt] * count, Sampling(2), [(j,) for j in range(count)], [], PAD)
    counts = torch.zeros(SMALL, SMALL)
    for completion in got:
        counts[completion.ids[0], completion.ids[1]] += 1
    first = next_logits(model, prompt)[0].double().softmax(-1)
    second = torch.stack([next_logits(model, [*prompt, i])[0].double().softmax(-1) for i in range(SMALL)])
    assert fits(counts.flatten(), (first.unsqueeze(1) * second).flatten()) > 1e-3


@pytest.mark.parametrize("penalty", [1.8, 0.7])
def test_repetition_penalty_counts_real_tokens(penalty: float) -> None:
    """Equal to transformers on each row alone; the padding of shorter prompts did not occur."""
    model = make_model()
    sampling = Sampling(8, repetition_penalty=penalty, greedy=True)
    got = sample_completions(model, PROMPTS, sampling, KEYS, [EOS], PAD)
    for prompt, completion in zip(PROMPTS, got, strict=True):
        assert completion.ids == greedy_by_generate(model, prompt, 8, repetition_penalty=penalty)
    plain = sample_completions(model, PROMPTS, Sampling(8, greedy=True), KEYS, [EOS], PAD)
    assert [c.ids for c in plain] != [c.ids for c in got]


# ---- what is kept ----


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
def test_kept_logprobs_are_those_of_training(kind: str, temperature: float) -> None:
    """Pitfalls A-11, A-14, A-16: the trainer's own scoring, padded, agrees with what was known while sampling."""
    model = make_model(kind)
    got = sample_completions(model, PROMPTS, Sampling(12, temperature=temperature), KEYS, [EOS], PAD)
    batch = Batch.from_rows([Row(p, c.ids, group=i) for i, (p, c) in enumerate(zip(PROMPTS, got, strict=True))])
    scored = Forward(model, temperature)(model, batch).policy.logprobs
    for row, completion in zip(scored, got, strict=True):
        torch.testing.assert_close(row[: len(completion.ids)], torch.tensor(completion.logprobs), atol=1e-4, rtol=0)
    other = Forward(model, temperature + 0.2)(model, batch).policy.logprobs
    assert float((other - scored).detach().abs().max()) > 0.1


def test_half_precision_is_raised_before_the_softmax() -> None:
    model = make_model("llama").to(torch.bfloat16)
    (got,) = sample_completions(model, [[7, 8, 9]], Sampling(1), [(1,)], [EOS], PAD)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[7, 8, 9]])).logits[0, -1]
    exact = logits.float().log_softmax(-1)[got.ids[0]]
    assert got.logprobs[0] == pytest.approx(float(exact), abs=1e-5)
    assert float(logits.log_softmax(-1)[got.ids[0]].float()) != pytest.approx(float(exact), abs=1e-5)


def test_sampled_ids_are_the_trained_ids() -> None:
    """Pitfall A-17: with a merge of a and b the text of [a, b] would be encoded as [ab]."""
    vocab = {"<eos>": 0, "a": 1, "b": 2, "c": 3, "ab": 4}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<eos>")
    seen: list[tuple[str, list[int]]] = []

    def keep(completions: list[str], completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        seen.extend(zip(completions, completion_ids, strict=True))
        return [float(len(ids)) for ids in completion_ids]

    model = make_model("llama", vocab_size=5, eos_token_id=0, pad_token_id=0, bos_token_id=None, initializer_range=0.1)
    trainer = build(
        "online_grpo",
        model,
        [{"prompt": "ca"}, {"prompt": "b"}],
        tokenizer=tokenizer,
        engine=None,
        reward_funcs=keep,
        num_generations=8,
        per_device_train_batch_size=16,
    )
    calls = record(trainer)
    trainer.train()
    ((_, batch),) = calls
    trained = [batch.completion_ids[i][batch.loss_mask[i]].tolist() for i in range(batch.num_rows)]
    assert trained == [ids for _, ids in seen]
    changed = [ids for text, ids in seen if tokenizer(text)["input_ids"] != [i for i in ids if i]]
    assert changed, "the case did not occur"
    assert all("ab" in tokenizer.decode(ids) for ids in changed)


# ---- the noise ----


def test_noise_belongs_to_the_row() -> None:
    """Pitfall A-25: the same completion alone, beside others and in another order; another key gives another one."""
    model = make_model()
    together = sample_completions(model, PROMPTS, Sampling(10), KEYS, [EOS], PAD)
    for i in (2, 0, 1):
        alone = sample_completions(model, PROMPTS[i : i + 1], Sampling(10), KEYS[i : i + 1], [EOS], PAD)
        assert alone[0].ids == together[i].ids
    for position in range(6):
        keys = [tuple(v + (k == position) for k, v in enumerate(key)) for key in KEYS]
        other = sample_completions(model, PROMPTS, Sampling(10), keys, [EOS], PAD)
        assert [c.ids for c in other] != [c.ids for c in together], f"part {position} of the key does not matter"
    assert torch.equal(row_noise(KEYS, 4), row_noise(KEYS, 9)[:, :4])
    assert row_noise(KEYS, 9).unique().numel() == 27
    assert row_noise([], 5).shape == (0, 5)


def test_global_random_state_is_neither_read_nor_changed() -> None:
    model = make_model()
    torch.manual_seed(1)
    first = sample_completions(model, PROMPTS, Sampling(6), KEYS, [EOS], PAD)
    after = torch.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(after, torch.get_rng_state())
    torch.manual_seed(2)
    assert sample_completions(model, PROMPTS, Sampling(6), KEYS, [EOS], PAD) == first


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_noise_does_not_depend_on_the_chunks(kind: str) -> None:
    """One group per call, two, or all at once: the same completions, also where padding differs."""
    model = make_model(kind)
    keys = [[(0, 0, 0, 0, i, j) for j in range(4)] for i in range(3)]
    results = []
    for max_rows in (1, 4, 9, 64):
        engine = GenerateEngine(make_tokenizer(), max_rows)
        engine.sync_weights(model, 3)
        results.append(engine.generate(PROMPTS, 4, Sampling(10), keys))
    for groups in results:
        assert [g.prompt_ids for g in groups] == PROMPTS
        assert {g.policy_version for g in groups} == {3}
        assert [[c.ids for c in g.completions] for g in groups] == [[c.ids for c in g.completions] for g in results[0]]
    for group in results[0]:
        assert len({tuple(c.ids) for c in group.completions}) > 1, "completions of a prompt must differ"


def test_completions_do_not_depend_on_rollout_batch_size() -> None:
    """The same through the trainer's option."""
    seen = []
    for rows_per_call in (4, 64):
        trainer = build("online_grpo", engine=None, rollout_batch_size=rows_per_call)
        calls = record(trainer)
        trainer.train()
        seen.append(calls[0][1].completion_ids)
    assert torch.equal(*seen)


def test_engine_without_weights() -> None:
    engine = GenerateEngine(make_tokenizer())
    with pytest.raises(RuntimeError, match="before sync_weights"):
        engine.generate(PROMPTS, 1, Sampling(1), [[k] for k in KEYS])


# ---- the model's own defaults ----


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize(
    "own",
    [
        {"do_sample": True, "top_k": 1},
        {"repetition_penalty": 1.3},
        {"do_sample": True, "top_p": 0.01, "temperature": 0.01},
        {"no_repeat_ngram_size": 1},
        {"suppress_tokens": list(range(6, 40))},
        {"min_new_tokens": 6},
        {"max_length": 5},
        {"forced_eos_token_id": 20},
        {"num_beams": 3},
        {"num_return_sequences": 2, "do_sample": True},
    ],
    ids=str,
)
def test_the_models_own_defaults_stay_out(own: dict[str, Any], adapter: bool) -> None:
    """Pitfall A-13: nothing of generation_config leaks, and it is found afterwards as it was."""
    model = lora(make_model()) if adapter else make_model()
    base = model.get_base_model() if adapter else model
    keys = [(0, j) for j in range(8)]
    plain = sample_completions(model, PROMPTS[:1] * 8, Sampling(6), keys, [EOS], PAD)
    assert len({tuple(c.ids) for c in plain}) > 1
    for name, value in own.items():
        setattr(base.generation_config, name, value)
    object_before, before = base.generation_config, copy.deepcopy(base.generation_config)
    assert sample_completions(model, PROMPTS[:1] * 8, Sampling(6), keys, [EOS], PAD) == plain
    assert base.generation_config is object_before
    assert base.generation_config.to_dict() == before.to_dict()


def test_own_defaults_come_back_after_an_error() -> None:
    model = make_model()
    own = model.generation_config
    with pytest.raises(IndexError):
        sample_completions(model, [[10_000]], Sampling(2), KEYS[:1], [EOS], PAD)
    assert model.generation_config is own


# ---- ends ----


def test_every_end_of_sequence_id_ends() -> None:
    """Pitfall A-9: ids of the model and of the tokenizer; the end token belongs to the completion."""
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
        assert completion.finish_reason == "stop" or len(completion.ids) == 20


@pytest.mark.parametrize(
    ("configured", "expected"), [(None, [EOS]), (EOS, [EOS]), (5, [EOS, 5]), ([5, 2], [EOS, 5]), ([5], [EOS, 5])]
)
def test_end_ids_are_a_union(configured: Any, expected: list[int]) -> None:
    model = make_model()
    model.generation_config.eos_token_id = configured
    tokenizer = make_tokenizer()
    assert eos_token_ids(model, tokenizer) == expected
    tokenizer.eos_token = None
    assert eos_token_ids(model, tokenizer) == [i for i in expected if i != EOS or configured in (EOS, [5, 2])]


def test_engine_stops_at_the_ids_of_the_wrapped_models_config() -> None:
    """Pitfall A-9 with an adapter: the list is read from the model inside."""
    model = lora(make_model())
    model.get_base_model().generation_config.eos_token_id = list(range(6, 30))
    engine = GenerateEngine(make_tokenizer())
    engine.sync_weights(model, 0)
    (group,) = engine.generate(PROMPTS[:1], 16, Sampling(12), [[(0, j) for j in range(16)]])
    assert {c.ids[-1] for c in group.completions if c.finish_reason == "stop"} & set(range(6, 30))
    assert all(c.finish_reason == "stop" for c in group.completions if c.ids[-1] in range(6, 30))


def test_pad_ids_are_tokens_like_others() -> None:
    """Pitfalls A-10, D-63: pad == eos keeps the real end; an id equal to the pad inside a text is kept."""
    model = make_model("llama", vocab_size=SMALL, initializer_range=0.1)
    count = 40
    keys = [(5, j) for j in range(count)]
    prompts = [[3, PAD, 4], [PAD]] * (count // 2)
    ended = sample_completions(model, prompts, Sampling(12), keys, [EOS], EOS)
    for completion in ended:
        assert completion.ids.count(EOS) == (completion.finish_reason == "stop")
    assert sum(c.finish_reason == "stop" for c in ended) > 10
    batch = Batch.from_rows([Row(p, c.ids, group=i) for i, (p, c) in enumerate(zip(prompts, ended, strict=True))], EOS)
    assert batch.loss_mask.sum(dim=1).tolist() == [len(c.ids) for c in ended]
    assert batch.prompt_mask.sum(dim=1).tolist() == [len(p) for p in prompts]

    inside = sample_completions(model, prompts, Sampling(12), keys, [EOS], PAD)
    assert [c.ids for c in inside] == [c.ids for c in ended], "the pad id must not matter"
    assert any(PAD in c.ids[:-1] for c in inside)
    scores = Forward(model)(model, batch).policy.logprobs
    for row, completion in zip(scores, ended, strict=True):
        torch.testing.assert_close(row[: len(completion.ids)], torch.tensor(completion.logprobs), atol=1e-4, rtol=0)


def test_minimum_length() -> None:
    model = make_model()
    ends = list(range(6, 40))
    got = sample_completions(model, PROMPTS, Sampling(9, min_new_tokens=5), KEYS, ends, PAD)
    assert all(len(c.ids) >= 6 or c.finish_reason == "length" for c in got)
    short = sample_completions(model, PROMPTS, Sampling(9), KEYS, ends, PAD)
    assert min(len(c.ids) for c in short) < 5
    # The ends are ruled out before the draw: the kept log-probabilities are of the distribution that is left.
    (alone,) = sample_completions(model, PROMPTS[:1], Sampling(1, min_new_tokens=1), KEYS[:1], ends, PAD)
    logits = next_logits(model, PROMPTS[0])[0]
    logits[ends] = -torch.inf
    assert alone.logprobs[0] == pytest.approx(float(logits.log_softmax(-1)[alone.ids[0]]), abs=1e-4)


def test_length_limit_without_any_end() -> None:
    model = make_model()
    got = sample_completions(model, PROMPTS, Sampling(7), KEYS, [], PAD)
    assert [len(c.ids) for c in got] == [7, 7, 7]
    assert {c.finish_reason for c in got} == {"length"}
    assert max(max(c.ids) for c in got) < len(VOCAB)
