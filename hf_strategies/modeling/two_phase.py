"""Prompts and completions in passes of their own, with the gradients of one pass.

The prompts of a batch go through the model once, all but their last token. Their keys and values stay attached to that
pass; every completion, opened by the last token of its prompt, then runs on them as on constants, with a backward pass
of its own that leaves gradients on the keys and values. One backward pass of

    sum over layers and tokens of  keys * d_keys + values * d_values

through the prompts' pass brings those to the weights. What waits for a backward pass at any time is the prompts and
one piece of the completions, however many there are.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hf_strategies.batch import Batch
from hf_strategies.modeling.layout import Block, StreamBuilder, blocks_of
from hf_strategies.modeling.stream import KeptStream, Stream


@dataclass
class Prefix(KeptStream):
    """Prompts without their last token.

    Attributes:
        spans: token ids of a prompt -> (start, length) of what stands here of it.
        leaves: attention layer -> keys and values that completions attend to: constants that collect gradients, or at
            last the ones of this pass.
        collected: keys and values of this pass, each with the gradient that its leaf collected.
    """

    spans: dict[tuple[int, ...], tuple[int, int]] = field(default_factory=dict)
    leaves: dict[nn.Module, tuple[Tensor, Tensor]] = field(default_factory=dict)
    collected: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @classmethod
    def of_batch(cls, batch: Batch) -> Prefix | None:
        """The prompts of a batch, each once; None if none has more than one token."""
        builder = StreamBuilder(batch, untrained=True)
        spans: dict[tuple[int, ...], tuple[int, int]] = {}
        for row in builder.rows():
            ids = builder.prompt(row)
            key = tuple(ids.tolist())
            if len(key) > 1 and key not in spans:
                spans[key] = (builder.append(ids[:-1], 0, 1), len(key) - 1)
        if not spans:
            return None
        # One position of logits is computed because a model must return some; nobody reads them.
        builder.score_first()
        return cls(**builder.fields([], blocks_of(0, 0, list(spans.values()))), spans=spans)

    def detach(self) -> None:
        """Leaves in place of keys and values, for passes that end here."""
        self.leaves = {
            layer: (keys.detach().requires_grad_(), values.detach().requires_grad_())
            for layer, (keys, values) in self.kept.items()
        }

    def attach(self) -> None:
        """The keys and values themselves, for a pass whose gradients go on into the prompts'."""
        self.collected = [
            (state, leaf.grad)
            for layer, states in self.kept.items()
            for state, leaf in zip(states, self.leaves[layer], strict=True)
            if leaf.grad is not None
        ]
        self.leaves = dict(self.kept)

    def pull(self) -> Tensor | None:
        """Scalar whose gradient is what the leaves collected; None if they collected nothing."""
        terms = [(state * grad).sum() for state, grad in self.collected]
        return torch.stack(terms).sum() if terms else None


@dataclass
class Suffix(Stream):
    """Completions that go on from a `Prefix`."""

    prefix: Prefix | None = None

    @classmethod
    def of_batch(cls, batch: Batch, prefix: Prefix) -> Suffix:
        """Rows of a batch whose prompts the prefix holds."""
        builder = StreamBuilder(batch, untrained=False)
        blocks: list[Block] = []
        for family in builder.families():
            ids = builder.prompt(family[0])
            start, length = prefix.spans.get(tuple(ids.tolist()), (0, 0))
            blocks += blocks_of(start, length, [builder.add_suffix(row) for row in family])
        if not blocks:
            blocks = blocks_of(0, 0, [builder.add_stub()])
        return cls(**builder.fields([], blocks), prefix=prefix)

    def _shared(self, layer: nn.Module, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        assert self.prefix is not None
        return self.prefix.leaves[layer]
