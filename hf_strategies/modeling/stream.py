"""The token stream: rows of a batch as one flat row in which every shared prompt stands once.

    [ prompt | completion 1 | ... | completion G | next prompt | ... | a row that shares nothing | ... ]

Positions restart after the prompt for each completion. A completion's token attends to its prompt and to its own
completion; a row that shares its prompt with no other is one causal sequence, so that packed documents are the same
thing. Nothing is padded and no [T, T] mask exists: `stream_attention` computes the few rectangles that are not empty.
The result is exact: each token sees what it sees when its row is run alone.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_strategies.batch import Batch

if TYPE_CHECKING:
    from typing_extensions import Self

PREFIX = "stream_"
# Sequences of one attention call are padded to the longest of them; shorter ones than this part of it start a call of
# their own.
LENGTH_SPREAD = 0.7


@dataclass(frozen=True)
class Block:
    """Sequences that one attention call computes together.

    Attributes:
        prompt_start: stream position of the prompt they share.
        prompt_len: its length; 0 where the sequences share nothing.
        tokens: [sequences, R] long, stream positions; shorter sequences repeat their last one up to R.
        real: [sequences, R] bool, False for the repeated ones.
    """

    prompt_start: int
    prompt_len: int
    tokens: Tensor
    real: Tensor


@dataclass
class Stream:
    """Where everything of a batch lies in its stream.

    Attributes:
        input_ids: [1, T] long.
        position_ids: [1, T] long.
        prompts: (start, length) of each shared prompt.
        blocks: attention calls of everything else.
        order: [T] long, position in the stream -> position in the results of prompts and blocks one after another.
        scoring: [M] long, stream position whose logits score a token that trains.
        targets: [M] long, that token's id.
        slots: [M] long, its place in the flattened [N, C].
        weights: [T] long, rows that share the token; 0 in blank rows.
        shape: (N, C).
        padded_tokens: tokens of the padded rectangle, N * S.
        calls: attention calls made so far with this stream.
    """

    input_ids: Tensor
    position_ids: Tensor
    prompts: list[tuple[int, int]]
    blocks: list[Block]
    order: Tensor
    scoring: Tensor
    targets: Tensor
    slots: Tensor
    weights: Tensor
    shape: tuple[int, int]
    padded_tokens: int
    calls: int = 0

    @classmethod
    def of(cls, batch: Batch, *, untrained: bool = False) -> Self:
        """Lay a batch out. Neighbouring rows of a group share their prompt if it is the same.

        Args:
            batch: N rows.
            untrained: also lay out rows of which no token trains; nobody sees them but themselves.
        """
        return cls(**_Builder(batch, untrained).build())

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.input_ids.shape[1]

    def inputs(self, takes_positions: bool, keeps_logits: bool) -> dict[str, Any]:
        """Keyword arguments of the model."""
        if not (takes_positions and keeps_logits):
            raise ValueError("a token stream needs a model with position_ids and logits_to_keep")
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "logits_to_keep": self.scoring,
            "stream": self,
        }

    def pick(self, states: Tensor) -> Tensor:
        """[1, M, ...] -> [M, ...]: the model was asked for no more than what scores a token that trains."""
        return states[0]

    def attend(self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, rules: Rules) -> Tensor:
        """Attention of all tokens of the stream.

        Args:
            layer: attention layer.
            query: [1, H, T, D].
            key: [1, K, T, D], K dividing H.
            value: [1, K, T, E].
            rules: of the layer.

        Returns:
            [1, T, H, E].
        """
        self.calls += 1
        # [T, heads, D] row by row: the pieces below are slices or gathers of rows.
        q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
        pieces = []
        for start, length in self.prompts:
            span = slice(start, start + length)
            pieces.append(rules.attend(q[span][None], k[span][None], v[span][None], 0)[0])
        for block in self.blocks:
            queries, keys, values = (
                states.index_select(0, block.tokens.flatten()).unflatten(0, block.tokens.shape) for states in (q, k, v)
            )
            if block.prompt_len:
                span = slice(block.prompt_start, block.prompt_start + block.prompt_len)
                shared = (len(block.tokens), -1, -1, -1)
                keys = torch.cat([k[span][None].expand(shared), keys], dim=1)
                values = torch.cat([v[span][None].expand(shared), values], dim=1)
            pieces.append(rules.attend(queries, keys, values, block.prompt_len)[block.real])
        return torch.cat(pieces).index_select(0, self.order).unsqueeze(0)

    def check_used(self) -> None:
        """Raise if no attention layer has read the stream: the model dropped it, and the numbers are wrong."""
        if self.calls == 0:
            raise RuntimeError("the model's attention layers never saw the token stream; set attention_path='padded'")

    def scatter(self, values: Tensor) -> Tensor:
        """[M] numbers of trained tokens -> [N, C], 0 elsewhere."""
        rows, length = self.shape
        flat = values.new_zeros(rows * length).index_put((self.slots,), values)
        return flat.view(rows, length)


def trained_tokens(batch: Batch) -> Tensor:
    """[N, C] bool, tokens that are scored: those that train.

    Of a batch that trains nothing it is a single one: such a batch still runs, and what it returns must hang in the
    graph.
    """
    trained = batch.loss_mask & batch.completion_mask
    if not trained.any():
        trained[0, 0] = True
    return trained


class _Builder:
    """Collects a batch's sequences into a `Stream`."""

    def __init__(self, batch: Batch, untrained: bool) -> None:
        self.batch = batch
        self.untrained = untrained
        self.prompt_ids = batch.prompt_ids.cpu()
        self.completion_ids = batch.completion_ids.cpu()
        self.prompt_lens = batch.prompt_mask.sum(dim=1).tolist()
        self.completion_lens = batch.completion_mask.sum(dim=1).tolist()
        self.trains = trained_tokens(batch).cpu()
        self.in_group = batch.in_group.tolist()
        self.ids: list[Tensor] = []
        self.positions: list[Tensor] = []
        self.weights: list[Tensor] = []
        self.scoring: list[Tensor] = []
        self.targets: list[Tensor] = []
        self.slots: list[Tensor] = []
        self.size = 0

    def build(self) -> dict[str, Any]:
        """Fields of the `Stream`, on the batch's device."""
        prompts: list[tuple[int, int]] = []
        blocks: list[Block] = []
        alone: list[tuple[int, int]] = []
        if not (self.batch.loss_mask & self.batch.completion_mask).any() and not self.untrained:
            alone.append(self._add_stub())
            families: Iterable[list[int]] = []
        else:
            families = self._families()
        for family in families:
            if len(family) == 1:
                alone.append(self._add_row(family[0]))
                continue
            start, length = self._add_prompt(family)
            prompts.append((start, length))
            blocks += _blocks(start, length, [self._add_completion(row, start, length) for row in family])
        blocks += _blocks(0, 0, alone)
        device = self.batch.device
        placed = [torch.arange(start, start + length) for start, length in prompts]
        placed += [block.tokens[block.real] for block in blocks]
        order = torch.empty(self.size, dtype=torch.long)
        order[torch.cat(placed)] = torch.arange(self.size)
        n, c = self.trains.shape
        return {
            "input_ids": torch.cat(self.ids).unsqueeze(0).to(device),
            "position_ids": torch.cat(self.positions).unsqueeze(0).to(device),
            "prompts": prompts,
            "blocks": [Block(b.prompt_start, b.prompt_len, b.tokens.to(device), b.real.to(device)) for b in blocks],
            "order": order.to(device),
            "scoring": torch.cat(self.scoring).to(device),
            "targets": torch.cat(self.targets).to(device),
            "slots": torch.cat(self.slots).to(device),
            "weights": torch.cat(self.weights).to(device),
            "shape": (n, c),
            "padded_tokens": n * (self.prompt_ids.shape[1] + c),
        }

    def _families(self) -> Iterator[list[int]]:
        """Neighbouring rows of one group with the same prompt, among those that are laid out."""
        groups = self.batch.group.tolist()
        family: list[int] = []
        laid_out = self.trains.any(dim=1) | self.untrained
        for row in laid_out.nonzero().flatten().tolist():
            if family and groups[row] == groups[family[0]] and self._same_prompt(row, family[0]):
                family.append(row)
                continue
            if family:
                yield family
            family = [row]
        if family:
            yield family

    def _same_prompt(self, a: int, b: int) -> bool:
        length = self.prompt_lens[a]
        return length == self.prompt_lens[b] and torch.equal(self._prompt(a), self._prompt(b))

    def _prompt(self, row: int) -> Tensor:
        return self.prompt_ids[row, self.prompt_ids.shape[1] - self.prompt_lens[row] :]

    def _completion(self, row: int) -> Tensor:
        return self.completion_ids[row, : self.completion_lens[row]]

    def _append(self, ids: Tensor, first_position: int, weight: int) -> int:
        start = self.size
        self.ids.append(ids)
        self.positions.append(torch.arange(first_position, first_position + len(ids)))
        self.weights.append(torch.full((len(ids),), weight))
        self.size += len(ids)
        return start

    def _add_prompt(self, family: Sequence[int]) -> tuple[int, int]:
        ids = self._prompt(family[0])
        return self._append(ids, 0, sum(self.in_group[row] for row in family)), len(ids)

    def _add_completion(self, row: int, prompt_start: int, prompt_len: int) -> tuple[int, int]:
        ids = self._completion(row)
        start = self._append(ids, prompt_len, int(self.in_group[row]))
        self._score(row, before_first=prompt_start + prompt_len - 1, start=start)
        return start, len(ids)

    def _add_row(self, row: int) -> tuple[int, int]:
        prompt, completion = self._prompt(row), self._completion(row)
        start = self._append(torch.cat([prompt, completion]), 0, int(self.in_group[row]))
        self._score(row, before_first=start + len(prompt) - 1, start=start + len(prompt))
        return start, len(prompt) + len(completion)

    def _add_stub(self) -> tuple[int, int]:
        """A single token, for the graph of a batch that trains nothing."""
        start = self._append(self._prompt(0)[-1:], 0, 0)
        self._score(0, before_first=start, start=start + 1)
        return start, 1

    def _score(self, row: int, before_first: int, start: int) -> None:
        """Token j of a completion is scored one position before it, the first one by the last prompt token."""
        index = self.trains[row].nonzero().flatten()
        self.scoring.append(torch.where(index == 0, before_first, start + index - 1))
        self.targets.append(self.completion_ids[row, index])
        self.slots.append(row * self.trains.shape[1] + index)


