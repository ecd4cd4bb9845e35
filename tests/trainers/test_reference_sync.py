"""A reference that follows the policy (TR-DPO, arXiv 2404.09656)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import build, logged, lora, needs, policy, rows, weights
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from test_resume import assert_resumes
from torch import Tensor
from transformers import TrainerCallback

from hf_strategies.modeling.reference import FrozenAdapter, FrozenModel

ALPHA, EVERY = 0.6, 2
OPTIONS: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "max_steps": 7,
    "num_train_epochs": 7,
    "learning_rate": 0.05,
    "sync_ref_model": True,
    "ref_model_mixup_alpha": ALPHA,
    "ref_model_sync_steps": EVERY,
}


def products(model: Any, adapter: str) -> dict[str, Tensor]:
    """What an adapter adds to each weight."""
    return {
        name: module.scaling[adapter] * module.lora_B[adapter].weight @ module.lora_A[adapter].weight
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer)
    }


class Snapshots(TrainerCallback):
    """Of the policy, after every optimizer step."""

    def __init__(self, of: Any) -> None:
        self.of = of
        self.taken: list[dict[str, Tensor]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.taken.append({name: value.detach().clone() for name, value in self.of(model).items()})


def mixed(start: dict[str, Tensor], taken: list[dict[str, Tensor]], alpha: float) -> dict[str, Tensor]:
    """By hand: alpha times the policy after steps 2, 4 and 6, the rest from before."""
    now = {name: value.detach().clone() for name, value in start.items()}
    for snapshot in taken[EVERY - 1 :: EVERY]:
        now = {name: alpha * snapshot[name] + (1 - alpha) * value for name, value in now.items()}
    return now


@pytest.mark.parametrize("name", ["dpo", "online_dpo", "grpo", "online_grpo"])
@pytest.mark.parametrize("explicit", [False, True])
def test_all_weights(name: str, explicit: bool) -> None:
    snapshots = Snapshots(weights)
    trainer = needs(name, "llama") if explicit else {}
    start = weights(trainer["ref_model"] if explicit else policy("llama"))
    run = build(name, policy("llama"), trainer=trainer, callbacks=[snapshots], **OPTIONS)
    run.train()
    assert len(snapshots.taken) == 7
    assert isinstance(run.prepare.reference, FrozenModel)
    expected = mixed(start, snapshots.taken, ALPHA)
    for key, value in run.prepare.reference.model.named_parameters():
        torch.testing.assert_close(value, expected[key])
        assert not torch.equal(value, start[key]) or torch.equal(snapshots.taken[-1][key], start[key])


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"rank_pattern": {"q_proj": 2}}], ids=str)
def test_adapters_mix_their_products(trained: bool, options: dict[str, Any]) -> None:
    """Three mixtures fit into the reference's rank: they are exact, whatever the matrices are."""
    model = lora(policy("llama"), nonzero=trained, **options)
    start = products(model, "default")
    snapshots = Snapshots(lambda model: products(model, "default"))
    run = build("dpo", model, callbacks=[snapshots], **OPTIONS)
    assert isinstance(run.prepare.reference, FrozenAdapter)
    run.train()
    if not trained:
        assert logged(run, "dpo_loss")[0] == pytest.approx(0.6931, abs=1e-4)
    expected = mixed(start, snapshots.taken, ALPHA)
    for key, value in products(run.model, "reference").items():
        torch.testing.assert_close(value, expected[key], atol=1e-5, rtol=1e-4)
        assert (expected[key] - snapshots.taken[-1][key]).abs().max() > 1e-4
    assert not [n for n, p in run.model.named_parameters() if "reference" in n and p.requires_grad]


def test_what_does_not_fit_is_the_smallest_part() -> None:
    """Many mixtures: no product of the reference's rank is closer (Eckart and Young)."""
    snapshots = Snapshots(lambda model: products(model, "default"))
    options = {**OPTIONS, "ref_model_sync_steps": 1, "max_steps": 6, "num_train_epochs": 6, "learning_rate": 0.3}
    model = lora(policy("llama"), r=1, lora_alpha=1)
    start = products(model, "default")
    run = build("dpo", model, callbacks=[snapshots], **options)
    run.train()
    now = {name: value.detach() for name, value in start.items()}
    for snapshot in snapshots.taken:
        now = {name: ALPHA * snapshot[name] + (1 - ALPHA) * value for name, value in now.items()}
    for name, value in products(run.model, "reference").items():
        assert torch.linalg.matrix_rank(value) <= 4
        assert float((value - now[name]).norm()) <= 0.05 * float(now[name].norm())


