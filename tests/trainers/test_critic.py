"""The value head: where it starts, what it moves, what is pinned, and that no exported policy carries it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_tokenizer
from harness import CaptureGradients, build, difference, logged, lora, needs, policy, record, rows, weights
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from hf_strategies import PolicyOutput
from hf_strategies.batch import Batch
from hf_strategies.modeling.critic import attach_critic, critic_of
from hf_strategies.stats import Metrics

KINDS = ("llama", "gpt2", "mixtral")
models = pytest.mark.parametrize(("kind", "adapter"), [(kind, adapter) for kind in KINDS for adapter in (False, True)])


def record_values(trainer: Any) -> list[Tensor]:
    """The critic's values in every call of the loss from now on."""
    seen: list[Tensor] = []
    base = type(trainer.strategy)

    class Recording(base):  # type: ignore[misc, valid-type]
        def loss(self, policy: PolicyOutput, batch: Batch, num_items: Tensor) -> tuple[Tensor, Metrics]:
            seen.append(policy.values.detach().clone())
            return super().loss(policy, batch, num_items)

    trainer.strategy = trainer.prepare.strategy = Recording(trainer.strategy.options)
    return seen


@models
def test_values_are_zero_at_the_start(kind: str, adapter: bool) -> None:
    trainer = build("online_ppo", policy(kind, adapter), critic=0)
    calls, values = record(trainer), record_values(trainer)
    trainer.train()
    ((_, batch),) = calls
    assert torch.count_nonzero(batch.values) == 0
    assert torch.count_nonzero(values[0]) == 0
    # With V = 0, gamma 1 and lambda 0.95 the return of a last token is its reward less the KL penalty (0 here: the
    # reference is the policy), that of the token before it 0.95 of it.
    assert torch.equal(batch.returns, batch.advantages)
    for i in range(batch.num_rows):
        trained = batch.returns[i][batch.loss_mask[i]]
        powers = 0.95 ** torch.arange(len(trained) - 1, -1, -1, dtype=torch.float64)
        torch.testing.assert_close(trained.double(), powers * batch.rewards[i], atol=1e-6, rtol=1e-5)


@models
def test_gradient_of_the_value_loss(kind: str, adapter: bool) -> None:
    """Its own part of the gradient, alone: it reaches head and trunk, and is what autograd finds for the formula."""

    def without_policy_loss(batch: Batch) -> Batch:
        return batch.replace(advantages=torch.zeros_like(batch.advantages))

    capture = CaptureGradients()
    trainer = build("online_ppo", policy(kind, adapter), callbacks=[capture], transform=without_policy_loss)
    calls = record(trainer)
    values = record_values(trainer)
    calls_of_model: list[int] = []
    trainer.model.register_forward_hook(lambda module, args, out: calls_of_model.append(int(module.training)))
    trainer.train()
    gradients = capture.steps[0]
    head = next(name for name in gradients if name.endswith("critic.head.weight"))
    assert float(gradients[head].norm()) > 1e-3
    trunk = max(float(value.norm()) for name, value in gradients.items() if "critic" not in name)
    assert trunk > 1e-4
    # d/db of vf_coef * mean (V - R)^2 is 2 * vf_coef * mean(V - R); vf_coef is 0.5.
    ((_, batch),) = calls
    bias = next(value for name, value in gradients.items() if name.endswith("critic.head.bias"))
    expected = (values[0] - batch.returns)[batch.loss_mask].mean()
    torch.testing.assert_close(bias[0], expected, atol=1e-6, rtol=1e-5)
    # The output layer has no part in values (llama and mixtral do not share it with the embedding).
    if kind != "gpt2" and not adapter:
        assert torch.count_nonzero(gradients["lm_head.weight"]) == 0
    # One call of the module per training pass: two would break DDP's bookkeeping.
    assert calls_of_model.count(1) == 1


def test_zero_head_sends_nothing_into_the_trunk() -> None:
    def without_policy_loss(batch: Batch) -> Batch:
        return batch.replace(advantages=torch.zeros_like(batch.advantages))

    capture = CaptureGradients()
    build("online_ppo", critic=0, callbacks=[capture], transform=without_policy_loss).train()
    for name, value in capture.steps[0].items():
        assert (torch.count_nonzero(value) > 0) == ("critic" in name)


