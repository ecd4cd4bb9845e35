"""Training on streams: the rows, packing, counts and resume."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import EOS, VOCAB, make_model, make_tokenizer
from datasets import Dataset, IterableDataset

from hf_strategies import DPOConfig, DPOTrainer, SeqConfig, SeqTrainer, SFTConfig, SFTTrainer
from hf_strategies.data import streams
from hf_strategies.data.formats import ExampleEncoder, encode_dataset
from hf_strategies.data.rows import Reading
from hf_strategies.data.streams import EncodedStream

TEXTS = ["abcdefghij", "ab", "", "abc", "klmnopq", "a", "rstuv"]


def stream(rows: list[dict[str, Any]]) -> IterableDataset:
    def read() -> Iterator[dict[str, Any]]:
        yield from rows

    return IterableDataset.from_generator(read)


def encoded(rows: list[dict[str, Any]], packing: str | None, max_length: int | None) -> EncodedStream:
    encoder = ExampleEncoder(make_tokenizer(), Reading(scored=False), None if packing else max_length)
    return EncodedStream(stream(rows), encoder, packing, max_length)


def config(kind: Any, folder: Path, **changes: Any) -> Any:
    values = {
        "output_dir": str(folder),
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "max_steps": 6,
        "logging_steps": 1,
        "save_steps": 3,
        "learning_rate": 1e-2,
        "report_to": [],
        "disable_tqdm": True,
        "max_length": 6,
    }
    return kind(**values | changes)


@pytest.mark.parametrize("packing", [None, "bfd_split", "wrapped"])
def test_a_pass_has_the_rows_of_the_dataset(packing: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass trains the same tokens as the dataset in memory; then the next one begins."""
    monkeypatch.setattr(streams, "BUFFER_SIZE", len(TEXTS) - 1)  # the empty one is left out
    rows = [{"text": text} for text in TEXTS]
    data = encode_dataset(Dataset.from_list(rows), make_tokenizer(), 6, packing=packing, reading=Reading(scored=False))
    whole = encoded(rows, packing, 6)
    size = data.trained_tokens
    trained: list[int] = []
    for example in whole:
        trained += [token for row in example["rows"] for token in row["completion_ids"]]
        if len(trained) >= 2 * size:
            break
    if packing is None:
        assert [e["rows"] for e in islice(whole, len(data.dataset))] == [e["rows"] for e in data.dataset]
    expected = sorted(token for e in data.dataset for row in e["rows"] for token in row["completion_ids"])
    assert sorted(trained[:size]) == sorted(trained[size : 2 * size]) == expected


def test_wrapped_rows_are_full() -> None:
    """Lengths of packed rows of a stream, cut where each is full, and documents that begin where the last one ends."""
    rows = [{"text": "abcdefghij"}, {"text": "ab"}]
    first, second, third = ([*e["rows"]] for e in islice(encoded(rows, "wrapped", 6), 3))
    assert [[*r["prompt_ids"], *r["completion_ids"]] for r in first] == [[VOCAB[c] for c in "abcdef"]]
    assert [[*r["prompt_ids"], *r["completion_ids"]] for r in second] == [[*(VOCAB[c] for c in "fghij"), EOS]]
    a, b = VOCAB["a"], VOCAB["b"]
    assert [[*r["prompt_ids"], *r["completion_ids"]] for r in third] == [[a, b, EOS], [a, b, VOCAB["c"]]]


def test_the_last_step_of_resume_is_that_of_the_whole_run(tmp_path: Path) -> None:
    """Pitfall F-89: resumed in the middle of a stream, several passes in, rows packed across examples."""
    rows = [{"text": text} for text in TEXTS]

    def run(folder: Path, resume: bool) -> tuple[list[float], dict[str, torch.Tensor], Any]:
        trainer = SeqTrainer(make_model(), config(SeqConfig, folder), stream(rows), processing_class=make_tokenizer())
        assert trainer.train_dataset.packing == "wrapped"
        trainer.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3") if resume else None)
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return losses, {k: v.detach().clone() for k, v in trainer.model.state_dict().items()}, trainer

    losses, weights, trainer = run(tmp_path / "whole", False)
    again, resumed, later = run(tmp_path / "again", True)
    assert losses == again
    assert len(losses) == 6
    for name, value in weights.items():
        torch.testing.assert_close(resumed[name], value, rtol=0, atol=0)
    assert trainer.num_tokens == later.num_tokens
    assert trainer.dropped == later.dropped == {}
    assert trainer.train_dataset.dropped == later.train_dataset.dropped


