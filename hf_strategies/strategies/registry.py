"""The one table of strategy names. Nothing else in the package branches on a name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from hf_strategies.strategies.base import Strategy
from hf_strategies.strategies.dpo import DPO
from hf_strategies.strategies.grpo import GRPO
from hf_strategies.strategies.ppo import PPO
from hf_strategies.strategies.seq import Seq
from hf_strategies.strategies.sft import SFT


@dataclass(frozen=True)
class Entry:
    """A row of the table.

    Attributes:
        strategy: the class behind the name.
        online: whether its rows are sampled from the policy during training.
        reads: columns of a dataset row, for messages and documentation.
    """

    strategy: type[Strategy]
    online: bool
    reads: str


STRATEGIES: dict[str, Entry] = {
    "seq": Entry(Seq, online=False, reads="text | input_ids"),
    "sft": Entry(SFT, online=False, reads="messages | prompt, completion | text | input_ids"),
    "dpo": Entry(DPO, online=False, reads="prompt, chosen, rejected | chosen, rejected"),
    "online_dpo": Entry(DPO, online=True, reads="prompt (+ reward columns)"),
    "grpo": Entry(GRPO, online=False, reads="prompt, completions, rewards"),
    "online_grpo": Entry(GRPO, online=True, reads="prompt (+ reward columns)"),
    "online_ppo": Entry(PPO, online=True, reads="prompt (+ reward columns)"),
}


def register_strategy(name: str, strategy: type[Strategy], *, online: bool = False, reads: str = "prompt") -> None:
    """Add a name to the table.

    Args:
        name: new name.
        strategy: subclass of `Strategy` with an ``Options`` dataclass.
        online: whether rows are sampled from the policy.
        reads: columns it reads, for messages.

    Raises:
        ValueError: the name is taken.
        TypeError: not a subclass of `Strategy`.
    """
    if name in STRATEGIES:
        raise ValueError(f"strategy {name!r} is registered already, by {STRATEGIES[name].strategy.__name__}")
    if not (isinstance(strategy, type) and issubclass(strategy, Strategy)):
        raise TypeError(f"strategy {name!r}: {strategy!r} is not a subclass of hf_strategies.strategies.Strategy")
    STRATEGIES[name] = Entry(strategy, online=online, reads=reads)


def get_entry(name: str) -> Entry:
    """Row of the table.

    Raises:
        ValueError: unknown name; the message lists the known ones.
    """
    if name not in STRATEGIES:
        raise ValueError(f"unknown strategy {name!r}{_hint(name, STRATEGIES)} (known: {', '.join(STRATEGIES)})")
    return STRATEGIES[name]


def make_strategy(name: str, **options: Any) -> Strategy:
    """Build a strategy from its name and options.

    Raises:
        ValueError: unknown name, unknown option or a value that is not allowed; the message says what is.
    """
    strategy = get_entry(name).strategy
    known = [f.name for f in fields(strategy.Options)]
    for key in options:
        if key not in known:
            raise ValueError(
                f"strategy {name!r} has no option {key!r}{_hint(key, known)} (known: {', '.join(known) or 'none'})"
            )
    return strategy(strategy.Options(**options))


def _hint(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f", did you mean {near[0]!r}?" if near else ""
