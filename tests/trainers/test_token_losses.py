"""Losses over given tokens, through the trainer: what the optimizer gets is what plain logits would give it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import VOCAB
from harness import CaptureGradients, build, difference, gradients, logged, lora, policy, record
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_strategies import SeqConfig, SFTConfig
from hf_strategies.batch import Batch
from hf_strategies.modeling import head as head_module

LOSSES: dict[str, dict[str, Any]] = {
    "nll": {},
    "dft": {"loss_type": "dft"},
    "smoothed": {"label_smoothing_factor": 0.2},
}


def plain_loss(model: Any, batch: Batch, how: str) -> tuple[Tensor, float]:
    """Mean over trained tokens, from each row's logits alone, and the share of tokens that are likeliest."""
    token_losses, hits = [], []
    for i in range(batch.num_rows):
        prompt = batch.prompt_ids[i][batch.prompt_mask[i]]
        completion = batch.completion_ids[i][batch.completion_mask[i]]
        logits = model(input_ids=torch.cat([prompt, completion]).unsqueeze(0)).logits[0, len(prompt) - 1 : -1]
        smoothing = 0.2 if how == "smoothed" else 0.0
        losses = F.cross_entropy(logits, completion, reduction="none", label_smoothing=smoothing)
        if how == "dft":
            losses = losses * logits.softmax(-1).gather(1, completion.unsqueeze(1)).squeeze(1).detach()
        token_losses.append(losses)
        hits.append(logits.argmax(-1) == completion)
    return torch.cat(token_losses).mean(), float(torch.cat(hits).float().mean())


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("how", LOSSES)
@pytest.mark.parametrize("name", ["sft", "seq"])
def test_gradient_is_that_of_plain_logits(name: str, how: str, adapter: bool, kind: str) -> None:
    """Pitfall D-72: ``label_smoothing_factor`` acts once, though Trainer has a smoother of its own."""
    captured = CaptureGradients()
    trainer = build(name, policy(kind, adapter), callbacks=[captured], **LOSSES[how])
    assert trainer.label_smoother is None
    calls = record(trainer)
    trainer.train()
    ((_, batch),) = calls
    model = policy(kind, adapter)
    loss, accuracy = plain_loss(model, batch, how)
    loss.backward()
    assert logged(trainer, "loss")[0] == pytest.approx(loss.item(), rel=1e-5)
    assert logged(trainer, "mean_token_accuracy")[0] == pytest.approx(accuracy, abs=1e-6)
    assert difference(captured.steps[0], gradients(model)) < 1e-5


@pytest.mark.parametrize("config", [SFTConfig, SeqConfig])
def test_both_names_of_the_smoothing(config: Any, tmp_path: Any) -> None:
    options = {"output_dir": str(tmp_path), "use_cpu": True}
    for given in ({"label_smoothing_factor": 0.3}, {"label_smoothing": 0.3}):
        args = config(**options, **given)
        assert (args.label_smoothing, args.label_smoothing_factor) == (0.3, 0.0)
    assert config(**options, label_smoothing_factor=0.3, label_smoothing=0.3).label_smoothing == 0.3
    with pytest.raises(
        ValueError, match=r"^label_smoothing_factor=0.3 and label_smoothing=0.1 are names of one option: give one"
    ):
        config(**options, label_smoothing_factor=0.3, label_smoothing=0.1)
    with pytest.raises(ValueError, match=r"^label_smoothing=1.5: allowed is a number >= 0.0 and < 1.0"):
        config(**options, label_smoothing_factor=1.5)


class LargestLogits(TorchDispatchMode):
    """Most positions of any tensor of logits; a head's weight [V, E] and its gradient may come transposed."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.transposed = (hidden_size, len(VOCAB))
        self.rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor) and tensor.shape[-1:] == (len(VOCAB),) and tensor.shape != self.transposed:
                self.rows = max(self.rows, tensor.numel() // len(VOCAB))
        return result


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("how", LOSSES)
def test_logits_of_a_chunk_at_a_time(how: str, adapter: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pitfall D-74: forward and backward pass over more than 32 trained tokens hold 4 positions of logits at most."""
    monkeypatch.setattr(head_module, "POSITIONS_PER_CHUNK", 4)
    model = policy("llama")
    if adapter:
        model = lora(model, target_modules=["q_proj", "v_proj"])
    trainer = build("sft", model, **LOSSES[how])
    inputs, items = trainer.get_batch_samples(iter(trainer.get_train_dataloader()), 1, trainer.args.device)
    batch = inputs[0]["pieces"][0]["batch"]
    assert int(batch.loss_mask.sum()) > 32
    trainer.model.train()
    with LargestLogits(model.config.hidden_size) as seen:
        loss = trainer.compute_loss(trainer.model, {"batch": batch}, num_items_in_batch=items)
        loss.backward()
    assert seen.rows == 4
