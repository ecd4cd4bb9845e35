"""Metrics of one's own over predictions: the right tokens, in the usual layout, without the logits of a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from conftest import EOS, VOCAB
from harness import build, policy, rows
from test_token_losses import LargestLogits
from torch import Tensor
from transformers import EvalPrediction

from hf_strategies import SFTConfig
from hf_strategies.modeling import head as head_module

A, B, C = (VOCAB[letter] for letter in "abc")
# <prompt|completion> in ids, with the end-of-sequence token that a completion gets.
ROWS = [{"prompt": "ab", "completion": "c"}, {"prompt": "c", "completion": "abc"}]
TOKENS = [[A, B, C, EOS], [C, A, B, C, EOS]]
LABELS = [[-100, -100, C, EOS, -100], [-100, A, B, C, EOS]]
# A random model is never right: some steps on the rows that it is then evaluated on.
LEARNING = {"optim": "adamw_torch", "learning_rate": 2e-2, "num_train_epochs": 4}


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """As everybody writes it: predictions are about the next token, -100 does not count."""
    predicted, labels = prediction.predictions[:, :-1], prediction.label_ids[:, 1:]
    counted = labels != -100
    return {"accuracy": float((predicted == labels)[counted].mean()), "counted": int(counted.sum())}


def argmax(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.argmax(dim=-1)


def evaluated(name: str, kind: str = "llama", data: Any = None, **arguments: Any) -> Any:
    options = arguments.pop("options", {})
    arguments = {"eval_dataset": data if data is not None else rows(name, 8), **arguments}
    return build(name, policy(kind), trainer=arguments, **{"per_device_eval_batch_size": 3, **options})


def test_layout_by_hand() -> None:
    seen: list[Any] = []

    def look(prediction: EvalPrediction) -> dict[str, float]:
        seen.append(prediction)
        return {}

    trainer = evaluated("sft", data=ROWS, compute_metrics=look)
    trainer.evaluate()
    (prediction,) = seen
    assert prediction.label_ids.tolist() == LABELS
    with torch.no_grad():
        likeliest = [trainer.model.eval()(torch.tensor([ids])).logits[0].argmax(-1).tolist() for ids in TOKENS]
    assert prediction.predictions.tolist() == [
        [-100, likeliest[0][1], likeliest[0][2], -100, -100],
        [*likeliest[1][:4], -100],
    ]


@pytest.mark.parametrize("options", [{}, {"batch_eval_metrics": True}, {"attention_path": "padded"}])
@pytest.mark.parametrize("preprocess", [None, argmax])
@pytest.mark.parametrize(("name", "kind"), [("sft", "llama"), ("sft", "gpt2"), ("seq", "llama"), ("seq", "gpt2")])
def test_accuracy_is_the_one_that_is_logged(name: str, kind: str, preprocess: Any, options: dict[str, Any]) -> None:
    """Documents of a packed row stay apart; rows of unequal length over several batches."""
    counts: list[float] = []

    def metric(prediction: EvalPrediction, compute_result: bool = True) -> dict[str, float]:
        result = accuracy(EvalPrediction(np.asarray(prediction.predictions), np.asarray(prediction.label_ids)))
        counts.append(result["counted"])
        weighted.append(result["accuracy"] * result["counted"])
        return {"accuracy": sum(weighted) / sum(counts)}

    weighted: list[float] = []
    trainer = evaluated(
        name, kind, compute_metrics=metric, preprocess_logits_for_metrics=preprocess, options=LEARNING | options
    )
    trainer.train()
    metrics = trainer.evaluate()
    # 8 completions with their end, of 1 + (5 i + 2) % 7 letters; 8 documents of 2 + 3 times as many and their end.
    sizes = [1 + (5 * i + 2) % 7 for i in range(8)]
    assert sum(counts) == (sum(sizes) + 8 if name == "sft" else sum(2 + 3 * size for size in sizes))
    assert metrics["eval_accuracy"] == pytest.approx(metrics["eval_mean_token_accuracy"], abs=1e-6)
    assert 0 < metrics["eval_accuracy"] < 1
    plain = evaluated(name, kind, options=LEARNING | options)
    plain.train()
    assert metrics["eval_loss"] == plain.evaluate()["eval_loss"]


@pytest.mark.parametrize("path", ["stream", "padded"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_logits_of_an_example_at_a_time(kind: str, path: str) -> None:
    """``preprocess`` gets the model's logits before every trained token and zeros elsewhere; it may keep two."""
    seen: list[tuple[Tensor, Tensor]] = []

    def keep(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        seen.append((logits, labels))
        return logits.amax(dim=-1), logits.argmax(dim=-1)

    trainer = evaluated("sft", kind, ROWS, preprocess_logits_for_metrics=keep, options={"attention_path": path})
    output = trainer.predict(trainer.eval_dataset)
    assert output.label_ids.tolist() == LABELS
    assert [part.shape for part in output.predictions] == [(2, 5), (2, 5)]
    for (logits, labels), ids, expected_labels in zip(seen, TOKENS, LABELS, strict=True):
        assert logits.shape == (1, 5, len(VOCAB))
        assert labels.tolist() == [expected_labels]
        with torch.no_grad():
            expected = trainer.model.eval()(torch.tensor([ids])).logits[0]
        for position in range(5):
            trains = position < 4 and expected_labels[position + 1] != -100
            wanted = expected[position] if trains else torch.zeros(len(VOCAB))
            torch.testing.assert_close(logits[0, position], wanted, atol=1e-4, rtol=1e-4)


def test_logits_of_a_batch_never_exist() -> None:
    """Pitfall D-74: 8 rows of up to 9 trained tokens in one batch, and no more positions than one row has."""
    trainer = evaluated(
        "sft",
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=argmax,
        options={"per_device_eval_batch_size": 8},
    )
    trainer.evaluate()  # the first one compares paths
    batch = next(iter(trainer.get_eval_dataloader()))
    with pytest.MonkeyPatch.context() as patch, LargestLogits(trainer.model.config.hidden_size) as logits:
        patch.setattr(head_module, "POSITIONS_PER_CHUNK", 4)
        trainer.prediction_step(trainer.model, batch, prediction_loss_only=False)
    longest = int(batch["batch"].attention_mask.sum(dim=1).max())
    assert longest < 16 < int(batch["batch"].loss_mask.sum())
    assert logits.rows == longest


def test_an_example_that_trains_nothing() -> None:
    """Its labels are all -100; the others' are untouched."""
    batch = next(iter(evaluated("sft", data=ROWS).get_eval_dataloader()))["batch"]
    mask = batch.loss_mask.clone()
    mask[0] = False
    for preprocess in (None, argmax):
        trainer = evaluated("sft", data=ROWS, preprocess_logits_for_metrics=preprocess)
        inputs = {"batch": batch.replace(loss_mask=mask)}
        _, predictions, labels = trainer.prediction_step(trainer.model.eval(), inputs, prediction_loss_only=False)
        assert labels.tolist() == [[-100] * 5, LABELS[1]]
        assert predictions.shape == (2, 5)


def test_what_is_not_offered(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match=r"^include_for_metrics=\['inputs'\]: allowed is \['loss'\]"):
        SFTConfig(output_dir=str(tmp_path), use_cpu=True, include_for_metrics=["inputs"])
    assert evaluated("sft").predict(evaluated("sft").eval_dataset).predictions.shape[0] == 8
