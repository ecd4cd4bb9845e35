"""How a token is drawn: the options, the noise, and a sampler that keeps what was drawn.

What is drawn is a function of the seed and of the row alone, whatever runs the model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_strategies import functional as f

# Tokens whose probabilities are added up before their cumulative sum is taken.
BLOCK = 256


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
        stop_strings: texts that end a completion.
    """

    max_new_tokens: int = 512
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    greedy: bool = False
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Completion:
    """One sampled completion.

    Attributes:
        ids: sampled token ids, the end-of-sequence token included.
        logprobs: log-probability of each token under the distribution it was drawn from, in nats.
        finish_reason: ``stop`` (an end-of-sequence token or a stop string) or ``length``.
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
    probs = logits.softmax(dim=-1)
    # A cumulative sum over all tokens takes longer than everything else here: one over blocks, and one within a block.
    blocks = pad(probs, (0, -probs.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    masses = blocks.sum(dim=-1).double()
    block, rest = _find(masses, uniform.to(logits.device).unsqueeze(-1))
    inside = blocks.gather(-2, block.unsqueeze(-1).expand(-1, -1, BLOCK)).squeeze(-2).double()
    token, _ = _find(inside, rest)
    return (block * BLOCK + token).squeeze(-1)


def _find(masses: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """Where a share [rows, 1] in [0, 1) of the total of ``masses`` [rows, n] falls, and its share of what is there."""
    cumulative = masses.cumsum(dim=-1)
    total = cumulative[..., -1:]
    # Below the total whatever rounding does; right=True never lands on a mass of 0.
    target = torch.minimum(share * total, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cumulative, target, right=True).clamp(max=masses.shape[-1] - 1)
    mass = masses.gather(-1, index)
    share = (target - (cumulative.gather(-1, index) - mass)) / mass
    return index, share.clamp(0.0, 1.0)


class TokenSampler:
    """Decides the next token of every row and keeps its log-probability.

    Args:
        sampling: the options.
        noise: [rows, max_new_tokens] uniform numbers, see `row_noise`.
        prompts: token ids of each row's prompt: the repetition penalty looks at them too.
        eos_token_ids: ids that end a completion.
    """

    def __init__(
        self, sampling: Sampling, noise: Tensor, prompts: Sequence[Sequence[int]], eos_token_ids: Sequence[int]
    ) -> None:
        self.sampling = sampling
        self.noise = noise
        self.prompts = prompts
        self.eos_token_ids = list(eos_token_ids)
        self.step = 0
        self._occurred: Tensor | None = None

    def next(self, logits: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Draw one token for each of some rows.

        Args:
            logits: [k, V] of the model; half precision is raised to float32.
            rows: [k] long, which rows these are; all of them, in order, when left out.

        Returns:
            [k] token ids and [k] their log-probabilities under the distribution they were drawn from, in nats.
        """
        logits = f.at_least_float32(logits)
        penalised = self.sampling.repetition_penalty != 1.0
        if penalised:
            logits = self._penalise(logits, rows)
        if self.step < self.sampling.min_new_tokens and self.eos_token_ids:
            logits = logits.clone()
            logits[:, self.eos_token_ids] = -torch.inf
        logits = constrain_logits(logits, self.sampling)
        noise = self.noise[:, self.step] if rows is None else self.noise[rows, self.step]
        chosen = logits.argmax(dim=-1) if self.sampling.greedy else draw(logits, noise)
        if penalised:
            assert self._occurred is not None
            where = torch.arange(len(self._occurred), device=chosen.device) if rows is None else rows
            self._occurred[where, chosen] = True
        self.step += 1
        return chosen, f.token_logprobs(logits, chosen)

    def _penalise(self, logits: Tensor, rows: Tensor | None) -> Tensor:
        if self._occurred is None:
            self._occurred = torch.zeros(len(self.prompts), logits.shape[-1], dtype=torch.bool, device=logits.device)
            for i, prompt in enumerate(self.prompts):
                self._occurred[i, torch.as_tensor(prompt, device=logits.device)] = True
        occurred = self._occurred if rows is None else self._occurred[rows]
        penalty = self.sampling.repetition_penalty
        return torch.where(occurred, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


@dataclass(frozen=True)
class StopStrings:
    """Texts that end a completion; the token that completes one is its last.

    Attributes:
        strings: the texts, none of them empty.
        decode: token ids -> text.
    """

    strings: tuple[str, ...]
    decode: Callable[[list[int]], str]

    @property
    def window(self) -> int:
        """Most tokens that a stop string can be spread over, and those of a character before it."""
        # A token is at least one character, or one of up to four bytes of one.
        return max(len(string) for string in self.strings) + 4

    def __call__(self, ids: Sequence[int]) -> bool:
        """Whether the last token completes a stop string."""
        text = self.decode(list(ids[-self.window :]))
        return any(string in text for string in self.strings)


def completions_of(
    ids: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float]],
    eos_token_ids: Sequence[int],
    stop: StopStrings | None = None,
) -> list[Completion]:
    """Cut sampled rows after their first end-of-sequence token or stop string."""
    ends = set(eos_token_ids)

    def size(row: Sequence[int]) -> int | None:
        for i, token in enumerate(row):
            if token in ends or (stop is not None and stop(row[: i + 1])):
                return i + 1
        return None

    completions = []
    for row, values in zip(ids, logprobs, strict=True):
        end = size(row)
        kept = len(row) if end is None else end
        completions.append(Completion(list(row[:kept]), list(values[:kept]), "length" if end is None else "stop"))
    return completions
