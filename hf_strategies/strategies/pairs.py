"""Which completions of a scored group make pairs."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from itertools import chain

import torch

from hf_strategies.batch import Batch
from hf_strategies.stats import Mean, Metrics

SELECTIONS = ("best_worst", "best_random", "all_pairs")


def choose(rewards: Sequence[float], how: str, draw: int = 0) -> list[tuple[int, int]]:
    """Pairs (better, worse) of indices into the scorable rewards of one group; none where all are equal.

    Args:
        rewards: finite numbers.
        how: ``best_worst``: one pair; ``best_random``: the best and one of those that are worse; ``all_pairs``: every
            two whose rewards differ.
        draw: decides for ``best_random``.

    Among equals the first is taken: the choice is a function of the arguments.
    """
    if len(rewards) == 0 or min(rewards) == max(rewards):
        return []
    everyone = range(len(rewards))
    best = max(everyone, key=rewards.__getitem__)
    if how == "best_worst":
        return [(best, min(everyone, key=rewards.__getitem__))]
    if how == "best_random":
        worse = [i for i in everyone if rewards[i] < rewards[best]]
        return [(best, worse[draw % len(worse)])]
    return [(i, j) for i in everyone for j in everyone if rewards[i] > rewards[j]]


def select_pairs(batch: Batch, how: str) -> tuple[Batch, Metrics]:
    """Rows of all pairs of a batch of scored groups, better and worse one after the other, in order of their groups.

    Ties, groups without two scorable rows, and pairs with a side that trains nothing make none and are counted.

    Args:
        batch: whole groups, with rewards.
        how: see `choose`.
    """
    pairs, tied, groups = _pairs_of_groups(batch, how)
    training = _training(pairs, batch)
    empty = len(pairs) - len(training)
    rows_of_pairs = list(chain.from_iterable(training))
    metrics: Metrics = {
        "frac_pairs_tied": Mean(torch.tensor(float(tied)), torch.tensor(groups)),
        "rows_dropped/empty_side": Mean(torch.tensor(float(empty)), torch.tensor(groups)),
    }
    return batch.select(rows_of_pairs) if rows_of_pairs else batch.blank(), metrics


def uses_of(batch: Batch, how: str) -> list[str]:
    """Of each row of scored groups: ``chosen``, ``rejected``, both with their numbers, or an empty text.

    Args:
        batch: whole groups, with rewards.
        how: see `choose`.
    """
    sides = [Counter[str]() for _ in range(batch.num_rows)]
    for better, worse in _training(_pairs_of_groups(batch, how)[0], batch):
        sides[better]["chosen"] += 1
        sides[worse]["rejected"] += 1
    return [", ".join(name if n == 1 else f"{name} x{n}" for name, n in sorted(side.items())) for side in sides]


def _training(pairs: list[tuple[int, int]], batch: Batch) -> list[tuple[int, int]]:
    """Pairs of which both sides train something."""
    trains = batch.loss_mask.any(dim=1).cpu()
    return [(better, worse) for better, worse in pairs if trains[better] and trains[worse]]


def _pairs_of_groups(batch: Batch, how: str) -> tuple[list[tuple[int, int]], int, int]:
    """Row numbers (better, worse) of all pairs, the number of groups without one, and that of all groups."""
    assert batch.rewards is not None
    # Decided on the host: on an accelerator every group would wait for it several times.
    rewards, group = batch.rewards.cpu(), batch.group.cpu()
    pairs: list[tuple[int, int]] = []
    tied = groups = 0
    for number in group.unique_consecutive().tolist():
        if number < 0:
            continue
        rows = torch.nonzero((group == number) & ~rewards.isnan()).flatten().tolist()
        chosen = choose([float(rewards[row]) for row in rows], how, _draw(batch, rows) if how == "best_random" else 0)
        pairs += [(rows[better], rows[worse]) for better, worse in chosen]
        tied += not chosen
        groups += 1
    return pairs, tied, groups


def _draw(batch: Batch, rows: Sequence[int]) -> int:
    """A number that depends on what a group says and on nothing else: not on its place, its process or a resume."""
    ids = batch.completion_ids[list(rows)].masked_fill(~batch.completion_mask[list(rows)], -1).tolist()
    text = repr([[token for token in row if token >= 0] for row in ids])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
