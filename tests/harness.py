"""Every strategy on tiny models: what each needs to run, replayed rollouts, gradients as the optimizer gets them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
from conftest import EOS, VOCAB, make_model, make_tokenizer
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import TrainerCallback

from hf_strategies import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    OnlineDPOConfig,
    OnlineDPOTrainer,
    PPOConfig,
    PPOTrainer,
    SeqConfig,
    SeqTrainer,
    SFTConfig,
    SFTTrainer,
    StrategyTrainer,
)
from hf_strategies.batch import TOKEN_FIELDS, Batch
from hf_strategies.modeling.critic import critic_of
from hf_strategies.modeling.sampling import Completion, Sampling
from hf_strategies.policy_output import PolicyOutput
from hf_strategies.rollout.engine import RolloutGroup
from hf_strategies.stats import Metrics

NAMES = ("seq", "sft", "dpo", "online_dpo", "grpo", "online_grpo", "online_ppo")
ONLINE = ("online_dpo", "online_grpo", "online_ppo")
OFFLINE = tuple(name for name in NAMES if name not in ONLINE)
CLASSES: dict[str, tuple[type[StrategyTrainer], type]] = {
    "seq": (SeqTrainer, SeqConfig),
    "sft": (SFTTrainer, SFTConfig),
    "dpo": (DPOTrainer, DPOConfig),
    "online_dpo": (OnlineDPOTrainer, OnlineDPOConfig),
    "grpo": (GRPOTrainer, GRPOConfig),
    "online_grpo": (GRPOTrainer, GRPOConfig),
    "online_ppo": (PPOTrainer, PPOConfig),
}
LETTERS = "abcdefghijklmnopqrstuvwxyz"
NEW_TOKENS = 8


def word(number: int, length: int) -> str:
    """A text of ``length`` letters that depends on ``number``."""
    return "".join(LETTERS[(7 * number + 3 * i * i + 11 * i) % 26] for i in range(length))


def rows(name: str, count: int = 8) -> list[dict[str, Any]]:
    """``count`` dataset rows in the shape of a strategy, of unequal lengths everywhere."""
    size = [1 + (5 * i + 2) % 7 for i in range(count)]
    prompts = [word(i, 2 + (3 * i) % 5) for i in range(count)]
    if name == "seq":
        return [{"text": word(i, 2 + 3 * size[i])} for i in range(count)]
    if name == "sft":
        return [{"prompt": p, "completion": word(i + 50, size[i])} for i, p in enumerate(prompts)]
    if name == "dpo":
        return [
            {"prompt": p, "chosen": word(i + 50, size[i]), "rejected": word(i + 90, 1 + (size[i] * 3 + i) % 6)}
            for i, p in enumerate(prompts)
        ]
    if name == "grpo":
        return [
            {
                "prompt": p,
                "completions": [word(i + 30 * j, 1 + (size[i] + 2 * j) % 6) for j in range(2 + i % 2)],
                "rewards": [0.25 * ((i + 3 * j) % 5) for j in range(2 + i % 2)],
            }
            for i, p in enumerate(prompts)
        ]
    return [{"prompt": p, "answer": LETTERS[i % 26]} for i, p in enumerate(prompts)]


def reward(completion_ids: Sequence[list[int]], **kwargs: Any) -> list[float]:
    """Rewards that vary within every group and are the same for the same completion."""
    return [((sum(ids) + len(ids)) % 11) / 4 for ids in completion_ids]


class ReplayEngine:
    """Gives every prompt the same completions each time: a function of the prompt's ids alone.

    Args:
        lengths: tokens of the completions, used in turn.
        counted: make the completions of the k-th call differ from those of all other calls.
        trains: False marks every token as seen but not trained.
    """

    def __init__(
        self, lengths: Sequence[int] = (3, 8, 1, 6, 2, 5, 7, 4), counted: bool = False, trains: bool = True
    ) -> None:
        self.lengths = lengths
        self.counted = counted
        self.trains = trains
        self.calls = 0
        self.version = 0

    def generate(
        self,
        prompt_ids: Sequence[list[int]],
        n: int,
        sampling: Sampling,
        noise_keys: Sequence[Sequence[tuple[int, ...]]],
    ) -> list[RolloutGroup]:
        groups = []
        for prompt in prompt_ids:
            number = self.calls if self.counted else 0
            for token in prompt:
                number = (number * len(VOCAB) + token) % 2**31
            completions = []
            for j in range(n):
                length = min(self.lengths[(number + j) % len(self.lengths)], sampling.max_new_tokens)
                generator = torch.Generator().manual_seed(64 * number + j)
                ids = torch.randint(6, len(VOCAB), (length,), generator=generator).tolist()
                stopped = length < sampling.max_new_tokens
                if stopped:
                    ids[-1] = EOS
                completions.append(Completion(ids, [-1.0] * length, "stop" if stopped else "length"))
            masks = None if self.trains else [[False] * len(c.ids) for c in completions]
            groups.append(RolloutGroup(list(prompt), completions, self.version, masks))
        self.calls += 1
        return groups

    def sync_weights(self, model: nn.Module, version: int) -> None:
        self.version = version


class CaptureGradients(TrainerCallback):
    """Gradients of every optimizer step, as the optimizer finds them (pitfalls: never from loss prints)."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.steps.append(gradients(model))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """A copy of all gradients by parameter name; a parameter the loss never reached has a zero gradient."""
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def weights(model: nn.Module) -> dict[str, Tensor]:
    """A copy of all trainable parameters by name."""
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def difference(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest relative error over the parameters, each by norm, with a floor of 1e-3 of the largest norm."""
    assert got.keys() == expected.keys()
    largest = max(float(value.norm()) for value in expected.values())
    assert largest > 0, "nothing to compare: all zero"
    for value in got.values():
        assert value.isfinite().all()
    return max(
        float((got[name] - value).norm()) / max(float(value.norm()), 1e-3 * largest)
        for name, value in expected.items()
    )


