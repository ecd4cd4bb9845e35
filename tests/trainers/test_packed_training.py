"""Packed rows train what their texts train apart: losses, gradients, tokens, evaluation."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from harness import build, difference, logged, policy, record, rows, run, scored_alone

from hf_strategies.batch import Batch
from hf_strategies.modeling.forward import Forward
from hf_strategies.trainers import StrategyTrainer

PACKED = {"packing": True, "max_length": 64}


def trained(batch: Batch) -> Counter[tuple[int, ...]]:
    """Trained tokens, each with the token before it in its document: in these corpora that says which one it is."""
    found: Counter[tuple[int, ...]] = Counter()
    for i in range(batch.num_rows):
        ids = [*batch.prompt_ids[i][batch.prompt_mask[i]].tolist(), *batch.completion_ids[i].tolist()]
        first = int(batch.prompt_mask[i].sum())
        found.update(
            tuple(ids[first + j - 1 : first + j + 1]) for j in batch.loss_mask[i].nonzero().flatten().tolist()
        )
    return found


@pytest.mark.parametrize("path", ["stream", "padded"])
@pytest.mark.parametrize("packing_strategy", ["bfd", "bfd_split", "wrapped"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("name", ["sft", "seq"])
def test_packed_is_separate(name: str, kind: str, packing_strategy: str, path: str) -> None:
    """Pitfall D-69: 8 texts in one or several rows of 512 tokens, two of them in a micro-batch."""
    apart, expected = run(name, policy(kind), packing=False, max_length=None)
    options = {"packing": True, "packing_strategy": packing_strategy, "max_length": 512}
    together, got = run(name, policy(kind), attention_path=path, **options)
    assert len(together.train_dataset) == 1 < len(apart.train_dataset) == 8
    assert logged(together, "loss") == pytest.approx(logged(apart, "loss"), rel=1e-5)
    assert difference(got.steps[0], expected.steps[0]) < 1e-5
    if packing_strategy == "bfd":
        options["max_length"] = 24  # the longest document and its end
        together, got = run(
            name,
            policy(kind),
            attention_path=path,
            **options,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=8,
        )
        assert 1 < len(together.train_dataset) < 8
        assert together.lost_tokens == {}
        assert logged(together, "loss") == pytest.approx(logged(apart, "loss"), rel=1e-5)
        assert difference(got.steps[0], expected.steps[0]) < 1e-5


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_packed_scores_are_those_of_rows_alone(kind: str) -> None:
    """Log-probabilities of every text of a packed row against the model's own forward of that text."""
    trainer = build("seq", policy(kind), packing_strategy="wrapped", max_length=16)
    calls = record(trainer)
    trainer.train()
    (logprobs, batch), *_ = calls
    assert batch.num_rows > len(set(batch.group.tolist())) > 1
    for i, expected in enumerate(scored_alone(trainer.model.eval(), batch)):
        torch.testing.assert_close(logprobs[i][batch.completion_mask[i]], expected, atol=1e-5, rtol=1e-5)


CORPUS = {
    "seq": [{"input_ids": list(range(6 + i, 6 + i + length))} for i, length in enumerate((2, 40, 9, 17, 5, 30, 12))],
    "sft": [
        {"prompt": "abcdefghijklmnopqrstu"[: 1 + 4 * i], "completion": "vwxyz0123456789"[i : 3 * i + 2]}
        for i in range(6)
    ],
}


def tokens_of_a_run(name: str, **options: Any) -> tuple[Counter[tuple[int, ...]], StrategyTrainer]:
    trainer = build(name, data=CORPUS[name], per_device_train_batch_size=2, **options)
    calls = record(trainer)
    trainer.train()
    found: Counter[tuple[int, ...]] = Counter()
    for _, batch in calls:
        found += trained(batch)
    return found, trainer


