"""Sampling of completions: what is drawn is a function of the seed and of the row alone.

`model.generate` runs the model; which token comes next is decided here, in a logits processor that hands `generate` a
distribution with a single token left. That makes three things exact that a plain sampling call cannot offer: the
log-probability of each sampled token under the distribution it was really drawn from is kept while sampling, every
sampling option comes from the caller and none from the model's own ``generation_config``, and the noise of a row does
not depend on which other rows, chunks or processes it is sampled beside.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from hf_strategies import functional as f


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
        max_new_tokens: most tokens of a completion, >= 1.
        min_new_tokens: no end-of-sequence token before this many.
        temperature: logits are divided by it, > 0.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest set of likeliest tokens with at least this mass, in (0, 1]; 1 keeps all.
        min_p: keep tokens at least this fraction as likely as the likeliest, in [0, 1); 0 keeps all.
        repetition_penalty: > 1 makes tokens that occurred less likely (arXiv 1909.05858); 1 is off.
        greedy: take the likeliest token instead of drawing.
    """

    max_new_tokens: int = 512
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    greedy: bool = False


@dataclass(frozen=True)
class Completion:
    """One sampled completion.

    Attributes:
        ids: sampled token ids, the end-of-sequence token included.
        logprobs: log-probability of each token under the distribution it was drawn from, in nats.
        finish_reason: ``stop`` (an end-of-sequence token) or ``length``.
    """

    ids: list[int]
    logprobs: list[float]
    finish_reason: str