def test_policy_and_value_gradients_add_up() -> None:
    """vf_coef weighs the value part alone: gradient(0.5) - gradient(0) = (gradient(2) - gradient(0)) / 4."""
    found = []
    for coefficient in (0.0, 0.5, 2.0):
        capture = CaptureGradients()
        build("online_ppo", vf_coef=coefficient, callbacks=[capture]).train()
        found.append(capture.steps[0])
    zero, half, two = found
    assert all(torch.count_nonzero(value) == 0 for name, value in zero.items() if "critic" in name)
    small = {name: half[name] - zero[name] for name in zero}
    large = {name: (two[name] - zero[name]) / 4 for name in zero}
    assert difference(small, large) < 1e-4  # the difference of two float32 gradients


def test_targets_are_pinned_over_the_epochs() -> None:
    """Advantages, returns, values and old log-probs are those of the rollout, bit for bit, while the critic moves."""
    trainer = build(
        "online_ppo",
        trainer=needs("online_ppo", "llama"),
        num_iterations=4,
        learning_rate=0.05,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
    )
    calls = record(trainer)
    values = record_values(trainer)
    trainer.train()
    assert len(values) == len(calls) == 8
    for micro_step in range(2, 8):
        first, now = calls[micro_step % 2][1], calls[micro_step][1]
        for name in ("advantages", "returns", "values", "old_logprobs", "ref_logprobs", "loss_mask"):
            assert torch.equal(getattr(first, name), getattr(now, name)), name
    assert (values[0] - values[-2]).abs().max() > 1e-3


@models
def test_exported_policy_has_no_critic(kind: str, adapter: bool, tmp_path: Path) -> None:
    """Pitfall B-48: a plain causal LM, or a plain adapter, with the logits of the trained policy."""
    base = policy(kind)
    bare = copy.deepcopy(base)
    trainer = build("online_ppo", lora(base) if adapter else base, learning_rate=0.05, num_iterations=2, kl_coef=0.01)
    trainer.train()
    trainer.save_model(str(tmp_path))
    file = tmp_path / ("adapter_model.safetensors" if adapter else "model.safetensors")
    assert not [key for key in load_file(file) if "critic" in key or "head.bias" in key]
    assert not list(tmp_path.glob("**/critic*"))
    if adapter:
        loaded = PeftModel.from_pretrained(bare, str(tmp_path)).eval()
    else:
        loaded, report = AutoModelForCausalLM.from_pretrained(
            str(tmp_path), dtype=torch.float32, output_loading_info=True
        )
        assert not report["missing_keys"]
        assert not report["unexpected_keys"]
    ids = torch.tensor([[7, 8, 9, 10, 11]])
    with torch.no_grad():
        assert torch.equal(loaded.eval()(input_ids=ids).logits, trainer.model.eval()(input_ids=ids).logits)
        start = policy(kind, adapter).eval()
        assert not torch.equal(start(input_ids=ids).logits, loaded(input_ids=ids).logits)


@pytest.mark.parametrize("adapter", [False, True])
def test_checkpoint_brings_back_critic_and_optimizer(adapter: bool, tmp_path: Path) -> None:
    """Pitfall B-48: the values after loading are those before saving, and the optimizer still owns the head."""
    options: dict[str, Any] = {
        "output_dir": str(tmp_path),
        "save_strategy": "steps",
        "save_steps": 2,
        "max_steps": 2,
        "learning_rate": 0.05,
        "optim": "adamw_torch",
        "num_train_epochs": 2,
    }
    trainer = build("online_ppo", policy("llama", adapter), **options)
    trainer.train()
    checkpoint = tmp_path / "checkpoint-2"
    saved = load_file(checkpoint / "critic.safetensors")
    for name, value in critic_of(trainer.model).state_dict().items():
        assert torch.equal(saved[name], value)
    fresh = build(
        "online_ppo", policy("llama", adapter), critic=0, **{**options, "max_steps": 3, "num_train_epochs": 3}
    )
    assert not torch.equal(critic_of(fresh.model).head.weight, saved["head.weight"])
    values = record_values(fresh)
    restored: dict[str, Any] = {}

    class AtStart(CaptureGradients):
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            restored["weights"] = weights(model)
            head = critic_of(model).head.weight
            restored["moments"] = kwargs["optimizer"].state[head]["exp_avg"].clone()

    fresh.add_callback(AtStart())
    fresh.train(resume_from_checkpoint=str(checkpoint))
    for name, value in weights(trainer.model).items():
        assert torch.equal(restored["weights"][name], value), name
    head = critic_of(trainer.model).head.weight
    assert torch.equal(restored["moments"], trainer.optimizer.state[head]["exp_avg"])
    assert torch.count_nonzero(restored["moments"])
    assert torch.count_nonzero(values[0])
    assert not torch.equal(critic_of(fresh.model).head.weight, saved["head.weight"])  # and it trains on


