"""The reference is the policy the run starts from, whatever kind of policy it is."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import CaptureGradients, ReplayEngine, build, logged, lora, needs, policy, record, rows, scored_alone
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from hf_strategies.batch import Batch, Row
from hf_strategies.modeling.reference import AdapterOff, FrozenAdapter, FrozenModel, Reference

COMPARING = ("dpo", "online_dpo", "grpo", "online_grpo", "online_ppo")
OPTIONS: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "max_steps": 3,
    "num_train_epochs": 3,
    "learning_rate": 0.05,
}


def check_run(name: str, model: nn.Module, kind: type[Reference], expected: nn.Module | None = None) -> Any:
    """Train three steps; every reference log-prob must be that of ``expected`` (default: the policy at the start)."""
    # A copy from before the trainer saw the model.
    start = copy.deepcopy(model if expected is None else expected).eval()
    trainable = {n for n, p in model.named_parameters() if p.requires_grad}
    arguments = {} if expected is None else {"ref_model": expected}
    trainer = build(name, model, trainer=arguments, **OPTIONS)
    assert type(trainer.prepare.reference) is kind
    calls = record(trainer)
    trainer.train()
    assert trainer.state.global_step == 3
    assert {n for n, p in trainer.model.named_parameters() if p.requires_grad and "critic" not in n} == trainable
    for _, batch in calls:
        assert batch.ref_logprobs is not None
        for i, alone in enumerate(scored_alone(start, batch)):
            torch.testing.assert_close(batch.ref_logprobs[i][batch.completion_mask[i]], alone, atol=1e-5, rtol=1e-5)
    # The policy has moved away from its reference, so that the comparison above says something.
    moved = (calls[-1][0] - calls[-1][1].ref_logprobs)[calls[-1][1].loss_mask].abs().max()
    assert moved > 1e-3
    return trainer


@pytest.mark.parametrize("name", ["dpo", "grpo", "online_dpo", "online_grpo"])
def test_the_reference_computes_every_prompt_once(name: str) -> None:
    """Micro-batches smaller than a group do not part it: as many tokens as in the policy's own pass over all rows."""
    options = {**OPTIONS, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    trainer = build(name, policy("llama"), trainer=needs(name, "llama"), **options)
    computed: list[int] = []
    score = trainer.forward_pass.__class__.__call__

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = score(self, *args, **kwargs)
        computed.append(result.computed_tokens)
        return result

    batch = Batch.from_rows(
        [Row([7, 8, 9], [10 + i, 11], reward=float(i), group=g) for g in range(2) for i in range(4)]
    )
    trainer.forward_pass.checked = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.forward_pass.__class__, "__call__", counting)
        (prepared,), _ = trainer.prepare(trainer.model, [batch])
    rows = prepared.num_rows
    assert prepared.ref_logprobs is not None
    assert sum(computed) == 2 * 3 + rows * 2


def check_first_step(name: str, trainer: Any) -> None:
    if name in ("dpo", "online_dpo"):
        assert logged(trainer, "dpo_loss")[0] == pytest.approx(math.log(2), abs=1e-4)
        assert abs(logged(trainer, "rewards/margins")[0]) < 1e-5
        assert abs(logged(trainer, "rewards/chosen")[0]) < 1e-5
        assert abs(logged(trainer, "rewards/margins")[-1]) > 1e-3
    else:
        assert abs(logged(trainer, "kl")[0]) < 1e-9
        assert logged(trainer, "kl")[-1] > 1e-7


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("name", COMPARING)
def test_fresh_adapter_is_switched_off(name: str, kind: str) -> None:
    """Pitfalls C-56, B-46: step 0 has loss ln 2, margins 0, KL 0; later the reference still is the base model."""
    base = policy(kind)
    bare = copy.deepcopy(base)
    trainer = check_run(name, lora(base, nonzero=False), AdapterOff)
    check_first_step(name, trainer)
    # The base model itself was not touched, and the adapter is on again.
    for key, value in bare.state_dict().items():
        mine = trainer.model.get_base_model().state_dict()
        found = mine.get(
            key, mine.get(key.replace(".weight", ".base_layer.weight").replace(".bias", ".base_layer.bias"))
        )
        assert torch.equal(found, value), key
    ids = torch.tensor([[7, 8, 9, 10]])
    with torch.no_grad():
        on = trainer.model.eval()(input_ids=ids).logits
        off = bare.eval()(input_ids=ids).logits
    assert (on - off).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