def test_stream_and_dataset_train_the_same(tmp_path: Path) -> None:
    """sft and dpo: the same steps as the dataset read in order; what is left out is counted while training."""
    pairs = [{"prompt": "a", "chosen": "bcd"[: i % 3 + 1], "rejected": "ef"} for i in range(12)]
    for trainer_class, kind, rows in (
        (SFTTrainer, SFTConfig, [{"text": "abcd"[: i % 3 + 2]} for i in range(12)]),
        (DPOTrainer, DPOConfig, pairs),
    ):
        losses = []
        for data in (
            rows,
            stream([*rows[:1], {name: "" if name == "text" else "abcdef" for name in rows[0]}, *rows[1:]]),
        ):
            args = config(kind, tmp_path / "out", train_sampling_strategy="sequential")
            trainer = trainer_class(make_model(), args=args, train_dataset=data, processing_class=make_tokenizer())
            trainer.train()
            losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
            if data is not rows:
                (reason,) = trainer.train_dataset.dropped
                assert trainer.state.log_history[2][f"rows_dropped/{reason}"] == 1
        assert losses[0] == pytest.approx(losses[1], abs=1e-6)


@pytest.mark.parametrize(
    ("rows", "changes", "error", "message"),
    [
        ([], {}, ValueError, "the train dataset is empty"),
        ([{"text": "ab"}], {"max_steps": -1}, ValueError, "max_steps=-1: a streaming train dataset has no length"),
        (
            [{"text": "ab"}],
            {"dataloader_num_workers": 1},
            ValueError,
            "dataloader_num_workers=1: a streaming train da",
        ),
        ([{"question": "ab"}], {}, ValueError, r"columns \['question'\]; one of these sets is needed"),
        ([{"text": 5}], {}, ValueError, "train dataset row 0: text=5: allowed is a text"),
    ],
)
def test_bad_streams(
    rows: list[dict[str, Any]], changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    """Found before a model is loaded."""
    with pytest.raises(error, match=message):
        SFTTrainer(
            make_model(), config(SFTConfig, tmp_path, **changes), stream(rows), processing_class=make_tokenizer()
        )


def test_recorded_logprobs_in_all_rows_or_none() -> None:
    group = {"prompt": "a", "completions": ["b", "c"], "rewards": [1.0, 0.0]}
    rows = [{**group, "old_logprobs": [[-1.0] * 2] * 2}, {**group, "old_logprobs": None}]
    encoder = ExampleEncoder(make_tokenizer(), Reading(scored=True), min_rows=2)
    with pytest.raises(ValueError, match="train row 1: old_logprobs is given in some rows: give it in all of them"):
        list(islice(EncodedStream(stream(rows), replace(encoder, name="train"), None, None), 2))


def test_later_rows_are_checked_as_they_come(tmp_path: Path) -> None:
    """A row that is wrong is named; so is a token that the model does not have; a pass without a row never ends."""
    good = [{"input_ids": [6, 7, 8]}] * 4
    for bad, message in (
        ({"input_ids": [6, 100000]}, "a row holds the token id 100000"),
        ({"input_ids": [6, -1]}, r"train dataset row 4: input_ids\[1\]=-1"),
    ):
        trainer = SFTTrainer(
            make_model(), config(SFTConfig, tmp_path), stream([*good, bad]), processing_class=make_tokenizer()
        )
        with pytest.raises(ValueError, match=message):
            trainer.train()
    nothing = SFTTrainer(
        make_model(), config(SFTConfig, tmp_path), stream([{"input_ids": [6]}] * 2), processing_class=make_tokenizer()
    )
    with pytest.raises(ValueError, match=r"no row of the train dataset can train \(2 rows, dropped: \{'empty_comp"):
        nothing.train()