def total_difference(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Relative error over all parameters together, for updates: the digits of small ones are lost in the weights."""
    assert got.keys() == expected.keys()
    error = sum(float((got[name] - value).square().sum()) for name, value in expected.items())
    size = sum(float(value.square().sum()) for value in expected.values())
    assert size > 0, "nothing to compare: all zero"
    return (error / size) ** 0.5


def lora(model: Any, nonzero: bool = True, seed: int = 5, adapter_name: str = "default", **options: Any) -> Any:
    """A LoRA adapter on every linear layer; with ``nonzero`` one that has been trained (its B matrices are not 0)."""
    torch.manual_seed(seed)
    model = get_peft_model(model, LoraConfig(**{"r": 4, "target_modules": "all-linear", **options}), adapter_name)
    if nonzero:
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
    return model


def policy(kind: str, adapter: bool = False, seed: int = 0, **changes: Any) -> Any:
    """The tiny model ``kind``, full or with a trained adapter.

    Weights of size 0.3 instead of 0.5: float32 noise in the gradients is 3e-6 then, with 0.5 up to 2e-5.
    """
    model = make_model(kind, seed, **{"initializer_range": 0.3, **changes})
    return lora(model) if adapter else model


def reference(kind: str) -> Any:
    """A model close to `policy`, but not the same: margins and divergences are neither 0 nor huge."""
    model = policy(kind)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.02 * parameter.std(correction=0) * noise)
    return model


def build(
    name: str,
    model: Any = None,
    data: list[dict[str, Any]] | None = None,
    *,
    tokenizer: Any = None,
    engine: Any = "replay",
    reward_funcs: Callable | None = None,
    critic: float = 0.05,
    transform: Callable[[Batch], Batch] | None = None,
    callbacks: Sequence[TrainerCallback] = (),
    trainer: dict[str, Any] | None = None,
    **options: Any,
) -> StrategyTrainer:
    """A trainer of a strategy with everything it needs.

    Args:
        name: strategy.
        model: policy; a tiny llama by default.
        data: rows of the dataset.
        tokenizer: processing class.
        engine: ``replay``, None for the trainer's own, or an engine.
        reward_funcs: reward of an online strategy.
        critic: size of the random weights given to a critic (a zero head sends no gradient into the trunk).
        transform: applied to every micro-batch between the count of the denominator and the loss.
        callbacks: further callbacks.
        trainer: further arguments of the trainer.
        **options: of the config.
    """
    trainer_class, config_class = CLASSES[name]
    if transform is not None:
        trainer_class = _transforming(trainer_class, transform)
    defaults: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "num_train_epochs": 1,
        "learning_rate": 0.0,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "disable_dropout": True,
        "router_aux_loss_coef": 0.0,
    }
    arguments: dict[str, Any] = dict(trainer or {})
    if name == "seq":
        defaults["max_length"] = 24
    if name in ("grpo", "online_grpo"):
        defaults["beta"] = 0.1
    if name in ONLINE:
        defaults |= {"num_generations": 4, "max_completion_length": NEW_TOKENS, "num_iterations": 1}
        arguments["reward_funcs"] = reward_funcs or reward
    elif name == "grpo":
        arguments["reward_funcs"] = None
    built = trainer_class(
        model if model is not None else policy("llama"),
        args=config_class(**{**defaults, **options}),
        train_dataset=data if data is not None else rows(name, 2 if name in ONLINE else 8),
        processing_class=tokenizer if tokenizer is not None else make_tokenizer(),
        callbacks=list(callbacks),
        **arguments,
    )
    if built.rollouts is not None and engine is not None:
        built.rollouts.engine = ReplayEngine() if engine == "replay" else engine
    head = critic_of(built.model)
    if head is not None and critic:
        torch.manual_seed(11)
        nn.init.normal_(head.head.weight, std=critic)
        nn.init.constant_(head.head.bias, critic)
    return built


def _transforming(base: type[StrategyTrainer], transform: Callable[[Batch], Batch]) -> type[StrategyTrainer]:
    class Transforming(base):  # type: ignore[misc, valid-type]
        def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
            inputs, items = super().get_batch_samples(*args, **kwargs)
            changed = [
                {"pieces": [{**piece, "batch": transform(piece["batch"])} for piece in sample["pieces"]]}
                for sample in inputs
            ]
            return changed, items

    return Transforming


def run(name: str, model: Any = None, data: Any = None, **options: Any) -> tuple[StrategyTrainer, CaptureGradients]:
    """Train and capture the gradients of every step."""
    capture = CaptureGradients()
    trainer = build(name, model, data, callbacks=[capture], **options)
    trainer.train()
    return trainer, capture


def needs(name: str, kind: str) -> dict[str, Any]:
    """Arguments of the trainer for a strategy that compares with a reference: one close to the policy."""
    return {} if name in ("seq", "sft") else {"ref_model": reference(kind)}


def padded(batch: Batch, left: int = 3, right: int = 5) -> Batch:
    """The same rows with more padding than they need, and garbage in all of it."""
    changes: dict[str, Tensor | None] = {}
    generator = torch.Generator().manual_seed(1)
    for name, value in batch.tensors().items():
        if value.dim() != 2:
            continue
        sides = (left, 0) if name.startswith("prompt") else (0, right)
        value = torch.nn.functional.pad(value, sides)
        real = torch.nn.functional.pad(
            batch.prompt_mask if name.startswith("prompt") else batch.completion_mask, sides
        )
        if name.endswith("_ids"):
            value = torch.where(real, value, torch.randint(len(VOCAB), value.shape, generator=generator))
        elif name in TOKEN_FIELDS:
            value = torch.where(real, value, torch.full_like(value, float("nan")))
        changes[name] = value
    return batch.replace(**changes)


def record(trainer: StrategyTrainer) -> list[tuple[Tensor, Batch]]:
    """Log-probabilities and batch of every call of the strategy's loss from now on."""
    calls: list[tuple[Tensor, Batch]] = []
    base = type(trainer.strategy)

    class Recording(base):  # type: ignore[misc, valid-type]
        def loss(self, policy: PolicyOutput, batch: Batch, num_items: Tensor) -> tuple[Tensor, Metrics]:
            calls.append((policy.logprobs.detach().clone(), batch))
            return super().loss(policy, batch, num_items)

    trainer.strategy = trainer.prepare.strategy = Recording(trainer.strategy.options)
    return calls


def scored_alone(model: Any, batch: Batch, temperature: float = 1.0) -> list[Tensor]:
    """Log-probabilities of each row's completion, the row alone and unpadded, by the model's plain forward."""
    scores = []
    for i in range(batch.num_rows):
        prompt = batch.prompt_ids[i][batch.prompt_mask[i]]
        completion = batch.completion_ids[i][batch.completion_mask[i]]
        with torch.no_grad():
            logits = model(input_ids=torch.cat([prompt, completion]).unsqueeze(0)).logits[0]
        table = torch.log_softmax(logits / temperature, dim=-1)
        scores.append(table[len(prompt) - 1 : -1].gather(1, completion.unsqueeze(1)).squeeze(1))
    return scores


def logged(trainer: StrategyTrainer, key: str) -> list[float]:
    """Values of a metric over the logs of training steps."""
    return [entry[key] for entry in trainer.state.log_history if key in entry and "loss" in entry]
