"""Attention layers that can read a token stream, in any model that looks its attention function up by name."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

PREFIX = "stream_"


class Attends(Protocol):
    """What is handed to a model as ``stream``: it computes the attention of its own tokens."""

    def attend(self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, rules: Rules) -> Tensor:
        """See `modeling.stream.Stream.attend`."""
        ...


def stream_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    stream: Attends | None = None,
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
        return self.weights(q @ k.transpose(-1, -2), mask, q.shape[-1], (q.shape[1], 1)).to(v.dtype) @ v

    def weights(self, scores: Tensor, visible: Tensor | None, width: int, heads: tuple[int, ...]) -> Tensor:
        """Attention weights.

        Args:
            scores: dot products [..., keys].
            visible: broadcastable bool, True where a key is seen; None where all are.
            width: D, for the default scaling.
            heads: shape of the H heads, in order, against ``scores[..., 0]``.

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
        sinks = self.sinks.to(scores.dtype).view(*heads, 1).expand(*scores.shape[:-1], 1)
        together = torch.cat([scores, sinks], dim=-1)
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
