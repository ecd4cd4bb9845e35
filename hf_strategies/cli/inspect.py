"""``hf-strategies inspect``: rows of a dataset as the model will see them, by the functions that training uses."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from datasets import Dataset, IterableDataset
from rich.console import Console
from rich.text import Text

from hf_strategies.batch import Row
from hf_strategies.cli.arguments import ModelArguments, RewardArguments
from hf_strategies.cli.parser import StrategyParser
from hf_strategies.data.arguments import DataArguments
from hf_strategies.data.sources import load_rows
from hf_strategies.modeling.policy import check_sizes, read_config
from hf_strategies.modeling.tokenizer import adapt_tokenizer, load_tokenizer
from hf_strategies.options import Options, option
from hf_strategies.reporting.tokens import LEGEND, histogram, token_lines, tokens_of
from hf_strategies.strategies import get_entry
from hf_strategies.strategies.registry import STRATEGIES
from hf_strategies.trainers.arguments import OnlineArguments, StrategyArguments, config_class, strategy_options
from hf_strategies.trainers.datasets import RunData, prepare_data

STREAMED_EXAMPLES = 1000


@dataclass
class InspectArguments(Options):
    """What to print."""

    strategy: str = option("", f"What will train on the rows: {', '.join(STRATEGIES)}.")
    rows: int = option(3, "Examples to print, >= 0; 0: the summary alone.")
    first_row: int = option(0, "Number of the first example to print, counted from 0 among those that train.")
    max_tokens: int | None = option(None, "Most tokens printed of a row; the middle of more is left out. Unset: all.")
    max_examples: int | None = option(
        None, f"Examples to read; unset: all, of a stream the first {STREAMED_EXAMPLES}."
    )

    def validate(self) -> None:  # noqa: D102 - see Options
        super().validate()
        self.require_integer("rows", 0)
        self.require_integer("first_row", 0)
        for name in ("max_tokens", "max_examples"):
            if getattr(self, name) is not None:
                self.require_integer(name, 1)


def inspect(argv: Sequence[str]) -> None:
    """Print rows of a dataset as a strategy will see them, and a summary of all of them. No weights are read.

    Args:
        argv: flags; those of a recipe's YAML file are all known, ``--config`` included.

    Raises:
        ValueError: what training would refuse, too.
    """
    shown, data, model, args, online = _parse(argv)
    # What training would hold out is looked at, too.
    rows, _ = load_rows(replace(data, held_out_rows=0), args.seed)
    rows = _first_examples(rows, shown.max_examples)
    init_kwargs = args.from_pretrained_kwargs
    config = read_config(model.policy, init_kwargs)
    tokenizer = adapt_tokenizer(
        load_tokenizer(model.policy, args.trust_remote_code), args.chat_template_path, args.eos_token, args.pad_token
    )
    strategy_class = get_entry(shown.strategy).strategy
    strategy = strategy_class(strategy_options(args, strategy_class.Options))
    check_sizes(config, tokenizer)
    run = prepare_data(rows, None, tokenizer, strategy, args, online)
    check_sizes(config, tokenizer, run.longest, run.largest_id)
    assert run.train is not None

    console = Console(highlight=False)
    _say(console, f"{shown.strategy} on {data.label}, tokens of {model.policy}")
    _say(console, _described(tokenizer))
    if shown.rows:
        _say(console, LEGEND)
    last = min(shown.first_row + shown.rows, len(run.train))
    if shown.rows and shown.first_row >= len(run.train):
        raise ValueError(f"first_row={shown.first_row}: allowed is less than the {len(run.train)} examples that train")
    for number in range(shown.first_row, last):
        _say(console, "")
        example = run.train[number]
        lines = (
            _prompt_lines(example, tokenizer, console.width, shown.max_tokens)
            if online
            else _row_lines(example, run, tokenizer, console.width, shown.max_tokens)
        )
        _say(console, Text(f"Example {number} of {len(run.train):,}: ", "bold") + Text(next(lines).plain))
        for line in lines:
            _say(console, line)
    _say(console, "")
    for text in _summary(len(rows), run, args, online):
        _say(console, text)


def _parse(
    argv: Sequence[str],
) -> tuple[InspectArguments, DataArguments, ModelArguments, StrategyArguments, OnlineArguments | None]:
    """Options of the command; the strategy's name says which config they belong to."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--strategy")
    named = early.parse_known_args([argument for argument in argv if argument not in ("-h", "--help")])[0].strategy
    wants_help = bool({"-h", "--help"} & set(argv))
    if named is None and not wants_help:
        raise ValueError(f"--strategy is missing: allowed are {', '.join(STRATEGIES)}")
    types: list[type] = [InspectArguments, DataArguments, ModelArguments]
    if named is not None:
        types += [RewardArguments] if get_entry(named).online else []
        types.append(config_class(named))
    parsed = StrategyParser(
        types,
        prog="hf-strategies inspect",
        description="Print rows of a dataset as the model will see them."
        + ("" if named else " With --strategy, its options are listed too."),
    ).parse(argv)
    shown, data, model, args = parsed[0], parsed[1], parsed[2], parsed[-1]
    if data.is_embedded:
        raise ValueError("--dataset_name or --datasets is missing: nothing to look at")
    return shown, data, model, args, args if get_entry(named).online else None


def _first_examples(rows: Any, count: int | None) -> Dataset:
    """Examples to read, all in memory."""
    if isinstance(rows, IterableDataset):
        return Dataset.from_list(list(rows.take(count or STREAMED_EXAMPLES)), features=rows.features)
    return rows if count is None else rows.select(range(min(count, len(rows))))


