"""Cutting a micro-batch into pieces of bounded size, each with a forward and a backward pass of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn

from hf_strategies.batch import Batch
from hf_strategies.modeling.moe import is_mixture_of_experts
from hf_strategies.modeling.unwrap import causal_lm_of

# Where the tokens of a prompt are computed: with every row, once in a piece, or in a pass of their own.
PROMPTS = ("per_row", "per_piece", "apart")


def pieces_of(batch: Batch, max_tokens: int, *, keep_groups: bool, prompts: str) -> list[Batch]:
    """Pieces of at most ``max_tokens`` computed tokens, balanced, groups together where they fit.

    Args:
        batch: N rows.
        max_tokens: most tokens of a piece; a single row (or group that must stay whole) may exceed it.
        keep_groups: rows of a group must not be parted.
        prompts: see `PROMPTS`.
    """
    prompt_lens = batch.prompt_mask.sum(dim=1).tolist()
    completion_lens = batch.completion_mask.sum(dim=1).tolist()

    def cost(rows: Sequence[int]) -> int:
        counted = {"per_row": rows, "per_piece": rows[:1], "apart": ()}[prompts]
        return sum(prompt_lens[row] for row in counted) + sum(completion_lens[row] for row in rows)

    units: list[list[int]] = []
    groups = batch.group.tolist()
    for row in range(batch.num_rows):
        same = bool(units) and groups[row] == groups[units[-1][0]]
        if same and (keep_groups or cost([*units[-1], row]) <= max_tokens):
            units[-1].append(row)
        else:
            units.append([row])
    total = sum(cost(unit) for unit in units)
    count = max(1, -(-total // max_tokens))
    while True:
        bins = _balanced(units, cost, min(count, len(units)))
        if count >= len(units) or all(sum(cost(unit) for unit in filled) <= max_tokens for filled in bins):
            break
        count += 1
    return [batch.select(sorted(row for unit in filled for row in unit)) for filled in bins]


def _balanced(units: list[list[int]], cost: Callable[[Sequence[int]], int], count: int) -> list[list[list[int]]]:
    """Units in ``count`` bins of similar cost: the largest first, each into the bin that holds least."""
    bins: list[list[list[int]]] = [[] for _ in range(count)]
    loads = [0] * count
    for unit in sorted(units, key=cost, reverse=True):
        least = loads.index(min(loads))
        bins[least].append(unit)
        loads[least] += cost(unit)
    return sorted(bins, key=lambda filled: filled[0][0])


def level(pieces: list[list[Batch]], gather: Callable[[list[Any]], list[Any]]) -> list[list[Batch]]:
    """The same number of pieces for a micro-batch on every process: engines count, and wait for, passes.

    Args:
        pieces: per micro-batch of this process, its pieces.
        gather: collects a list of objects from all processes.

    Returns:
        The pieces, with blank ones added where another process has more.
    """
    counts = gather([[len(cut) for cut in pieces]])
    most = torch.tensor(counts).amax(dim=0).tolist()
    return [cut + [cut[0].blank()] * (size - len(cut)) for cut, size in zip(pieces, most, strict=True)]


@contextmanager
def without_sync(accelerator: Accelerator, model: nn.Module) -> Iterator[None]:
    """Inside this context a backward pass adds to the gradients of this process and waits for no other."""
    state = accelerator.gradient_state
    before = state.sync_gradients
    # DeepSpeed's engine reads the flag where DDP and FSDP have a context.
    state._set_sync_gradients(False)
    try:
        with accelerator.no_sync(model):
            yield
    finally:
        state._set_sync_gradients(before)


def check_low_memory(args: Any, model: nn.Module) -> None:
    """Raise unless prompts and completions can be computed in two phases.

    Raises:
        ValueError: ``low_memory`` together with something it cannot be exact with.
    """
    problems = {
        "attention_path='padded'": args.attention_path == "padded",
        "fp16, whose loss scale would be applied twice": args.fp16,
        "neftune_noise_alpha, whose noise would fall on a prompt twice": args.neftune_noise_alpha is not None,
        "DeepSpeed": args.deepspeed is not None or AcceleratorState._shared_state.get("deepspeed_plugins") is not None,
        "FSDP": bool(args.fsdp),
        "reentrant activation checkpointing": args.gradient_checkpointing
        and bool((args.gradient_checkpointing_kwargs or {}).get("use_reentrant")),
        "a mixture of experts, whose balance loss is one of prompts and completions together": is_mixture_of_experts(
            causal_lm_of(model)
        ),
    }
    for problem, present in problems.items():
        if present:
            raise ValueError(f"low_memory=True does not work with {problem}")
