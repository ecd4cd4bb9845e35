"""Encoding a run's datasets before any weights are loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
from datasets import Dataset, IterableDataset

from hf_strategies.data.formats import ExampleEncoder, encode_dataset, encode_prompts
from hf_strategies.data.packing import SPLITTING
from hf_strategies.data.rows import Reading
from hf_strategies.data.streams import EncodedStream
from hf_strategies.strategies import Strategy
from hf_strategies.trainers.arguments import OnlineArguments, StrategyArguments, TextArguments, options_from

logger = logging.getLogger(__name__)

# Columns that TRL renders into the prompt and that are not read here.
UNREAD = ("image", "images")


@dataclass
class RunData:
    """Encoded datasets of a run.

    Attributes:
        train: encoded training data, a stream of it, or None.
        eval: encoded evaluation data, a dict of such, or None.
        longest: most tokens a row can have, prompt and completion.
        largest_id: largest token id of given rows.
        columns: dataset name -> columns of its raw data.
        dropped: dataset name -> reason -> examples left out.
        lost_tokens: dataset name -> tokens that would train, were they not cut off or their example not left out.
    """

    train: Any = None
    eval: Dataset | dict[str, Dataset] | None = None
    longest: int = 0
    largest_id: int = 0
    columns: dict[str, list[str]] = field(default_factory=dict)
    dropped: dict[str, dict[str, int]] = field(default_factory=dict)
    lost_tokens: dict[str, int] = field(default_factory=dict)


def prepare_data(
    train: Any,
    evaluation: Any,
    tokenizer: Any,
    strategy: Strategy,
    args: StrategyArguments,
    rollout_args: OnlineArguments | None,
    formatting_func: Callable[[dict[str, Any]], Any] | None = None,
) -> RunData:
    """Encode training and evaluation data for a strategy; with ``rollout_args`` the rows are prompts to roll out.

    ``formatting_func`` makes a text, messages, or a whole row of every raw row.

    Raises:
        TypeError: something that is no map-style dataset, or a row that is no dict.
        ValueError: an empty dataset, missing or mixed columns, a row that cannot be encoded (naming it), or training
            data that does not fill one batch or rollout.
    """
    data = RunData()
    reading = reading_of(strategy, args)

    def encode(name: str, raw: Any) -> Dataset:
        dataset = _as_dataset(name, raw)
        if formatting_func is not None:
            dataset = _formatted(name, dataset, formatting_func)
        data.columns[name] = dataset.column_names
        for column in sorted(set(UNREAD) & set(dataset.column_names)):
            logger.warning("%s dataset: the column %r does not go into the prompt", name, column)
        if rollout_args is not None:
            encoded, longest_prompt = encode_prompts(dataset, tokenizer, f"{name} dataset", reading)
            data.longest = max(data.longest, longest_prompt + rollout_args.max_completion_length)
            return encoded
        result = encode_dataset(
            dataset,
            tokenizer,
            args.max_length,
            min_rows=strategy.min_group_size,
            packing=_packing(strategy, args, evaluation=name != "train"),
            truncation_mode=args.truncation_mode,
            reading=reading,
            num_proc=args.dataset_num_proc,
            name=f"{name} dataset",
        )
        data.longest = max(data.longest, result.longest)
        data.largest_id = max(data.largest_id, result.largest_id)
        if result.dropped.total():
            data.dropped[name] = dict(result.dropped)
            logger.warning("%s dataset: left out %s", name, dict(result.dropped))
        if result.lost_tokens:
            data.lost_tokens[name] = result.lost_tokens
            logger.warning(
                "%s dataset: %d of %d tokens that would train are cut off or left out",
                name,
                result.lost_tokens,
                result.trained_tokens + result.lost_tokens,
            )
        return result.dataset

    if isinstance(train, IterableDataset):
        data.train = _encode_stream(train, tokenizer, strategy, args, rollout_args, formatting_func)
        data.columns["train"] = data.train.columns
    elif train is not None:
        data.train = encode("train", train)
    if isinstance(evaluation, dict):
        if not evaluation:
            raise ValueError("eval_dataset={}: allowed is a dataset, or a dict of at least one")
        data.eval = {name: encode(f"eval_{name}", raw) for name, raw in evaluation.items()}
    elif evaluation is not None:
        data.eval = encode("eval", evaluation)
    if isinstance(data.train, Dataset):
        if rollout_args is not None:
            check_one_rollout(data.train, rollout_args)
        else:
            check_one_batch(data.train, args)
    return data


def _encode_stream(
    rows: IterableDataset,
    tokenizer: Any,
    strategy: Strategy,
    args: StrategyArguments,
    rollout_args: OnlineArguments | None,
    formatting_func: Callable[[dict[str, Any]], Any] | None,
) -> EncodedStream:
    if rollout_args is not None:
        raise TypeError(
            "train dataset: got IterableDataset; the prompts of an online strategy are shuffled as a whole, allowed "
            "are a map-style datasets.Dataset or a list of dicts (list(stream.take(n)))"
        )
    if args.max_steps < 1:
        raise ValueError(f"max_steps={args.max_steps}: a streaming train dataset has no length, allowed is >= 1")
    if args.dataloader_num_workers:
        raise ValueError(
            f"dataloader_num_workers={args.dataloader_num_workers}: a streaming train dataset is read in order, "
            "allowed is 0"
        )
    packing = _packing(strategy, args, evaluation=False)
    if packing == "bfd_split" and isinstance(args, TextArguments) and args.packing_strategy is None:
        packing = "wrapped"  # fills every row without looking ahead
    encoder = ExampleEncoder.of(
        tokenizer,
        reading_of(strategy, args),
        args.max_length,
        args.truncation_mode,
        packing,
        strategy.min_group_size,
        "train dataset",
    )

    def prepared(example: dict[str, Any], number: int) -> dict[str, Any]:
        return example if formatting_func is None else _format("train", number, formatting_func, example)

    return EncodedStream(rows.with_format(None), encoder, packing, args.max_length, prepared)


def reading_of(strategy: Strategy, args: StrategyArguments) -> Reading:
    """How a run's rows become tokens."""
    chosen = options_from(args, Reading)
    if strategy.packed and chosen.completion_only_loss is None:
        chosen = replace(chosen, completion_only_loss=False)  # documents train as a whole
    return replace(chosen, scored=strategy.needs_rewards, chat_template_kwargs=chosen.chat_template_kwargs or {})