def test_checkpoint_without_critic_is_named(tmp_path: Path) -> None:
    """Pitfall B-48: refused before anything is loaded, by the name of the file that is missing."""
    options = {"output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    build("online_ppo", **options).train()
    (tmp_path / "checkpoint-1" / "critic.safetensors").unlink()
    start = build("online_ppo", **options)
    before = weights(start.model)
    with pytest.raises(FileNotFoundError, match=r"checkpoint-1 has no critic \(critic.safetensors is missing\)"):
        start.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert all(torch.equal(value, before[name]) for name, value in weights(start.model).items())


def test_values_belong_to_the_states_before_the_tokens() -> None:
    """The value of token j is read where token j is predicted: from the hidden state of the token before it."""
    trainer = build("online_ppo", policy("gpt2"), rows("online_ppo", 2))
    calls = record(trainer)
    trainer.train()
    ((_, batch),) = calls
    critic, model = critic_of(trainer.model), trainer.model.eval()
    for i in range(batch.num_rows):
        prompt = batch.prompt_ids[i][batch.prompt_mask[i]]
        completion = batch.completion_ids[i][batch.completion_mask[i]]
        with torch.no_grad():
            ids = torch.cat([prompt, completion]).unsqueeze(0)
            hidden = model(input_ids=ids, output_hidden_states=True).hidden_states[-1][0]
            expected = hidden @ critic.head.weight[0] + critic.head.bias
        expected = expected[len(prompt) - 1 : -1]
        torch.testing.assert_close(batch.values[i][batch.completion_mask[i]], expected, atol=1e-5, rtol=1e-5)


def test_head_of_a_half_precision_model_is_float32() -> None:
    """A zero start and small steps would be lost in bfloat16."""
    critic = attach_critic(policy("llama").to(torch.bfloat16))
    assert critic.head.weight.dtype == torch.float32


def test_answers_of_a_tool_are_skipped() -> None:
    """A trailing token that does not train must not swallow the reward, nor a hole reset what flows back."""
    trainer = build("online_ppo", policy("llama"), kl_coef=0.0, critic=0)
    engine = trainer.rollouts.engine
    plain = engine.generate

    def with_holes(*args: Any) -> Any:
        groups = plain(*args)
        for group in groups:
            group.loss_masks = [[k % 2 == 0 for k in range(len(c.ids))] for c in group.completions]
        return groups

    engine.generate = with_holes
    calls = record(trainer)
    trainer.train()
    ((_, batch),) = calls
    for i in range(batch.num_rows):
        size = int(batch.completion_mask[i].sum())
        trained = list(range(0, size, 2))
        assert batch.loss_mask[i].nonzero().flatten().tolist() == trained
        for back, position in enumerate(reversed(trained)):
            expected = 0.95**back * float(batch.rewards[i])
            assert float(batch.returns[i][position]) == pytest.approx(expected, rel=1e-5)
        assert torch.count_nonzero(batch.returns[i][~batch.loss_mask[i]]) == 0


def test_pad_token_is_the_end_token() -> None:
    """Pitfall B-44: the score lands on the end token of the completion, which has the id of the padding around it."""
    trainer = build("online_ppo", tokenizer=make_tokenizer(pad_is_eos=True), critic=0, kl_coef=0.0, gae_lambda=0.0)
    calls = record(trainer)
    trainer.train()
    ((_, batch),) = calls
    eos = trainer.processing_class.eos_token_id
    stopped = 0
    for i in range(batch.num_rows):
        last = int(batch.completion_mask[i].sum()) - 1
        # lambda 0 and V = 0: the return is the token's own reward.
        nonzero = batch.returns[i].nonzero().flatten().tolist()
        assert nonzero == ([last] if float(batch.rewards[i]) else [])
        stopped += int(batch.completion_ids[i, last] == eos)
    assert stopped >= 4
    assert logged(trainer, "value_loss")[0] > 0