def row_noise(keys: Sequence[tuple[int, ...]], length: int) -> Tensor:
    """Uniform numbers, a function of each row's key alone.

    Args:
        keys: one tuple of integers per row, such as (seed, generation, round, prompt position, completion index).
        length: numbers per row; the first k are the same for every ``length`` >= k.

    Returns:
        [rows, length] float64 in [0, 1), on the CPU.
    """
    rows = []
    for key in keys:
        # Hashing spreads neighbouring keys over the whole seed space; Python's own hash is not stable over versions.
        digest = hashlib.blake2b(repr(tuple(map(int, key))).encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big", signed=True))
        rows.append(torch.rand(length, dtype=torch.float64, generator=generator))
    return torch.stack(rows) if rows else torch.empty(0, length, dtype=torch.float64)


def constrain_logits(logits: Tensor, sampling: Sampling) -> Tensor:
    """Apply temperature, top-k, top-p and min-p in that order, as `model.generate` does.

    Args:
        logits: [rows, V] float32 or float64.
        sampling: the options.

    Returns:
        [rows, V], ruled-out tokens at -inf.
    """
    logits = logits / sampling.temperature
    vocab = logits.shape[-1]
    if 0 < sampling.top_k < vocab:
        kth = logits.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if sampling.top_p < 1.0:
        ordered, order = logits.sort(dim=-1, descending=True)
        mass = ordered.softmax(dim=-1)
        # Mass before a token: the likeliest always stays, and so does the one that crosses the threshold.
        drop_ordered = mass.cumsum(dim=-1) - mass >= sampling.top_p
        drop = torch.zeros_like(drop_ordered).scatter(-1, order, drop_ordered)
        logits = logits.masked_fill(drop, -torch.inf)
    if sampling.min_p > 0.0:
        probs = logits.softmax(dim=-1)
        logits = logits.masked_fill(probs < sampling.min_p * probs.amax(dim=-1, keepdim=True), -torch.inf)
    return logits


def draw(logits: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF sampling: the first token whose cumulative probability exceeds the row's uniform number.

    Args:
        logits: [rows, V], -inf where ruled out.
        uniform: [rows] in [0, 1).

    Returns:
        [rows] long.
    """
    cumulative = logits.softmax(dim=-1).double().cumsum(dim=-1)
    # Scaled by the total, which rounding may leave beside 1; right=True never lands on a token of probability 0.
    target = (uniform.to(logits.device) * cumulative[..., -1]).unsqueeze(-1)
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)


class TokenSampler(LogitsProcessor):
    """Decides the next token of every row and keeps its log-probability.

    Args:
        sampling: the options.
        noise: [rows, max_new_tokens] uniform numbers, see `row_noise`.
        prompt_mask: [rows, P] bool, for the repetition penalty: padding did not occur.
        eos_token_ids: ids that end a completion.
    """

    def __init__(
        self,
        sampling: Sampling,
        noise: Tensor,
        prompt_mask: Tensor,
        eos_token_ids: Sequence[int],
    ) -> None:
        self.sampling = sampling
        self.noise = noise
        self.prompt_mask = prompt_mask
        self.eos_token_ids = list(eos_token_ids)
        self.logprobs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Reduce ``scores`` [rows, V] to the one token that is next."""
        step = len(self.logprobs)
        logits = scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores
        if self.sampling.repetition_penalty != 1.0:
            logits = self._penalise(input_ids, logits)
        if step < self.sampling.min_new_tokens and self.eos_token_ids:
            logits = logits.clone()
            logits[:, self.eos_token_ids] = -torch.inf
        logits = constrain_logits(logits, self.sampling)
        chosen = logits.argmax(dim=-1) if self.sampling.greedy else draw(logits, self.noise[:, step])
        self.logprobs.append(f.token_logprobs(logits, chosen))
        return torch.full_like(scores, -torch.inf).scatter(1, chosen.unsqueeze(1), 0.0)

    def _penalise(self, input_ids: Tensor, logits: Tensor) -> Tensor:
        new = input_ids.shape[1] - self.prompt_mask.shape[1]
        real = torch.nn.functional.pad(self.prompt_mask, (0, new), value=True)
        # A padded slot counts its row's own last prompt token, which occurred anyway.
        ids = torch.where(
            real,
            input_ids,
            input_ids[:, self.prompt_mask.shape[1] - 1 : self.prompt_mask.shape[1]],
        )
        seen = logits.gather(1, ids)
        penalty = self.sampling.repetition_penalty
        return logits.scatter(1, ids, torch.where(seen < 0, seen * penalty, seen / penalty))


@contextmanager
def neutral_generation_config(causal_lm: Any) -> Iterator[None]:
    """Hide the model's own generation defaults: `generate` would fill in whatever a caller leaves unset."""
    own = causal_lm.generation_config
    causal_lm.generation_config = GenerationConfig()
    try:
        yield
    finally:
        causal_lm.generation_config = own


@contextmanager
def generating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradient; training mode comes back afterwards, module by module."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def eos_token_ids(causal_lm: Any, tokenizer: Any) -> list[int]:
    """Every id that ends a text: the model's generation config and the tokenizer each may know some."""
    configured = getattr(causal_lm.generation_config, "eos_token_id", None)
    ids = set(configured if isinstance(configured, list | tuple) else [configured])
    ids.add(tokenizer.eos_token_id)
    return sorted(i for i in ids if i is not None)


def sample_completions(
    causal_lm: Any,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    noise_keys: Sequence[tuple[int, ...]],
    eos_ids: Sequence[int],
    pad_token_id: int,
) -> list[Completion]:
    """One completion per prompt, by `model.generate`.

    Args:
        causal_lm: unwrapped model, PEFT or plain.
        prompts: token ids of each row; repeat a prompt to sample it several times.
        sampling: the options.
        noise_keys: one key per row, see `row_noise`.
        eos_ids: ids that end a completion.
        pad_token_id: written into padding, never looked at.

    Returns:
        One `Completion` per row, in order.
    """
    device = next(causal_lm.parameters()).device
    width = max(len(prompt) for prompt in prompts)
    input_ids = torch.full((len(prompts), width), pad_token_id, dtype=torch.long)
    mask = torch.zeros((len(prompts), width), dtype=torch.bool)
    for i, prompt in enumerate(prompts):
        input_ids[i, width - len(prompt) :] = torch.as_tensor(prompt)
        mask[i, width - len(prompt) :] = True
    input_ids, mask = input_ids.to(device), mask.to(device)
    noise = row_noise(noise_keys, sampling.max_new_tokens).to(device)
    sampler = TokenSampler(sampling, noise, mask, eos_ids)
    config = GenerationConfig(
        max_new_tokens=sampling.max_new_tokens,
        do_sample=False,  # the sampler has drawn already: one token is left
        eos_token_id=list(eos_ids) or None,
        pad_token_id=pad_token_id,
        use_cache=True,
    )
    base = causal_lm.get_base_model() if hasattr(causal_lm, "get_base_model") else causal_lm
    with generating(causal_lm), neutral_generation_config(base):
        output = causal_lm.generate(
            input_ids=input_ids,
            attention_mask=mask.long(),
            generation_config=config,
            logits_processor=LogitsProcessorList([sampler]),
        )
    sampled = output[:, width:].tolist()
    logprobs = torch.stack(sampler.logprobs, dim=1).tolist()
    ends = set(eos_ids)
    completions = []
    for ids, values in zip(sampled, logprobs, strict=True):
        end = next((i + 1 for i, token in enumerate(ids) if token in ends), None)
        size = len(ids) if end is None else end
        completions.append(Completion(ids[:size], values[:size], "length" if end is None else "stop"))
    return completions