def _say(console: Console, line: str | Text) -> None:
    # Lines are cut to the width where they are made; everything else may be as long as it is.
    console.print(Text(line) if isinstance(line, str) else line, soft_wrap=True)


def _described(tokenizer: Any) -> str:
    named = [
        f"{name} {token!r} ({number})" if token is not None else f"no {name}"
        for name, token, number in (
            ("bos", tokenizer.bos_token, tokenizer.bos_token_id),
            ("eos", tokenizer.eos_token, tokenizer.eos_token_id),
            ("pad", tokenizer.pad_token, tokenizer.pad_token_id),
        )
    ]
    template = "a chat template" if getattr(tokenizer, "chat_template", None) else "no chat template"
    return f"tokenizer: {len(tokenizer):,} tokens, {', '.join(named)}, {template}"


def _read(example: dict[str, Any]) -> list[Row]:
    return [Row(**fields) for fields in example["rows"]]


def _mask(row: Row) -> list[bool]:
    return [True] * len(row.completion_ids) if row.loss_mask is None else list(row.loss_mask)


def _share_prompt(rows: Sequence[Row]) -> bool:
    """Whether the rows are completions of one prompt; documents that are packed together have none in common."""
    return len(rows) > 1 and all(row.reward is not None for row in rows)


def _row_lines(example: dict[str, Any], run: RunData, tokenizer: Any, width: int, limit: int | None) -> Iterator[Text]:
    """Lines of an example; the first one is its heading."""
    rows = _read(example)
    tokens, trained = _count(rows)
    yield Text(f"{tokens} tokens, {trained} trained ({_percent(trained, tokens)})")
    shared = _share_prompt(rows)
    if shared:
        yield Text(f"  prompt, {len(rows[0].prompt_ids)} tokens, once for {len(rows)} completions")
        ids = rows[0].prompt_ids
        yield from token_lines(tokens_of(tokenizer, ids, [False] * len(ids)), width, limit)
    names = ("chosen", "rejected") if "chosen" in run.columns["train"] else ()
    for i, row in enumerate(rows):
        cut = ", cut at max_length" if row.truncated else ""
        if shared:
            name = names[i] if names else f"completion {i + 1}, reward {row.reward:g}"
            yield Text(f"  {name}, {len(row.completion_ids)} tokens{cut}")
        elif len(rows) > 1:
            yield Text(f"  document {i + 1}, {len(row.prompt_ids) + len(row.completion_ids)} tokens{cut}")
        elif cut:
            yield Text(f"  {cut[2:]}")
        prompt = [] if shared else list(row.prompt_ids)
        mask = [False] * len(prompt) + _mask(row)
        yield from token_lines(tokens_of(tokenizer, [*prompt, *row.completion_ids], mask), width, limit)


def _prompt_lines(example: dict[str, Any], tokenizer: Any, width: int, limit: int | None) -> Iterator[Text]:
    """Lines of a prompt and of what its rewards will read; the first one is its heading."""
    ids = example["prompt_ids"]
    yield Text(f"prompt of {len(ids)} tokens")
    yield from token_lines(tokens_of(tokenizer, ids, [False] * len(ids)), width, limit)
    for name, value in example.items():
        if name not in ("prompt", "prompt_ids"):
            yield Text(f"  {name}: {value!r}")


def _count(rows: Sequence[Row]) -> tuple[int, int]:
    """Tokens of an example, a shared prompt counted once, and how many of them train."""
    prompts = rows[:1] if _share_prompt(rows) else rows
    completions = sum(len(row.completion_ids) for row in rows)
    return sum(len(row.prompt_ids) for row in prompts) + completions, sum(sum(_mask(row)) for row in rows)


def _summary(examples: int, run: RunData, args: StrategyArguments, online: OnlineArguments | None) -> Iterator[str]:
    """Lines about all examples."""
    train = run.train
    assert train is not None
    dropped = run.dropped.get("train", {})
    yield f"Examples: {examples:,} read, {len(train):,} to train on, {sum(dropped.values()):,} left out"
    for reason, count in sorted(dropped.items(), key=lambda item: -item[1]):
        yield f"  left out, {reason}: {count:,}"
    if online is not None:
        lengths = [len(ids) for ids in train["prompt_ids"]]
        yield (
            f"Tokens: {sum(lengths):,} in prompts; {online.num_generations} completions of at most "
            f"{online.max_completion_length} tokens are sampled for each"
        )
        yield "Tokens of a prompt:"
    else:
        groups = [_read(example) for example in train]
        rows = [row for group in groups for row in group]
        lengths = [len(row.prompt_ids) + len(row.completion_ids) for row in rows]
        counts = [_count(group) for group in groups]
        tokens, trained = sum(count for count, _ in counts), sum(count for _, count in counts)
        yield f"Tokens: {tokens:,}, of which {trained:,} train ({_percent(trained, tokens)})"
        cut = sum(row.truncated for row in rows)
        yield f"Cut at max_length={args.max_length}: {cut:,} of {len(rows):,} rows"
        yield "Tokens of a row, prompt and completion:"
    ordered = sorted(lengths)
    within = ordered[math.ceil(0.95 * len(ordered)) - 1]
    yield (
        f"  shortest {ordered[0]:,}, median {ordered[(len(ordered) - 1) // 2]:,}, 95 % within {within:,}, longest "
        f"{ordered[-1]:,}"
    )
    for line in histogram(lengths):
        yield f"  {line}"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %"
