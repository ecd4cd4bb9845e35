"""Completions as tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

# Column of what a strategy makes of a completion, where it says so.
USE = "trained as"


def _shown(value: Any) -> str:
    """A prompt, completion or number as one cell of text."""
    if isinstance(value, list):
        return "\n".join(f"{message['role']}: {message['content']}" for message in value)
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def completions_table(rows: Sequence[dict[str, Any]], title: str, columns: Sequence[str] | None = None) -> Table:
    """Rich table of dict rows; model text is escaped, so that brackets in it are no markup.

    Args:
        rows: dicts with the same keys.
        title: heading.
        columns: keys to show; all of the first row when left out.
    """
    table = Table(title=title, show_lines=True)
    names = list(columns or (rows[0] if rows else []))
    for name in names:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(escape(_shown(row[name])) for name in names))
    return table


def print_completions(
    rows: Sequence[dict[str, Any]], reward_names: Sequence[str], limit: int | None, step: int
) -> None:
    """Print completions of a rollout with their rewards, best and worst when there are more than ``limit``."""
    chosen = list(rows)
    if limit is not None and len(chosen) > limit:
        ordered = sorted(chosen, key=lambda row: row["reward"], reverse=True)
        chosen = ordered[: (limit + 1) // 2] + ordered[len(ordered) - limit // 2 :]
    names = ["prompt", "completion", *reward_names, "reward", *([USE] if rows and USE in rows[0] else [])]
    Console().print(completions_table(chosen, f"step {step}", names))
