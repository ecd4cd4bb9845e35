"""The token stream: rows of a batch as one flat row in which every shared prompt stands once.

    [ prompt | completion 1 | ... | completion G | next prompt | ... | a row that shares nothing | ... ]

Positions restart after the prompt for each completion. A completion's token attends to its prompt and to its own
completion; a row that shares its prompt with no other is one causal sequence, so that packed documents are the same
thing. Nothing is padded and no [T, T] mask exists: `Stream.attend` computes the few rectangles that are not empty.
The result is exact: each token sees what it sees when its row is run alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_strategies.batch import Batch
from hf_strategies.modeling.attention import Rules
from hf_strategies.modeling.layout import Block, StreamBuilder

if TYPE_CHECKING:
    from typing_extensions import Self


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
        row_lengths: [1, T] long, tokens of the row a token belongs to, of the longest of those that share it.
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
    row_lengths: Tensor
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
        return cls(**StreamBuilder(batch, untrained).build())

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
                shared_keys, shared_values = self._shared(layer, k, v)
                shared = (len(block.tokens), -1, -1, -1)
                keys = torch.cat([shared_keys[span][None].expand(shared), keys], dim=1)
                values = torch.cat([shared_values[span][None].expand(shared), values], dim=1)
            pieces.append(rules.attend(queries, keys, values, block.prompt_len)[block.real])
        return torch.cat(pieces).index_select(0, self.order).unsqueeze(0)

    def _shared(self, layer: nn.Module, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [T, K, D] and values [T, K, E] that hold the prompts of the blocks: the stream's own."""
        return k, v

    def check_used(self) -> None:
        """Raise if no attention layer has read the stream: the model dropped it, and the numbers are wrong."""
        if self.calls == 0:
            raise RuntimeError("the model's attention layers never saw the token stream; set attention_path='padded'")

    def scatter(self, values: Tensor) -> Tensor:
        """[M] numbers of trained tokens -> [N, C], 0 elsewhere."""
        rows, length = self.shape
        flat = values.new_zeros(rows * length).index_put((self.slots,), values)
        return flat.view(rows, length)


@dataclass
class KeptStream(Stream):
    """A stream whose keys and values are kept, for whoever goes on from it.

    Attributes:
        kept: attention layer -> keys [T, K, D] and values [T, K, E].
    """

    kept: dict[nn.Module, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def attend(self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, rules: Rules) -> Tensor:
        """See `Stream.attend`."""
        # Activation checkpointing runs the layer again; what it computes then belongs to the backward pass.
        self.kept.setdefault(layer, (key[0].transpose(0, 1), value[0].transpose(0, 1)))
        return super().attend(layer, query, key, value, rules)