@pytest.mark.parametrize("name", COMPARING)
def test_trained_adapter_is_copied(name: str, kind: str, tmp_path: Path) -> None:
    """Pitfalls A-28, C-56: not the bare base model; the copy stays out of training and out of the export."""
    base = policy(kind)
    bare = copy.deepcopy(base)
    trainer = check_run(name, lora(base), FrozenAdapter)
    check_first_step(name, trainer)
    assert not [n for n, p in trainer.model.named_parameters() if "reference" in n and p.requires_grad]
    trainer.save_model(str(tmp_path))
    assert not (tmp_path / "reference").exists()
    keys = load_file(tmp_path / "adapter_model.safetensors").keys()
    assert keys
    assert not [key for key in keys if "reference" in key or "critic" in key]
    loaded = PeftModel.from_pretrained(bare, str(tmp_path)).eval()
    ids = torch.tensor([[7, 8, 9, 10]])
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, trainer.model.eval()(input_ids=ids).logits)


def test_trained_adapter_of_another_name(tmp_path: Path) -> None:
    """The adapter keeps its name: peft writes it to a folder of that name."""
    base = policy("llama")
    bare = copy.deepcopy(base)
    model = lora(base, adapter_name="mine")
    trainer = check_run("dpo", model, FrozenAdapter)
    assert trainer.model.active_adapter == "mine"
    trainer.save_model(str(tmp_path))
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["mine"]
    loaded = PeftModel.from_pretrained(bare, str(tmp_path / "mine")).eval()
    ids = torch.tensor([[7, 8, 9, 10]])
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, trainer.model.eval()(input_ids=ids).logits)


