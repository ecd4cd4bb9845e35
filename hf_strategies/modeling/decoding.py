"""Completions with every prompt computed and kept once: the fast way to sample groups.

The prompts of a chunk go through the model as one token stream, and their keys and values stay as they are, one copy
per prompt. Each decoding step then attends with the queries of all completions of a prompt to that one copy, and with
each to its own tokens in a buffer that is there from the start. Finished rows leave. What is drawn is decided by the
same sampler as in `generation`, from the same noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_strategies.batch import Batch, Row
from hf_strategies.modeling.attention import Rules, enable_stream, streaming
from hf_strategies.modeling.forward import Forward
from hf_strategies.modeling.generation import generating
from hf_strategies.modeling.sampling import Completion, Sampling, StopStrings, TokenSampler, row_noise
from hf_strategies.modeling.stream import KeptStream
from hf_strategies.modeling.unwrap import causal_lm_of

# Rows are taken out of the buffers once this part of them is done: each time costs a copy of what the others hold.
DONE_BEFORE_LEAVING = 0.25


def prefill(prompts: Sequence[Sequence[int]], device: torch.device) -> KeptStream:
    """Prompts laid out one after another; the logits that follow each of them are asked for."""
    batch = Batch.from_rows([Row(prompt, [], group=i) for i, prompt in enumerate(prompts)]).to(device)
    stream = KeptStream.of(batch, untrained=True)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    stream.scoring = lengths.cumsum(0) - 1
    return stream


def in_attention(states: Tensor) -> Tensor:
    """Queries, keys or values in the precision in which attention computes.

    A processor multiplies many small matrices of half precision more slowly than those of float32, and converts what
    it multiplies each time.
    """
    half = states.dtype in (torch.bfloat16, torch.float16)
    return states.float() if half and states.device.type == "cpu" else states


class Decoding:
    """Keys and values while rows are decoded, token by token.

    The rows that are still decoded stand in a grid, one line per prompt, so that the queries of a prompt's rows are
    one matrix. Lines are as long as the prompt with the most rows needs; the empty cells of others are computed and
    not read.

    Args:
        prompts: the prompts, after they went through the model.
        lengths: tokens of each of the B prompts.
        n: completions per prompt.
        capacity: most tokens of a completion.
    """

    def __init__(self, prompts: KeptStream, lengths: Sequence[int], n: int, capacity: int) -> None:
        device = prompts.input_ids.device
        self.capacity = capacity
        self.step = 0
        self.calls = 0
        self.longest = max(lengths)
        self.lengths = torch.tensor(lengths, device=device)
        # Row r is completion r % n of prompt r // n. `slots` are the rows that are still decoded, `cells` their places
        # in the grid [B, width]; None where they fill it in order.
        self.n = self.width = n
        self.slots = torch.arange(len(lengths) * n, device=device)
        self.cells: Tensor | None = None
        column = torch.arange(self.longest, device=device)
        self.ragged = bool((self.lengths < self.longest).any())
        self.prompt_real = column < self.lengths.unsqueeze(1)
        starts = prompts.scoring + 1 - self.lengths
        index = (starts.unsqueeze(1) + torch.minimum(column, self.lengths.unsqueeze(1) - 1)).flatten()
        shape = (len(lengths), self.longest)
        # [B, K, P, D], padded on the right by repeating the last token, which is masked.
        self.shared = {
            layer: tuple(
                in_attention(states.index_select(0, index)).unflatten(0, shape).transpose(1, 2) for states in kept
            )
            for layer, kept in prompts.kept.items()
        }
        # [B, K, width, capacity, D]
        self.own: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        self._masks: dict[int | None, Tensor] = {}

    def inputs(self, tokens: Tensor) -> dict[str, Any]:
        """Keyword arguments of the model for one step: the rows' newest tokens [rows]."""
        positions = self.lengths[self.slots // self.n] + self.step
        return {"input_ids": tokens.unsqueeze(1), "position_ids": positions.unsqueeze(1), "stream": self}

    def advance(self) -> None:
        """The tokens that were fed are part of what the next ones see."""
        self.step += 1
        self._masks = {}

    def keep(self, remaining: Tensor) -> None:
        """Go on with some of the rows.

        Args:
            remaining: [k] long, which of the present rows stay, in order.
        """
        before = remaining if self.cells is None else self.cells[remaining]
        self.slots = self.slots[remaining]
        lines = self.slots // self.n
        rows = torch.bincount(lines, minlength=len(self.lengths))
        self.width = int(rows.max())
        cells = lines * self.width + torch.arange(len(lines), device=lines.device) - (rows.cumsum(0) - rows)[lines]
        full = len(cells) == len(self.lengths) * self.width
        source = before.new_zeros(len(self.lengths) * self.width).index_copy(0, cells, before)
        self.cells = None if full else cells
        self._masks = {}
        for layer, states in self.own.items():
            keys, values = (self._moved(each, source) for each in states)
            self.own[layer] = (keys, values)

    def _moved(self, states: Tensor, source: Tensor) -> Tensor:
        """The grid in which each cell holds what cell ``source`` of ``states`` held."""
        lines, heads, _, capacity, size = states.shape
        moved = states.new_empty(lines, heads, self.width, capacity, size)
        filled = states[..., : self.step, :].transpose(1, 2).flatten(0, 1).index_select(0, source)
        moved[..., : self.step, :] = filled.unflatten(0, (lines, self.width)).transpose(1, 2)
        return moved

    def attend(self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, rules: Rules) -> Tensor:
        """Attention of one new token per row to the row's prompt and to what it has sampled so far.

        Args:
            layer: attention layer.
            query: [rows, H, 1, D].
            key: [rows, K, 1, D], K dividing H.
            value: [rows, K, 1, E].
            rules: of the layer.

        Returns:
            [rows, 1, H, E].
        """
        self.calls += 1
        rows, heads, _, size = query.shape
        kv_heads = key.shape[1]
        repeats = heads // kv_heads
        dtype = value.dtype
        query, key, value = in_attention(query), in_attention(key), in_attention(value)
        keys, values = self._own(layer, key, value)
        shared_keys, shared_values = self.shared[layer]
        queries = self._grid(query.view(rows, kv_heads, repeats, size)).contiguous()  # [B, K, width, repeats, D]
        together = (self.width, repeats)
        shared_scores = (queries.flatten(2, 3) @ shared_keys.transpose(-1, -2)).unflatten(2, together)
        scores = torch.cat([shared_scores, queries @ keys.transpose(-1, -2)], dim=-1)
        weights = rules.weights(scores, self._visible(rules.window), size, (kv_heads, 1, repeats)).to(value.dtype)
        shared_weights, own_weights = weights.split([self.longest, self.step + 1], dim=-1)
        out = (shared_weights.flatten(2, 3) @ shared_values).unflatten(2, together) + own_weights @ values
        out = out.transpose(1, 2).reshape(-1, 1, heads, out.shape[-1]).to(dtype)
        return out if self.cells is None else out.index_select(0, self.cells)

    def _own(self, layer: nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of what the rows have sampled [B, K, width, step + 1, D], the newest added."""
        if layer not in self.own:
            grid = (len(self.lengths), key.shape[1], self.width, self.capacity)
            self.own[layer] = (key.new_empty(*grid, key.shape[-1]), value.new_empty(*grid, value.shape[-1]))
        keys, values = self.own[layer]
        keys[..., self.step, :] = self._grid(key)[..., 0, :]
        values[..., self.step, :] = self._grid(value)[..., 0, :]
        return keys[..., : self.step + 1, :], values[..., : self.step + 1, :]

    def _grid(self, states: Tensor) -> Tensor:
        """[rows, K, x, D] -> [B, K, width, x, D]; cells without a row are zeros."""
        lines = len(self.lengths)
        if self.cells is not None:
            states = states.new_zeros(lines * self.width, *states.shape[1:]).index_copy(0, self.cells, states)
        return states.unflatten(0, (lines, self.width)).transpose(1, 2)

    def _visible(self, window: int | None) -> Tensor | None:
        """Bool mask for scores [B, K, width, repeats, P + step + 1], True where a key is seen; None: everywhere."""
        if window is not None and window > self.longest + self.step:
            window = None
        if window is None and not self.ragged:
            return None
        if window not in self._masks:
            own = torch.arange(self.step + 1, device=self.slots.device)
            seen = torch.cat([self.prompt_real, self.prompt_real.new_ones(len(self.lengths), len(own))], dim=1)
            if window is not None:
                lengths = self.lengths.unsqueeze(1)
                column = torch.arange(self.longest, device=own.device).expand(len(lengths), -1)
                seen &= torch.cat([column, lengths + own], dim=1) > lengths + self.step - window
            self._masks[window] = seen[:, None, None, None, :]
        return self._masks[window]


def stream_completions(
    causal_lm: Any,
    prompts: Sequence[Sequence[int]],
    n: int,
    sampling: Sampling,
    noise_keys: Sequence[Sequence[tuple[int, ...]]],
    eos_ids: Sequence[int],
    stop: StopStrings | None = None,
) -> list[list[Completion]]:
    """Sample ``n`` completions of every prompt.

    Args:
        causal_lm: unwrapped model, PEFT or plain, of which the token stream is right.
        prompts: token ids of B prompts.
        n: completions per prompt.
        sampling: the options.
        noise_keys: [B][n], see `row_noise`.
        eos_ids: ids that end a completion.
        stop: texts that end a completion.

    Returns:
        B lists of ``n`` completions, in order.
    """
    device = next(causal_lm.parameters()).device
    enable_stream(causal_lm_of(causal_lm))
    rows = len(prompts) * n
    noise = row_noise([key for group in noise_keys for key in group], sampling.max_new_tokens).to(device)
    sampler = TokenSampler(sampling, noise, [prompt for prompt in prompts for _ in range(n)], eos_ids)
    ends = torch.tensor(list(eos_ids), dtype=torch.long, device=device)
    ids = torch.zeros(rows, sampling.max_new_tokens, dtype=torch.long, device=device)
    logprobs = torch.zeros(rows, sampling.max_new_tokens, dtype=torch.float64, device=device)
    sizes = torch.zeros(rows, dtype=torch.long, device=device)
    ended = torch.zeros(rows, dtype=torch.bool, device=device)
    with generating(causal_lm), streaming():
        stream = prefill(prompts, device)
        outputs = causal_lm(**stream.inputs(True, True), use_cache=False)
        stream.check_used()
        logits = outputs["logits"][0].repeat_interleave(n, dim=0)
        decoding = Decoding(stream, [len(prompt) for prompt in prompts], n, sampling.max_new_tokens)
        stream.kept = {}
        done = torch.zeros(rows, dtype=torch.bool, device=device)  # of the rows that are still decoded
        while True:
            tokens, token_logprobs = sampler.next(logits, decoding.slots)
            step = decoding.step
            ids[decoding.slots, step], logprobs[decoding.slots, step] = tokens, token_logprobs.double()
            sizes[decoding.slots[~done]] = step + 1
            done = done | torch.isin(tokens, ends)
            if stop is not None:
                newest = ids[decoding.slots, max(0, step + 1 - stop.window) : step + 1].tolist()
                done = done | torch.tensor([stop(row) for row in newest], device=device)
            ended[decoding.slots] = done
            if step + 1 == sampling.max_new_tokens or bool(done.all()):
                break
            if float(done.double().mean()) >= DONE_BEFORE_LEAVING:
                remaining = (~done).nonzero().squeeze(1)
                decoding.keep(remaining)
                tokens, done = tokens[remaining], done[remaining]
            logits = causal_lm(**decoding.inputs(tokens), use_cache=False)["logits"][:, -1]
            decoding.advance()
    completions = [
        Completion(row[:size], values[:size], "stop" if end else "length")
        for row, values, size, end in zip(ids.tolist(), logprobs.tolist(), sizes.tolist(), ended.tolist(), strict=True)
    ]
    return [completions[i * n : (i + 1) * n] for i in range(len(prompts))]


def decoding_error(causal_lm: Any, prompt: Sequence[int], temperature: float, tokens: int = 8) -> float:
    """Largest difference, in nats, between log-probabilities kept while sampling and those of a plain forward pass.

    Args:
        causal_lm: see `stream_completions`.
        prompt: token ids to try.
        temperature: of the sampling.
        tokens: sampled tokens per completion.
    """
    sampling = Sampling(max_new_tokens=tokens, temperature=temperature)
    (completions,) = stream_completions(causal_lm, [prompt], 2, sampling, [[(0,), (1,)]], ())
    batch = Batch.from_rows([Row(prompt, c.ids, sampling_logprobs=c.logprobs) for c in completions])
    batch = batch.to(next(causal_lm.parameters()).device)
    with generating(causal_lm):
        scored = Forward(causal_lm, temperature)(causal_lm, batch).policy.logprobs
    assert batch.sampling_logprobs is not None
    return float((scored - batch.sampling_logprobs).abs().max())
