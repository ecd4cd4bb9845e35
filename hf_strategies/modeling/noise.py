"""Noise on embeddings while training (NEFTune, Jain et al. 2023, arXiv 2310.05914).

    e_t + u,  u uniform in +- alpha / sqrt(L d)

with L tokens of the row that token t belongs to and d the width of an embedding. L is the row's own number of tokens,
whatever it is padded to or laid out with, so that the noise does not depend on how a batch was cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def noisy_embeddings(causal_lm: Any, alpha: float, row_lengths: Tensor) -> Iterator[None]:
    """Inside this context the model's token embeddings carry noise.

    Args:
        causal_lm: the model, not a wrapper.
        alpha: see the module's docstring, >= 0.
        row_lengths: [N, S], of each token of the model's input, the number of tokens of its row.
    """

    def add_noise(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        bound = alpha / (row_lengths.clamp(min=1) * output.shape[-1]).sqrt().unsqueeze(-1)
        return output + torch.empty_like(output).uniform_(-1.0, 1.0) * bound.to(output.dtype)

    handle = causal_lm.get_input_embeddings().register_forward_hook(add_noise)
    try:
        yield
    finally:
        handle.remove()