@pytest.mark.parametrize("name", ["sft", "seq"])
def test_the_same_tokens_however_packed(name: str) -> None:
    """Rows of 10 tokens: pieces lose nothing, and what bfd cuts off is counted."""
    expected, _ = tokens_of_a_run(name, packing=False, max_length=None)
    for packing_strategy in ("bfd_split", "wrapped"):
        got, trainer = tokens_of_a_run(name, packing=True, packing_strategy=packing_strategy, max_length=10)
        assert got == expected
        assert trainer.lost_tokens == {}
    got, trainer = tokens_of_a_run(name, packing=True, packing_strategy="bfd", max_length=10)
    lost = (expected - got).total()
    assert got - expected == Counter()
    assert trainer.lost_tokens == {"train": lost}
    assert 0 < lost < expected.total()


@pytest.mark.parametrize("name", ["sft", "seq"])
def test_evaluation_is_packed_as_asked(name: str) -> None:
    """However it is packed, the loss is the same; unset, it is packed as the training data."""
    sizes, losses = {}, []
    for packing, eval_packing in ((True, None), (True, False), (False, None), (False, True)):
        trainer = build(
            name,
            packing=packing,
            eval_packing=eval_packing,
            max_length=64,
            trainer={"eval_dataset": rows(name, 6)},
        )
        sizes[packing, eval_packing] = len(trainer.train_dataset), len(trainer.eval_dataset)
        losses.append(trainer.evaluate()["eval_loss"])
    packed = sizes[True, None]
    assert packed[0] < 8
    assert packed[1] < 6
    assert sizes[True, False] == (packed[0], 6)
    assert sizes[False, None] == (8, 6)
    assert sizes[False, True] == (8, packed[1])
    assert losses == pytest.approx(losses[:1] * 4, rel=1e-5)


def test_what_is_packed_by_default() -> None:
    assert len(build("seq", max_length=64).train_dataset) < 8
    assert len(build("sft", max_length=64).train_dataset) == 8
    # Long documents are cut into pieces all the same.
    long = build("seq", data=[{"input_ids": list(range(6, 26))}], max_length=8, packing=False)
    assert [len(example["rows"]) for example in long.train_dataset] == [1, 1, 1]


@pytest.mark.parametrize("name", ["sft", "seq"])
def test_options(name: str) -> None:
    def refused(message: str, **options: Any) -> None:
        with pytest.raises(ValueError, match=message):
            build(name, "nowhere/nothing", **options)

    refused(r"^packing=True needs a max_length", packing=True, max_length=None)
    refused(r"^eval_packing=True needs a max_length", eval_packing=True, max_length=None)
    refused(r"^packing_strategy='ffd': allowed are 'bfd', 'bfd_split', 'wrapped'$", packing_strategy="ffd")
    refused(r"^packing_strategy='bfd' has no effect with packing=False", packing_strategy="bfd", packing=False)
    refused(r"^padding_free=True and attention_path='padded' contr", padding_free=True, attention_path="padded")
    refused(r"^padding_free=False and attention_path='stream' contr", padding_free=False, attention_path="stream")


@pytest.mark.parametrize("name", ["sft", "seq"])
def test_padding_free(name: str) -> None:
    """Unset and True give the stream, False the rectangle; the numbers are the same."""
    results = {value: run(name, padding_free=value, max_length=24) for value in (None, True, False)}
    streams = {value: trainer.forward_pass.stream for value, (trainer, _) in results.items()}
    assert streams == {None: True, True: True, False: False}
    for trainer, captured in results.values():
        assert difference(captured.steps[0], results[None][1].steps[0]) < 1e-5
        assert isinstance(trainer.forward_pass, Forward)
    sharing = {value: logged(trainer, "stream/sharing_factor")[0] for value, (trainer, _) in results.items()}
    assert sharing[False] == 1.0 < sharing[True] == sharing[None]


def test_a_model_that_cannot_do_without_padding() -> None:
    """Asked for, it is an error; unset, rows are padded."""
    model = policy("gpt2", attn_pdrop=0.1)
    assert not build("sft", model, disable_dropout=False).forward_pass.stream
    with pytest.raises(ValueError, match=r"^attention_path='stream': GPT2LMHeadModel needs the padded path"):
        build("sft", policy("gpt2", attn_pdrop=0.1), disable_dropout=False, padding_free=True)