@pytest.mark.parametrize("adapter", [{"use_dora": True}, {"modules_to_save": ["lm_head"]}, {"bias": "all"}], ids=str)
def test_any_adapter_may_be_followed_closely(adapter: dict[str, Any]) -> None:
    """With alpha = 1 the reference becomes the policy: right after such a step all margins are 0."""
    with pytest.raises(ValueError, match=r"ref_model_mixup_alpha=0.6: .*allowed with this adapter is 1.0"):
        build("dpo", lora(policy("gpt2"), **adapter), **OPTIONS)
    run = build("dpo", lora(policy("gpt2"), **adapter), **{**OPTIONS, "ref_model_mixup_alpha": 1.0})
    run.train()
    margins = logged(run, "rewards/margins")
    assert [abs(m) < 1e-5 for m in margins] == [True, False, True, False, True, False, True]


def test_small_steps_of_half_precision_add_up(tmp_path: Path) -> None:
    """A step of 1 % would be rounded away in bfloat16; a checkpoint keeps what lies between."""
    current, other = policy("llama").bfloat16(), policy("llama", seed=2).bfloat16()
    start = {name: value.float() for name, value in weights(other).items()}
    reference = FrozenModel(other)
    for _ in range(200):
        reference.mix(current, 0.01)
    left = 0.99**200
    again = FrozenModel(policy("llama").bfloat16())
    again.load_state(reference.state())
    for name, value in current.named_parameters():
        expected = (1 - left) * value.float() + left * start[name]
        torch.testing.assert_close(reference.state()[name], expected, atol=1e-4, rtol=1e-3)
        assert torch.equal(again.state()[name], reference.state()[name])
        assert torch.equal(dict(again.model.named_parameters())[name], expected.bfloat16()) or torch.allclose(
            dict(again.model.named_parameters())[name].float(), expected, atol=1e-2
        )


@pytest.mark.parametrize("sync", [False, True])
def test_the_base_stays_as_it_is(sync: bool) -> None:
    """An adapter that takes its part out of the base when it is made does so once."""
    model = lora(policy("llama"), nonzero=False, init_lora_weights="pissa")
    ids = torch.tensor([[7, 8, 9, 10]])
    with torch.no_grad():
        before = model.eval()(input_ids=ids).logits
    build("dpo", model, **({**OPTIONS, "ref_model_mixup_alpha": 1.0} if sync else {}))
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(input_ids=ids).logits, before, atol=1e-5, rtol=1e-5)


def test_checkpoint_under_a_grown_vocabulary(tmp_path: Path) -> None:
    """The adapter's weights alone: peft would add the embeddings, which are tied here."""
    model = policy("llama", tie_word_embeddings=True)
    model.resize_token_embeddings(model.config.vocab_size + 3)
    run = build(
        "dpo",
        lora(model, target_modules=["q_proj", "v_proj"]),
        output_dir=str(tmp_path),
        **{**OPTIONS, "save_strategy": "steps", "save_steps": 4},
    )
    run.train()
    keys = load_file(tmp_path / "checkpoint-4" / "reference.safetensors").keys()
    assert keys
    assert all("lora_" in key for key in keys)


@pytest.mark.parametrize("make", ["full", "lora"])
def test_resume(make: str, tmp_path: Path) -> None:
    """Pitfall F-89: the reference as it was, between two of its steps."""
    assert_resumes(
        "dpo",
        lambda: policy("llama", make == "lora"),
        tmp_path,
        sync_ref_model=True,
        ref_model_sync_steps=2,
        ref_model_mixup_alpha=ALPHA,
    )
    (checkpoint,) = tmp_path.rglob("checkpoint-3")
    (checkpoint / "reference.safetensors").unlink()
    late = build("dpo", policy("llama", make == "lora"), rows("dpo", 8), **OPTIONS)
    with pytest.raises(FileNotFoundError, match="has no reference"):
        late.train(resume_from_checkpoint=str(checkpoint))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("dpo", {"loss_type": "orpo"}, "sync_ref_model=True: dpo compares with no reference"),
        ("online_grpo", {"beta": 0.0}, "sync_ref_model=True: online_grpo compares with no reference"),
        ("dpo", {"ref_model_mixup_alpha": 0.0}, "ref_model_mixup_alpha=0.0"),
        ("dpo", {"ref_model_mixup_alpha": 1.5}, "ref_model_mixup_alpha=1.5"),
        ("dpo", {"ref_model_sync_steps": 0}, "ref_model_sync_steps=0"),
        ("dpo", {"sync_ref_model": False}, "has no effect without sync_ref_model=True"),
    ],
)
def test_bad_options(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(name, "no such model is read", **{**OPTIONS, **options})


def test_a_reference_of_another_kind_is_refused() -> None:
    for model, given in ((policy("llama"), policy("gpt2")), (lora(policy("llama")), policy("llama", seed=2))):
        with pytest.raises(ValueError, match="allowed is one of the same architecture"):
            build("dpo", model, trainer={"ref_model": given}, **OPTIONS)