def _blocks(prompt_start: int, prompt_len: int, sequences: list[tuple[int, int]]) -> list[Block]:
    """Attention calls for sequences (start, length) under one prompt: those of similar length go together."""
    blocks: list[Block] = []
    ordered = sorted((s for s in sequences if s[1] > 0), key=lambda s: (-s[1], s[0]))
    while ordered:
        longest = ordered[0][1]
        together = [s for s in ordered if s[1] >= LENGTH_SPREAD * longest]
        ordered = ordered[len(together) :]
        starts = torch.tensor([start for start, _ in together]).unsqueeze(1)
        lengths = torch.tensor([length for _, length in together]).unsqueeze(1)
        column = torch.arange(longest).unsqueeze(0)
        tokens = starts + torch.minimum(column, lengths - 1)
        blocks.append(Block(prompt_start, prompt_len, tokens, column < lengths))
    return blocks


# ---- attention ----


def stream_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    stream: Stream | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    delegate: str,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of a stream; of an ordinary batch, whatever the model had before.

    Args:
        module: attention layer.
        query: [1, H, T, D].
        key: [1, K, T, D], K dividing H.
        value: [1, K, T, E].
        attention_mask: ignored for a stream, which knows who sees whom.
        stream: the layout, which computes its own attention; None means an ordinary batch.
        scaling: factor of the dot products; D ** -0.5 when left out.
        dropout: rate of attention dropout; must be 0 for a stream.
        delegate: name of the implementation that ordinary batches use.
        **kwargs: of the layer: ``sliding_window``, ``softcap`` and ``s_aux`` (attention sinks) are honoured.

    Returns:
        [1, T, H, E], and no attention weights.
    """
    if stream is None:
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(delegate, _eager_of(module))
        return attend(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
    if dropout:
        raise ValueError("the token stream computes no attention dropout")
    rules = Rules(scaling, kwargs.get("sliding_window"), kwargs.get("softcap"), kwargs.get("s_aux"))
    return stream.attend(module, query, key, value, rules), None


@dataclass(frozen=True)
class Rules:
    """How a layer attends.

    Attributes:
        scaling: factor of the dot products; D ** -0.5 when left out.
        window: a token sees itself and this many less one before it.
        softcap: scores s become cap * tanh(s / cap).
        sinks: [H] scores of a key without a value.
    """

    scaling: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, offset: int) -> Tensor:
        """Causal attention of sequences whose queries start ``offset`` tokens into their keys.

        Args:
            q: [sequences, R, H, D].
            k: [sequences, offset + R, K, D], K dividing H.
            v: [sequences, offset + R, K, E].
            offset: keys before the first query; all queries see them.

        Returns:
            [sequences, R, H, E].
        """
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        keys = k.shape[2]
        windowed = self.window is not None and self.window < keys
        plain = self.softcap is None and self.sinks is None
        causal = plain and not offset and not windowed
        mask = None if causal else self._visible(offset, keys, q.device)
        if plain:
            out = scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                is_causal=causal and keys > 1,
                scale=self.scaling,
                enable_gqa=q.shape[1] != k.shape[1],
            )
            return out.transpose(1, 2)
        assert mask is not None
        return self._attend_in_steps(q, k, v, mask).transpose(1, 2)

    def _visible(self, offset: int, keys: int, device: torch.device) -> Tensor:
        """[R, keys] bool, True where a query sees a key."""
        at = torch.arange(offset, keys, device=device).unsqueeze(1)
        other = torch.arange(keys, device=device).unsqueeze(0)
        mask = other <= at
        return mask if self.window is None else mask & (other > at - self.window)

    def _attend_in_steps(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """What no fused kernel offers: capped scores and sinks."""
        repeats = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        return self.weights(q @ k.transpose(-1, -2), mask, q.shape[-1]).to(v.dtype) @ v

    def weights(self, scores: Tensor, visible: Tensor | None, width: int) -> Tensor:
        """Attention weights.

        Args:
            scores: dot products [rows, ..., keys], whose middle dimensions hold the H heads, in order, and queries.
            visible: broadcastable bool, True where a key is seen; None where all are.
            width: D, for the default scaling.

        Returns:
            As ``scores``, at least float32; with sinks they sum to less than 1.
        """
        scores = scores * (width**-0.5 if self.scaling is None else self.scaling)
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if visible is not None:
            scores = scores.masked_fill(~visible, -torch.inf)
        dtype = torch.promote_types(scores.dtype, torch.float32)
        if self.sinks is None:
            return scores.softmax(dim=-1, dtype=dtype)
        heads = scores.shape[1:-1]
        sinks = self.sinks.to(scores.dtype)
        sinks = sinks.view(-1, 1).expand(-1, heads.numel() // len(sinks)).reshape(1, *heads, 1)
        together = torch.cat([scores, sinks.expand(len(scores), *heads, 1)], dim=-1)
        return together.softmax(dim=-1, dtype=dtype)[..., :-1]


def _eager_of(module: nn.Module) -> Any:
    """The plain attention function that a model's file defines for its own layers."""
    return getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)


