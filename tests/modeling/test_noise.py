"""Noise on embeddings: how much, on which rows, and when."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import make_model
from harness import CaptureGradients, build, difference, logged, policy, rows
from torch import Tensor

from hf_strategies import DPOConfig, DPOTrainer
from hf_strategies.batch import Batch, Row
from hf_strategies.modeling.forward import Forward


class SeeEmbeddings:
    """What goes into the first layer of a model, beside what its embeddings hold."""

    def __init__(self, model: Any) -> None:
        self.noise: list[Tensor] = []
        embeddings = model.get_input_embeddings()
        embeddings.register_forward_hook(self.raw)
        first = model.model.layers[0] if hasattr(model, "model") else model.transformer.drop
        first.register_forward_pre_hook(self.arrived)
        self.positions = None if hasattr(model, "model") else model.transformer.wpe
        if self.positions is not None:
            self.positions.register_forward_hook(self.placed)

    def raw(self, module: Any, args: Any, output: Tensor) -> None:
        self.clean = output

    def placed(self, module: Any, args: Any, output: Tensor) -> None:
        self.place = output

    def arrived(self, module: Any, args: Any) -> None:
        clean = self.clean if self.positions is None else self.clean + self.place
        self.noise.append((args[0] - clean).detach())


BATCH = Batch.from_rows(
    [Row([5, 6], [7, 8], group=0), Row([5], list(range(6, 29)), group=1), Row([9, 9, 9], [7], group=2)]
)
LENGTHS = (4, 24, 4)


@pytest.mark.parametrize("stream", [False, True], ids=["padded", "stream"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_bounds_are_those_of_each_row(kind: str, stream: bool) -> None:
    """alpha / sqrt(L d) with L of 4, 24 and 4 tokens and d = 32: 5 / sqrt(128) and 5 / sqrt(768)."""
    model = make_model(kind).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    seen = SeeEmbeddings(model)
    forward = Forward(model, stream=stream, fused_head=stream)
    forward.noise_alpha = 5.0
    torch.manual_seed(0)
    forward(model, BATCH)
    (noise,) = seen.noise
    parts = list(noise[0].split(LENGTHS)) if stream else [noise[i][BATCH.attention_mask[i]] for i in range(3)]
    for part, bound in zip(parts, (0.4419417, 0.1804220, 0.4419417), strict=True):
        assert part.numel() in (4 * 32, 24 * 32)
        assert 0.95 * bound < part.abs().max() <= bound + 1e-5
        # Uniform: mean 0, standard deviation bound / sqrt(3).
        assert part.mean().abs() < 0.15 * bound
        assert float(part.std()) == pytest.approx(bound / 3**0.5, rel=0.1)
    model.eval()
    forward(model, BATCH)
    assert seen.noise[1].abs().max() < 1e-6


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("name", ["sft", "seq"])
def test_on_in_training_and_off_in_evaluation(name: str, kind: str) -> None:
    captured: dict[Any, CaptureGradients] = {}
    trainers: dict[Any, Any] = {}
    for alpha in (None, 0.0, 5.0, "again"):
        captured[alpha] = CaptureGradients()
        trainers[alpha] = build(
            name,
            policy(kind),
            callbacks=[captured[alpha]],
            trainer={"eval_dataset": rows(name, 4)},
            eval_strategy="steps",
            eval_steps=1,
            neftune_noise_alpha=5.0 if alpha == "again" else alpha,
        )
        trainers[alpha].train()
    losses = {alpha: logged(trainer, "loss") for alpha, trainer in trainers.items()}
    assert losses[None] == losses[0.0] != losses[5.0] == losses["again"]
    assert difference(captured[5.0].steps[0], captured[None].steps[0]) > 1e-2
    evaluated = {a: [e["eval_loss"] for e in t.state.log_history if "eval_loss" in e] for a, t in trainers.items()}
    assert evaluated[5.0] == evaluated[None] != []
    assert not trainers[5.0].model.get_input_embeddings()._forward_hooks


def test_refused_where_it_cannot_be_right(tmp_path: Any) -> None:
    options = {"output_dir": str(tmp_path), "use_cpu": True}
    with pytest.raises(ValueError, match=r"^neftune_noise_alpha=5.0: allowed is None, strategy 'dpo' compares"):
        DPOTrainer("nowhere/nothing", None, DPOConfig(**options, neftune_noise_alpha=5.0), rows("dpo"))
    with pytest.raises(ValueError, match=r"^neftune_noise_alpha=-1.0: allowed is a number >= 0"):
        build("sft", neftune_noise_alpha=-1.0)
    with pytest.raises(ValueError, match=r"^low_memory=True does not work with neftune_noise_alpha"):
        build("sft", neftune_noise_alpha=1.0, low_memory=True)