def _packing(strategy: Strategy, args: StrategyArguments, *, evaluation: bool) -> str | None:
    how = packing_of(strategy, args, evaluation=evaluation)
    if how in SPLITTING and args.truncation_mode == "keep_end":
        raise ValueError(
            "truncation_mode='keep_end' has no effect where long rows are cut into pieces: allowed are keep_start (no "
            "cut), drop and error; or packing_strategy='bfd'"
        )
    return how


def _formatted(name: str, dataset: Dataset, formatting_func: Callable[[dict[str, Any]], Any]) -> Dataset:
    return _from_list(name, [_format(name, i, formatting_func, example) for i, example in enumerate(dataset)])


def _format(name: str, number: int, formatting_func: Callable[..., Any], example: dict[str, Any]) -> dict[str, Any]:
    try:
        made = formatting_func(example)
    except Exception as error:
        raise ValueError(
            f"{name} dataset row {number}: formatting_func raised {type(error).__name__}: {error}"
        ) from error
    if isinstance(made, list):
        made = {"messages": made}
    elif isinstance(made, str):
        made = {"text": made}
    if not isinstance(made, dict):
        raise TypeError(
            f"{name} dataset row {number}: formatting_func returned {type(made).__name__}, allowed are a text, a list "
            "of messages, or a row (dict)"
        )
    return made


def packing_of(strategy: Strategy, args: StrategyArguments, *, evaluation: bool) -> str | None:
    """How a dataset of given texts is packed, as `encode_dataset` takes it; None for other datasets, too."""
    packed, how = strategy.packed and args.max_length is not None, None
    if isinstance(args, TextArguments):
        how = args.packing_strategy
        packed = packed if args.packing is None else args.packing
        if evaluation and args.eval_packing is not None:
            packed = args.eval_packing
    if packed:
        return how or ("bfd_split" if strategy.packed else "bfd")
    return "pieces" if strategy.packed else None


def check_one_rollout(dataset: Dataset, args: OnlineArguments) -> None:
    """Raise unless the dataset fills one rollout over all processes.

    Raises:
        ValueError: fewer prompts than a rollout takes.
    """
    needed = args.prompts_per_rollout * args.world_size
    if len(dataset) < needed:
        raise ValueError(
            f"the train dataset has {len(dataset)} prompts, one rollout takes {needed} "
            f"(per_device_train_batch_size={args.per_device_train_batch_size} * "
            f"steps_per_generation={args.resolved_steps_per_generation} / num_generations={args.num_generations}, "
            f"on {args.world_size} processes): add prompts or lower these"
        )


def check_one_batch(dataset: Dataset, args: StrategyArguments) -> None:
    """Raise where every batch would be dropped, and nothing trained.

    Raises:
        ValueError: fewer rows than a batch of all processes, with ``dataloader_drop_last``.
    """
    needed = args.per_device_train_batch_size * args.world_size
    if args.dataloader_drop_last and len(dataset) < needed:
        raise ValueError(
            f"dataloader_drop_last=True drops all {len(dataset)} rows of the train dataset: a batch takes {needed} "
            f"(per_device_train_batch_size={args.per_device_train_batch_size} on {args.world_size} processes)"
        )


def _as_dataset(name: str, raw: Any) -> Dataset:
    if isinstance(raw, list):
        raw = _from_list(name, raw)
    if not isinstance(raw, Dataset):
        also = ", or a datasets.IterableDataset" if name == "train" else ""
        raise TypeError(
            f"{name} dataset: got {type(raw).__name__}, allowed are a map-style datasets.Dataset or a list of dicts"
            f"{also}"
        )
    if len(raw) == 0:
        raise ValueError(f"the {name} dataset is empty")
    if raw.format["type"] == "custom":
        raise ValueError(f"{name} dataset: what with_transform makes is not kept; allowed are rows as map leaves them")
    return raw.with_format(None)  # rows as Python objects, whatever form they were last looked at in


def _from_list(name: str, rows: list[Any]) -> Dataset:
    """A dataset of all columns that any row has; `Dataset.from_list` would drop those that the first row lacks."""
    columns: dict[str, None] = {}
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise TypeError(f"{name} dataset row {number}: got {type(row).__name__}, allowed is a dict")
        columns |= dict.fromkeys(row)
    if rows and not columns:
        raise ValueError(f"the {name} dataset has no columns")
    try:
        return Dataset.from_list([{column: row.get(column) for column in columns} for row in rows])
    except (pa.ArrowException, UnicodeError, OverflowError):
        # Once more column by column, to name the one that does not fit together.
        for column in columns:
            try:
                Dataset.from_dict({column: [row.get(column) for row in rows]})
            except (pa.ArrowException, UnicodeError, OverflowError) as error:
                raise ValueError(
                    f"{name} dataset, column {column!r}: its values make no column of one type ({error})"
                ) from error
        raise