@pytest.mark.parametrize(
    ("options", "kind"),
    [({"use_dora": True}, "llama"), ({"modules_to_save": ["lm_head"]}, "llama"), ({"bias": "all"}, "gpt2")],
    ids=["dora", "modules_to_save", "bias"],
)
def test_adapters_that_train_more_than_lora(options: dict[str, Any], kind: str) -> None:
    """Switching such an adapter off need not give back the start: what it trains is copied."""
    model = lora(policy(kind), nonzero=False, target_modules=["c_attn" if kind == "gpt2" else "q_proj"], **options)
    start = copy.deepcopy(model).eval()
    trainer = build("dpo", model, **OPTIONS)
    assert not isinstance(trainer.prepare.reference, AdapterOff)
    calls = record(trainer)
    trainer.train()
    assert logged(trainer, "dpo_loss")[0] == pytest.approx(math.log(2), abs=1e-4)
    for _, batch in calls:
        for i, alone in enumerate(scored_alone(start, batch)):
            torch.testing.assert_close(batch.ref_logprobs[i][batch.completion_mask[i]], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", COMPARING)
def test_full_model_is_copied_as_it_is_in_memory(name: str, tmp_path: Path) -> None:
    """Pitfalls C-56, G-3: weights changed after loading are part of the reference; nothing is read again."""
    policy("gpt2").save_pretrained(str(tmp_path))
    model = AutoModelForCausalLM.from_pretrained(str(tmp_path), dtype=torch.float32)
    torch.manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    check_first_step(name, check_run(name, model, FrozenModel))


@pytest.mark.parametrize("name", COMPARING)
def test_reference_given_by_the_caller(name: str) -> None:
    given = needs(name, "llama")["ref_model"]
    before = {key: value.clone() for key, value in given.state_dict().items()}
    trainer = check_run(name, policy("llama"), FrozenModel, expected=given)
    assert trainer.prepare.reference.model is given
    assert not any(p.requires_grad for p in given.parameters())
    assert all(torch.equal(value, before[key]) for key, value in given.state_dict().items())
    if name in ("dpo", "online_dpo"):
        assert abs(logged(trainer, "dpo_loss")[0] - math.log(2)) > 1e-3
    else:
        assert logged(trainer, "kl")[0] > 1e-5


def test_policy_as_its_own_reference_is_refused() -> None:
    model = policy("llama")
    with pytest.raises(ValueError, match="ref_model is the policy itself"):
        build("dpo", model, trainer={"ref_model": model})


def test_no_reference_without_a_divergence() -> None:
    assert build("online_grpo", beta=0.0).prepare.reference is None
    assert build("grpo", beta=0.0).prepare.reference is None
    assert build("online_ppo", kl_coef=0.0).prepare.reference is None
    assert build("sft").prepare.reference is None


def test_adapter_loaded_for_inference_is_refused(tmp_path: Path) -> None:
    """Pitfall A-28: a frozen adapter would train nothing."""
    lora(policy("llama")).save_pretrained(str(tmp_path))
    model = PeftModel.from_pretrained(policy("llama"), str(tmp_path))
    with pytest.raises(ValueError, match="is_trainable=True"):
        build("dpo", model)
    check_run("dpo", PeftModel.from_pretrained(policy("llama"), str(tmp_path), is_trainable=True), FrozenAdapter)


def test_logged_divergence_is_the_one_that_is_used() -> None:
    """Pitfall B-46: the logged KL is the k3 mean over trained tokens, never negative; beta times it is in the loss."""
    trainer = build("online_grpo", trainer=needs("online_grpo", "llama"), engine=ReplayEngine(), beta=0.3)
    calls = record(trainer)
    trainer.train()
    ((logprobs, batch),) = calls
    d = (batch.ref_logprobs - logprobs)[batch.loss_mask].double()
    k3 = torch.exp(d) - 1 - d
    assert (k3 >= 0).all()
    assert logged(trainer, "kl")[0] == pytest.approx(float(k3.mean()), rel=1e-5)
    task = logged(trainer, "policy_loss")[0]
    assert logged(trainer, "loss")[0] == pytest.approx(task + 0.3 * float(k3.mean()), rel=1e-5)


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_groups_without_variance_move_the_policy_through_the_divergence_alone(beta: float) -> None:
    """Pitfalls A-2, A-3: with beta 0 nothing moves; with beta > 0 the KL term still acts (a declared choice)."""

    def constant(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        return [0.3] * len(completion_ids)

    capture = CaptureGradients()
    trainer = build(
        "online_grpo",
        trainer=needs("online_grpo", "llama"),
        reward_funcs=constant,
        beta=beta,
        callbacks=[capture],
    )
    trainer.train()
    assert logged(trainer, "frac_reward_zero_std") == [1.0]
    size = max(float(value.norm()) for value in capture.steps[0].values())
    assert size == 0.0 if beta == 0.0 else size > 1e-3


def test_rows_are_those_of_the_data() -> None:
    """The reference log-probs of a pair belong to its own rows, also when rows are cut into several passes."""
    trainer = build(
        "dpo", policy("llama"), rows("dpo", 8), trainer=needs("dpo", "llama"), per_device_train_batch_size=3
    )
    calls: list[tuple[Tensor, Batch]] = record(trainer)
    trainer.train()
    model = trainer.prepare.reference.model
    for _, batch in calls:
        for i, alone in enumerate(scored_alone(model, batch)):
            torch.testing.assert_close(batch.ref_logprobs[i][batch.completion_mask[i]], alone, atol=1e-5, rtol=1e-5)
