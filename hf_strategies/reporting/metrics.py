"""Adding metrics up over micro-batches, steps and processes, and turning them into numbers when they are logged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from hf_strategies.stats import Extreme, Mean


class Combinable(Protocol):
    """A statistic of several named values, such as a router's load."""

    def combine(self, other: Any) -> Any:
        """Statistic of both parts."""

    def values(self) -> dict[str, float]:
        """The finished numbers by metric name."""


def _combine(a: Any, b: Any) -> Any:
    if isinstance(a, Mean):
        return Mean(a.total + b.total.to(a.total.device), a.count + b.count.to(a.count.device))
    if isinstance(a, Extreme):
        pick = torch.minimum if a.kind == "min" else torch.maximum
        return Extreme(pick(a.value, b.value.to(a.value.device)), a.kind)
    return a.combine(b)


def _to_cpu(stat: Any) -> Any:
    if isinstance(stat, Mean):
        return Mean(stat.total.double().cpu(), stat.count.double().cpu())
    if isinstance(stat, Extreme):
        return Extreme(stat.value.double().cpu(), stat.kind)
    return stat


class MetricStore:
    """Collects statistics as they come; `reduce` is the only place that waits for the device or other processes."""

    def __init__(self) -> None:
        self._stats: dict[str, Any] = {}

    def add(self, metrics: Mapping[str, Mean | Extreme | Combinable]) -> None:
        """Add statistics to those collected since the last `reduce`."""
        for name, stat in metrics.items():
            self._stats[name] = _combine(self._stats[name], stat) if name in self._stats else stat

    def collected(self) -> dict[str, Any]:
        """The statistics as they are now, unreduced."""
        return dict(self._stats)

    def reduce(self, gather: Callable[[list[Any]], list[Any]] | None = None) -> dict[str, float]:
        """Finished numbers of everything collected, and an empty store.

        Args:
            gather: collects a list of objects from all processes; every process must call `reduce` then. A metric that
                only some processes have is reduced over those.

        Returns:
            Means with a count of zero are left out.
        """
        mine = {name: _to_cpu(stat) for name, stat in self._stats.items()}
        self._stats = {}
        merged: dict[str, Any] = {}
        for stats in [mine] if gather is None else gather([mine]):
            for name, stat in stats.items():
                merged[name] = _combine(merged[name], stat) if name in merged else stat
        numbers: dict[str, float] = {}
        for name, stat in merged.items():
            if isinstance(stat, Mean):
                if float(stat.count) > 0:
                    numbers[name] = float(stat.total) / float(stat.count)
            elif isinstance(stat, Extreme):
                numbers[name] = float(stat.value)
            else:
                numbers.update(stat.values())
        return numbers
