"""Bad input ends in an error that names it, before any weights are read."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
from conftest import make_model, make_tokenizer
from datasets import Dataset, IterableDataset
from harness import lora
from transformers import AutoModelForCausalLM

from hf_strategies import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    StrategyTrainer,
    config_class,
    make_strategy,
    register_strategy,
)
from hf_strategies.rollout.rewards import RewardError

PROMPTS = [{"prompt": f"q{i}", "answer": "a"} for i in range(8)]


def reward(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(len(c)) for c in completions]


@pytest.fixture
def model_folder(tmp_path: Any) -> str:
    """A saved tiny model whose weights are gone: whoever reads them fails with another error."""
    make_model().save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    return str(tmp_path)


def config(**options: Any) -> GRPOConfig:
    defaults: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 4,
        "use_cpu": True,
        "report_to": [],
    }
    return GRPOConfig(**{**defaults, **options})


def grpo(model: Any, data: Any = None, reward_funcs: Any = reward, trainer: Any = None, **options: Any) -> GRPOTrainer:
    dataset = PROMPTS if data is None else data
    return GRPOTrainer(model, reward_funcs, config(**options), dataset, **(trainer or {}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, r"temperature=0.0: allowed is a number > 0"),
        ({"temperature": -1.0}, r"temperature=-1.0: allowed is a number > 0"),
        ({"temperature": float("nan")}, r"temperature=nan: allowed"),
        ({"top_p": 0.0}, r"top_p=0.0: allowed is a number > 0.0 and <= 1"),
        ({"top_p": 1.5}, r"top_p=1.5: allowed"),
        ({"epsilon": -0.1}, r"epsilon=-0.1: allowed is a number >= 0"),
        ({"beta": -1.0}, r"beta=-1.0: allowed"),
        ({"loss_type": "dpao"}, r"loss_type='dpao': allowed are 'dapo', 'grpo', 'dr_grpo', 'bnpo'"),
        ({"scale_rewards": "row"}, r"scale_rewards='row': allowed are 'group', 'batch', 'none'"),
        ({"num_iterations": 0}, r"num_iterations=0: allowed is a whole number >= 1"),
        ({"rollout_engine": "fast"}, r"rollout_engine='fast': allowed are 'auto', 'generate'"),
        ({"max_completion_length": 0}, r"max_completion_length=0: allowed"),
        ({"router_aux_loss_coef": -1.0}, r"router_aux_loss_coef=-1.0: allowed"),
    ],
)
def test_option_values(options: dict[str, Any], message: str) -> None:
    """Pitfall A-12 among others: checked when the config is made."""
    with pytest.raises(ValueError, match=message):
        config(**options)


def test_unknown_option() -> None:
    with pytest.raises(TypeError, match="num_generation_"):
        config(num_generation_=4)
    with pytest.raises(ValueError, match=r"strategy 'grpo' has no option 'epsilom', did you mean 'epsilon'"):
        make_strategy("grpo", epsilom=0.1)


def test_unknown_strategy() -> None:
    with pytest.raises(ValueError, match=r"unknown strategy 'online_gpro', did you mean 'online_grpo'"):
        StrategyTrainer("nowhere/nothing", "online_gpro")
    with pytest.raises(ValueError, match="known: seq, sft, dpo"):
        make_strategy("nonsense")
    with pytest.raises(ValueError, match="'grpo' is registered already, by GRPO"):
        register_strategy("grpo", type(make_strategy("grpo")))
    with pytest.raises(TypeError, match="not a subclass"):
        register_strategy("fresh", dict)  # type: ignore[arg-type]


def test_group_size(model_folder: str) -> None:
    """Pitfall A-22: the message lists what would do."""
    with pytest.raises(ValueError, match=r"num_generations=3 does not divide the 8 completions.*allowed.* 2, 4, 8"):
        grpo(model_folder, num_generations=3)
    with pytest.raises(ValueError, match=r"num_generations=1: .*allowed is a whole number >= 2"):
        grpo(model_folder, num_generations=1)
    with pytest.raises(ValueError, match=r"steps_per_generation=3 and gradient_accumulation_steps=2 must divide"):
        grpo(model_folder, steps_per_generation=3, gradient_accumulation_steps=2)


def test_datasets(model_folder: str) -> None:
    with pytest.raises(ValueError, match="the train dataset is empty"):
        grpo(model_folder, [])
    with pytest.raises(ValueError, match=r"has 1 prompts, one rollout takes 2"):
        grpo(model_folder, PROMPTS[:1])
    with pytest.raises(ValueError, match=r"dataset row 0: a row needs a 'prompt'.*it has \['question'\]"):
        grpo(model_folder, [{"question": "x"}] * 4)
    with pytest.raises(TypeError, match="train dataset: got IterableDataset"):
        grpo(model_folder, IterableDataset.from_generator(lambda: iter(PROMPTS)))
    with pytest.raises(ValueError, match=r"columns \['prompt'\]; one of these sets is needed: prompt, chosen"):
        DPOTrainer(
            model_folder,
            args=DPOConfig(output_dir=tempfile.mkdtemp(), use_cpu=True, report_to=[]),
            train_dataset=Dataset.from_list([{"prompt": "x"}]),
        )


def needs_gold(completions: list[str], gold: list[str]) -> list[float]:
    return [0.0] * len(completions)


def test_rewards_at_construction(model_folder: str) -> None:
    with pytest.raises(ValueError, match=r"reward 'needs_gold' asks for the column 'gold'; the dataset has \['answer"):
        grpo(model_folder, reward_funcs=needs_gold)
    online = config_class("online_grpo")(output_dir=tempfile.mkdtemp(), use_cpu=True, report_to=[])
    with pytest.raises(ValueError, match="'online_grpo' scores its own completions: reward_funcs is needed"):
        StrategyTrainer(model_folder, "online_grpo", online, PROMPTS)
    offline = config_class("grpo")(output_dir=tempfile.mkdtemp(), use_cpu=True, report_to=[])
    with pytest.raises(ValueError, match="'grpo' trains on given rows and makes no rollouts"):
        StrategyTrainer(model_folder, "grpo", offline, PROMPTS, reward_funcs=reward)
    with pytest.raises(ValueError, match="reward_weights has 2 entries, reward_funcs 1"):
        grpo(model_folder, reward_weights=[1.0, 2.0])


def test_tokenizer_and_model(model_folder: str) -> None:
    """Pitfall F-92, and sizes that do not fit."""
    chat = [{"prompt": [{"role": "user", "content": "hi"}]} for _ in range(8)]
    with pytest.raises(ValueError, match=r"dataset row 0: .*no chat_template: set tokenizer.chat_template"):
        grpo(model_folder, chat, trainer={"processing_class": make_tokenizer(chat=False)})
    with pytest.raises(ValueError, match=r"longest row has 30\d tokens .*the model holds 256"):
        grpo(model_folder, [{"prompt": "a" * 300}] * 8)
    wide = make_tokenizer()
    wide.add_tokens([f"<extra{i}>" for i in range(9)])
    with pytest.raises(ValueError, match=r"tokenizer has \d+ tokens, the model's embedding only"):
        grpo(model_folder, trainer={"processing_class": wide})


def test_the_weights_really_are_gone(model_folder: str) -> None:
    """The negative control of this file: good input does try to read them."""
    with pytest.raises(OSError, match="no file named"):
        AutoModelForCausalLM.from_pretrained(model_folder)
    with pytest.raises(OSError, match="no file named"):
        grpo(model_folder)


def test_models_that_cannot_train() -> None:
    """Pitfall A-28: an adapter loaded for inference."""
    frozen = lora(make_model())
    for parameter in frozen.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(ValueError, match=r"no trainable parameter: load the adapter with .*is_trainable=True"):
        grpo(frozen, trainer={"processing_class": make_tokenizer()})
    model = make_model()
    with pytest.raises(ValueError, match="ref_model is the policy itself"):
        grpo(model, beta=0.1, trainer={"processing_class": make_tokenizer(), "ref_model": model})


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda completions, **k: [1.0], r"reward 'broken' returned 1 values for 8 completions"),
        (lambda completions, **k: [float("inf")] * 8, r"reward 'broken' returned inf for row 0"),
        (lambda completions, **k: ["good"] * 8, r"reward 'broken' returned 'good' for row 0"),
        (lambda completions, **k: None, r"reward 'broken' returned NoneType"),
        (lambda completions, **k: [None] * 8, r"no reward returned a number for any of the first 8 completions"),
    ],
)
def test_reward_values(bad: Any, message: str) -> None:
    """Pitfall A-4 and TRL's broadcast of a list of length 1."""
    bad.__name__ = "broken"
    trainer = grpo(make_model(), reward_funcs=bad, trainer={"processing_class": make_tokenizer()}, save_strategy="no")
    with pytest.raises(RewardError, match=message):
        trainer.train()


def test_reward_that_raises_is_located() -> None:
    def touchy(completion_ids: list[list[int]], prompts: list[str], **kwargs: Any) -> list[float]:
        for prompt in prompts:
            if prompt == bad[0]:
                raise RuntimeError("cannot read this")
        return [0.0] * len(prompts)

    seen: list[str] = []
    bad = ["?"]
    trainer = grpo(
        make_model(), reward_funcs=touchy, trainer={"processing_class": make_tokenizer()}, save_strategy="no"
    )
    seen += [e["prompt"] for e in next(iter(trainer.get_train_dataloader()))["examples"]]
    bad[0] = seen[1]
    with pytest.raises(RewardError, match=r"reward 'touchy' raised RuntimeError on row 4 .*cannot read this"):
        trainer.train()