# ---- switching models over ----

_in_stream = False


@contextmanager
def streaming() -> Iterator[None]:
    """Models called inside this context build no attention mask."""
    global _in_stream
    before, _in_stream = _in_stream, True
    try:
        yield
    finally:
        _in_stream = before


def enable_stream(causal_lm: Any) -> None:
    """Let the model's attention layers read a stream when they are given one; ordinary calls stay as they are.

    The switch stays on: activation checkpointing runs the layers again in the backward pass.
    """
    own = causal_lm.config._attn_implementation or "eager"
    if own.startswith(PREFIX):
        return
    # The name must not contain "flash": transformers takes that for flash attention's own conventions.
    name = PREFIX + own.replace("flash_attention", "fa")

    def attention(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        return stream_attention(*args, delegate=own, **kwargs)

    def mask(*args: Any, **kwargs: Any) -> Any:
        return None if _in_stream else ALL_MASK_ATTENTION_FUNCTIONS[own](*args, **kwargs)

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    causal_lm.config._attn_implementation = name


def _attention_dropout(module: nn.Module) -> float:
    for name in ("attention_dropout", "attn_dropout"):
        rate = getattr(module, name, 0.0)
        rate = rate.p if isinstance(rate, nn.Dropout) else rate
        if isinstance(rate, float) and rate > 0:
            return rate
    return 0.0


def why_no_stream(causal_lm: Any, training: bool = True) -> str | None:
    """What keeps a model off the token stream; None where nothing is known to.

    Passing is necessary, not sufficient: a first batch must still be compared with the padded path.

    Args:
        causal_lm: the model, not a wrapper.
        training: whether dropout counts.
    """
    config = causal_lm.config.get_text_config()
    if not getattr(causal_lm, "_supports_attention_backend", False) or not causal_lm._can_set_attn_implementation():
        return "its attention cannot be exchanged"
    if getattr(causal_lm, "_is_stateful", False):
        return "it keeps a recurrent state"
    if "position_ids" not in inspect.signature(causal_lm.forward).parameters:
        return "it takes no position_ids"
    if training and any(_attention_dropout(module) > 0 for module in causal_lm.modules()):
        return "it trains with attention dropout"
    others = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if others:
        return f"it has layers of type {', '.join(sorted(others))}"
    return None
