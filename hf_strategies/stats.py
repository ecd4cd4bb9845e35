"""Statistics that can be added up over micro-batches, steps and processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Mean:
    """A mean kept as its total and its count, so that parts of it combine exactly."""

    total: Tensor
    count: Tensor

    @classmethod
    def of(cls, values: Tensor, mask: Tensor) -> Mean:
        """Mean of ``values`` where ``mask``; both of one shape."""
        return cls(torch.where(mask, values.detach(), torch.zeros_like(values)).sum(), mask.sum())


@dataclass(frozen=True)
class Extreme:
    """A minimum or a maximum."""

    value: Tensor
    kind: Literal["min", "max"]


Metrics = dict[str, Mean | Extreme]
