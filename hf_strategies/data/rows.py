"""Dataset rows in TRL's shapes -> training rows in token ids.

The columns decide; a strategy that learns from rewards reads the scored shapes, any other one the plain ones:

    prompt, chosen, rejected        a pair: two rows of one prompt, chosen first, rewards 1 and 0
    prompt, completions, rewards    a scored group (optionally old_logprobs, one list per completion)
    chosen, rejected                a pair whose prompt is what both begin with; also where a text column ``prompt``
                                    repeats the first turn of two conversations
    prompt_ids, chosen_ids, rejected_ids    a pair in token ids; prompt_input_ids and so on are the same

    input_ids                       a document in token ids; with labels (-100 where a token does not train),
                                    completion_mask or assistant_masks (1 where it does), attention_mask (0: padding)
    prompt, completion              the completion trains, unless ``completion_only_loss`` says otherwise
    messages                        a conversation (also ``conversations``, with from and value); all of it trains, or
                                    with ``assistant_only_loss`` what the assistant wrote
    text                            a document, all of it trains; `Reading.text_field` is the column's name
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any, NamedTuple

from hf_strategies.batch import Row
from hf_strategies.data.answers import encode_completion, generation_prompt_length
from hf_strategies.data.chat import (
    as_messages,
    check_messages,
    check_text,
    described,
    is_conversation,
    normalised,
    template_arguments,
)
from hf_strategies.data.encoding import Encoder
from hf_strategies.data.masks import assistant_tokens
from hf_strategies.data.scored import read_group, read_pair

PAIR_IDS = ("prompt_ids", "chosen_ids", "rejected_ids")
SCORED_SHAPES: tuple[tuple[str, ...], ...] = (
    PAIR_IDS,
    ("prompt_input_ids", "chosen_input_ids", "rejected_input_ids"),
    ("prompt", "chosen", "rejected"),
    ("prompt", "completions", "rewards"),
    ("chosen", "rejected"),
)
PLAIN_SHAPES: tuple[tuple[str, ...], ...] = (
    ("input_ids",),
    ("prompt", "completion"),
    ("messages",),
    ("text",),
)
MASKS = ("labels", "completion_mask", "assistant_masks")
# What it marks with 0 is left out.
PADDING = "attention_mask"
IGNORED_LABEL = -100


@dataclass(frozen=True)
class Reading:
    """How rows become tokens.

    Attributes:
        scored: whether rows must carry rewards (else they must not); None takes either.
        completion_only_loss: of prompt and completion the completion alone trains; None: as True. True demands rows
            that have a completion.
        assistant_only_loss: of messages the assistant's turns alone train.
        plain_text: see `Encoder`.
        dataset_text_field: name of the column that takes the place of ``text``.
        chat_template_kwargs: arguments of the chat template for all rows; a row's own ones go before them.
        header: also find the end of the prompt that a cut must keep, see `Example`.
    """

    scored: bool | None = None
    completion_only_loss: bool | None = None
    assistant_only_loss: bool = False
    plain_text: bool = False
    dataset_text_field: str = "text"
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    header: bool = False

    def encoder(self, tokenizer: Any, example: dict[str, Any]) -> Encoder:
        """The tokenizer with what the chat template is given for a row."""
        encoder = Encoder(tokenizer, self.chat_template_kwargs, self.plain_text)
        own = template_arguments(example)
        return replace(encoder, template_kwargs={**self.chat_template_kwargs, **encoder.protected(own)})


class Example(NamedTuple):
    """A dataset row in token ids.

    Attributes:
        rows: its rows.
        header: tokens at the end of the prompt that open the answer; None for documents, which may be cut anywhere.
    """

    rows: list[Row]
    header: int | None = None


def shape_of(columns: list[str], scored: bool | None = None) -> tuple[str, ...]:
    """The first known shape whose columns are all there.

    Args:
        columns: columns that hold something.
        scored: whether the rows must carry rewards (else they must not); None takes either.

    Raises:
        ValueError: none is; the message lists columns and shapes.
    """
    known = {None: SCORED_SHAPES + PLAIN_SHAPES, True: SCORED_SHAPES, False: PLAIN_SHAPES}[scored]
    for shape in known:
        if set(shape) <= set(columns):
            return shape
    # Rows in token ids go first where they are there, and are what fewest people look for.
    shapes = "; ".join(", ".join(shape) for shape in sorted(known, key=lambda shape: shape[-1].endswith("_ids")))
    prompts = scored and "prompt" in columns and not {"chosen", "completions"} & set(columns)
    hint = " (prompts alone are for an online strategy, with reward_funcs)" if prompts else ""
    raise ValueError(f"the dataset has columns {sorted(columns)}; one of these sets is needed: {shapes}{hint}")


def columns_read(columns: list[str], reading: Reading) -> list[str]:
    """Columns under the names they are read by; a text field that was chosen is read, whatever else there is.

    Raises:
        ValueError: the text field is no column.
    """
    field = reading.dataset_text_field
    if field == "text":
        return ["messages" if column == "conversations" else column for column in columns]
    if field not in columns:
        raise ValueError(f"dataset_text_field={field!r}: the dataset has columns {sorted(columns)}")
    return ["text"]


def read_example(example: dict[str, Any], tokenizer: Any, reading: Reading | None = None) -> Example:
    """Token rows of one dataset row.

    Args:
        example: the dataset row; it stays as it is.
        tokenizer: the model's tokenizer.
        reading: options.

    Raises:
        ValueError: the row's columns do not fit together (lengths of a scored group, a prompt that is no prefix, ...)
            or an option has nothing to act on.
    """
    reading = reading or Reading()
    example = _renamed(normalised(example), reading.dataset_text_field)
    shape = _shape_of_row(example, reading.scored)
    encoder = reading.encoder(tokenizer, example)
    if "chosen" in shape:
        prompt, rows = read_pair(example, encoder, has_prompt="prompt" in shape)
    elif "completions" in shape:
        prompt, rows = example["prompt"], read_group(example, encoder)
    elif len(shape) == len(PAIR_IDS):
        prompt, chosen, rejected = (_check_ids(example[name], name) for name in shape)
        rows = [Row(prompt, chosen, reward=1.0), Row(prompt, rejected, reward=0.0)]
        return Example(rows, 1)
    elif "completion" in shape:
        return _read_completion(example, encoder, reading)
    else:
        return Example(_read_document(example, shape[0], encoder, reading))
    header = generation_prompt_length(encoder, prompt, list(rows[0].prompt_ids)) if reading.header and rows else 1
    return Example(rows, header)


def _renamed(example: dict[str, Any], text_field: str) -> dict[str, Any]:
    return example if text_field == "text" else {"text": example.get(text_field)}


def _shape_of_row(example: dict[str, Any], scored: bool | None) -> tuple[str, ...]:
    present = [name for name, value in example.items() if value is not None]
    try:
        return shape_of(present, scored)
    except ValueError:
        if len(present) < len(example):
            shape = shape_of(list(example), scored)  # what the dataset has, if the row had it too
            raise ValueError(
                f"one of {', '.join(shape)} is missing: the row has columns {described(example)}; all of them are "
                "needed"
            ) from None
        raise


def _read_completion(example: dict[str, Any], encoder: Encoder, reading: Reading) -> Example:
    prompt, completion = example["prompt"], example["completion"]
    prompt_ids, ids = encode_completion(encoder, prompt, encoder.prompt(prompt), completion)
    mask = None
    if reading.assistant_only_loss:
        if not is_conversation(prompt):
            raise ValueError("assistant_only_loss=True needs messages; prompt and completion are texts")
        whole, trains = assistant_tokens(encoder, prompt + as_messages(completion, "assistant"))
        if whole[: len(prompt_ids)] != prompt_ids:  # cannot be: both are the same template's
            raise ValueError("assistant_only_loss=True: the chat template renders the prompt in two ways")
        if reading.completion_only_loss is False:
            return Example([masked_row(whole, trains)] if whole else [])
        mask = trains[len(prompt_ids) : len(prompt_ids) + len(ids)]
    elif reading.completion_only_loss is False:
        return Example([document_row([*prompt_ids, *ids])])
    header = generation_prompt_length(encoder, prompt, prompt_ids) if reading.header else 1
    return Example([Row(prompt_ids, ids, None if mask is None or all(mask) else mask)], header)


def _read_document(example: dict[str, Any], column: str, encoder: Encoder, reading: Reading) -> list[Row]:
    if reading.completion_only_loss and not (column == "input_ids" and example.get("completion_mask") is not None):
        raise ValueError(f"completion_only_loss=True needs prompt and completion; the row has {described(example)}")
    masked = column == "input_ids" and "assistant_masks" in example
    if reading.assistant_only_loss and column != "messages" and not masked:
        raise ValueError(
            f"assistant_only_loss=True needs messages, or input_ids with assistant_masks; the row has "
            f"{described(example)}"
        )
    if column == "input_ids":
        return _read_ids(example, reading)
    if column == "messages":
        check_messages(example["messages"], "messages")
        if reading.assistant_only_loss:
            ids, mask = assistant_tokens(encoder, example["messages"])
            return [masked_row(ids, mask)] if ids else []
        ids = encoder.conversation(example["messages"], generation_prompt=False)
    else:
        check_text(example["text"], "text")
        ids = encoder.with_eos(encoder.text(example["text"]))
    return [document_row(ids)] if ids else []


def _read_ids(example: dict[str, Any], reading: Reading) -> list[Row]:
    masks = [name for name in MASKS if name != "completion_mask" or reading.completion_only_loss is not False]
    ids = _check_ids(example["input_ids"], "input_ids")
    trains = [True] * len(ids)
    real = list(trains)
    for name in (*masks, PADDING):
        if name not in example:
            continue
        values = example[name]
        if not isinstance(values, list) or len(values) != len(ids):
            size = len(values) if isinstance(values, list) else repr(values)
            raise ValueError(f"{name} has {size} entries for {len(ids)} input_ids")
        for i, value in enumerate(values):
            if name == "labels" and value not in (IGNORED_LABEL, ids[i]):
                raise ValueError(
                    f"labels[{i}]={value!r}: allowed are {IGNORED_LABEL} and the token itself, {ids[i]} (labels are "
                    "shifted in the loss)"
                )
            if name != "labels" and value not in (0, 1):
                raise ValueError(f"{name}[{i}]={value!r}: allowed are 0 and 1")
        if name == PADDING:
            real = [bool(value) for value in values]
            continue
        flags = [value != IGNORED_LABEL if name == "labels" else bool(value) for value in values]
        trains = [a and b for a, b in zip(trains, flags, strict=True)]
    ids, trains = list(compress(ids, real)), list(compress(trains, real))
    return [masked_row(ids, trains)] if ids else []


def _check_ids(ids: Any, name: str) -> list[int]:
    if not isinstance(ids, list):
        raise ValueError(f"{name}={ids!r}: allowed is a list of token ids")
    if set(map(type, ids)) - {int} or min(ids, default=0) < 0:
        i = next(i for i, token in enumerate(ids) if type(token) is not int or token < 0)
        raise ValueError(f"{name}[{i}]={ids[i]!r}: allowed is a whole number >= 0")
    return ids


def document_row(token_ids: list[int]) -> Row:
    """A document as a row: its first token has nothing to be predicted from, every other one trains."""
    return Row(token_ids[:1], token_ids[1:])


def masked_row(token_ids: list[int], trains: list[bool]) -> Row:
    """A document of which some tokens train, as a row that begins to train where it can first."""
    first = next((i for i, flag in enumerate(trains) if flag and i > 0), 1)
    mask = trains[first:]
    return Row(token_ids[:first], token_ids[first:], None if all(mask) else mask)
