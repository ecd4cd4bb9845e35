"""Bad input ends in an error that names it, before any weights are read."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_model, make_tokenizer
from datasets import Dataset, DatasetDict, IterableDataset
from harness import CLASSES, NAMES, ONLINE, lora, rows
from peft import LoraConfig, PeftModel, PromptTuningConfig
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertConfig,
    LlamaConfig,
    T5Config,
)

from hf_strategies import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    SFTConfig,
    SFTTrainer,
    StrategyTrainer,
    config_class,
    make_strategy,
    register_strategy,
)
from hf_strategies.modeling.reference import make_reference
from hf_strategies.rollout.rewards import RewardError

PROMPTS = [{"prompt": f"q{i}", "answer": "a"} for i in range(8)]
GROUPS = [{"prompt": f"q{i}", "completions": ["a", "bb"], "rewards": [1.0, 0.0]} for i in range(4)]
PAIRS = [{"prompt": f"q{i}", "chosen": "a", "rejected": "b"} for i in range(4)]


def reward(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(len(c)) for c in completions]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A saved tiny model whose weights are gone: whoever reads them fails with another error."""
    folder = tmp_path_factory.mktemp("model")
    make_model().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    return str(folder)


def common(**options: Any) -> dict[str, Any]:
    return {"output_dir": tempfile.mkdtemp(), "use_cpu": True, "report_to": [], "save_strategy": "no", **options}


def config(**options: Any) -> GRPOConfig:
    defaults = common(per_device_train_batch_size=8, num_generations=4, max_completion_length=4)
    return GRPOConfig(**{**defaults, **options})


def grpo(model: Any, data: Any = None, reward_funcs: Any = reward, trainer: Any = None, **options: Any) -> GRPOTrainer:
    dataset = PROMPTS if data is None else data
    return GRPOTrainer(model, reward_funcs, config(**options), dataset, **(trainer or {}))


def test_the_weights_really_are_gone(model_folder: str) -> None:
    """The negative control of this file: good input does try to read them."""
    with pytest.raises(OSError, match="no file named"):
        AutoModelForCausalLM.from_pretrained(model_folder)
    with pytest.raises(OSError, match="no file named"):
        grpo(model_folder)
    for name in NAMES:
        trainer_class, config_of = CLASSES[name]
        more = {"reward_funcs": reward} if name in ONLINE else {}
        args = config_of(**common(), **({"max_completion_length": 8} if name in ONLINE else {}))
        with pytest.raises(OSError, match="no file named"):
            trainer_class(model_folder, args=args, train_dataset=rows(name, 8), **more)


# ---- options ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, r"temperature=0.0: allowed is a number > 0"),
        ({"temperature": -1.0}, r"temperature=-1.0: allowed is a number > 0"),
        ({"temperature": float("nan")}, r"temperature=nan: allowed"),
        ({"temperature": "1"}, r"temperature='1': allowed is a number"),
        ({"temperature_eval": -0.1}, r"temperature_eval=-0.1: allowed is a number >= 0"),
        ({"top_p": 0.0}, r"top_p=0.0: allowed is a number > 0.0 and <= 1"),
        ({"top_p": 1.5}, r"top_p=1.5: allowed"),
        ({"top_k": -1}, r"top_k=-1: allowed is a whole number >= 0"),
        ({"top_k": 2.5}, r"top_k=2.5: allowed is a whole number"),
        ({"min_p": 1.5}, r"min_p=1.5: allowed is a number >= 0.0 and <= 1.0"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty=0.0: allowed is a number > 0"),
        ({"epsilon": -0.1}, r"epsilon=-0.1: allowed is a number >= 0"),
        ({"epsilon_high": -0.1}, r"epsilon_high=-0.1: allowed is a number >= 0"),
        ({"beta": -1.0}, r"beta=-1.0: allowed"),
        ({"loss_type": "dpao"}, r"loss_type='dpao': allowed are 'dapo', 'grpo', 'dr_grpo', 'bnpo'"),
        ({"scale_rewards": "row"}, r"scale_rewards='row': allowed are 'group', 'batch', 'none'"),
        ({"num_iterations": 0}, r"num_iterations=0: allowed is a whole number >= 1"),
        ({"num_generations": 0}, r"num_generations=0: allowed is a whole number >= 1"),
        ({"num_generations_eval": 0}, r"num_generations_eval=0: allowed is a whole number >= 1"),
        ({"steps_per_generation": 0}, r"steps_per_generation=0: allowed is a whole number >= 1"),
        ({"max_policy_lag": -1}, r"max_policy_lag=-1: allowed is a whole number >= 0"),
        ({"rollout_engine": "fast"}, r"rollout_engine='fast': allowed are 'auto', 'stream', 'generate'"),
        ({"rollout_batch_size": 0}, r"rollout_batch_size=0: allowed"),
        ({"max_completion_length": 0}, r"max_completion_length=0: allowed"),
        ({"min_new_tokens": 5}, r"min_new_tokens=5: allowed is at most max_completion_length=4"),
        ({"max_length": 1}, r"max_length=1: allowed is a whole number >= 2"),
        ({"router_aux_loss_coef": -1.0}, r"router_aux_loss_coef=-1.0: allowed"),
        ({"per_device_train_batch_size": 0}, r"per_device_train_batch_size=0: allowed is a whole number >= 1"),
        ({"per_device_train_batch_size": 2.5}, r"per_device_train_batch_size=2.5: allowed is a whole number"),
        ({"per_device_eval_batch_size": 0}, r"per_device_eval_batch_size=0: allowed is a whole number >= 1"),
        ({"gradient_accumulation_steps": 0}, r"gradient_accumulation_steps=0: allowed is a whole number >= 1"),
        ({"gradient_accumulation_steps": -1}, r"gradient_accumulation_steps=-1: allowed is a whole number >= 1"),
        ({"learning_rate": "1e-5"}, r"learning_rate='1e-5': allowed is a number"),
        ({"learning_rate": float("nan")}, r"learning_rate=nan: allowed is a number >= 0"),
        ({"weight_decay": -0.1}, r"weight_decay=-0.1: allowed is a number >= 0"),
        ({"max_grad_norm": -1.0}, r"max_grad_norm=-1.0: allowed is a number >= 0"),
        ({"num_train_epochs": 0}, r"num_train_epochs=0: allowed is a number > 0"),
        ({"max_steps": 0}, r"max_steps=0: allowed is a whole number >= 1, or -1 for as many as num_train_epochs"),
        ({"max_steps": -2}, r"max_steps=-2: allowed is a whole number >= 1, or -1"),
        ({"seed": -1}, r"seed=-1: allowed is a whole number >= 0"),
        ({"seed": 2**32}, r"seed=4294967296: allowed is a whole number >= 0 and <= 4294967295"),
        ({"data_seed": -1}, r"data_seed=-1: allowed is a whole number >= 0"),
        ({"dataloader_num_workers": -1}, r"dataloader_num_workers=-1: allowed is a whole number >= 0"),
        ({"label_smoothing_factor": 0.1}, r"label_smoothing_factor=0.1: allowed is 0, .*; seq and sft have label_smo"),
        ({"remove_unused_columns": True}, r"remove_unused_columns=True: allowed are False"),
        ({"train_sampling_strategy": "group_by_length"}, r"train_sampling_strategy='group_by_length': allowed are"),
        ({"train_sampling_strategy": "sequential"}, r"train_sampling_strategy='sequential': allowed are 'random'$"),
        ({"accelerator_config": {"dispatch_batches": True}}, r"dispatch_batches=True: allowed are False and None"),
        ({"model_init_kwargs": "{bad"}, r"model_init_kwargs='{bad' is no JSON"),
        ({"model_init_kwargs": [1]}, r"model_init_kwargs=\[1\]: allowed is a dict, as JSON, or None"),
        ({"disable_dropout": "yes"}, r"disable_dropout='yes': allowed is True or False or None"),
        ({"low_memory": "yes"}, r"low_memory='yes': allowed is True or False$"),
        ({"stop_strings": "abc"}, r"stop_strings='abc': allowed is a list of texts or None"),
        ({"reward_weights": "1"}, r"reward_weights='1': allowed is a list of numbers or None"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_option_values(options: dict[str, Any], message: str) -> None:
    """Pitfall A-12 among others: checked when the config is made."""
    with pytest.raises(ValueError, match=message):
        config(**options)


def test_offline_rows_may_keep_their_order() -> None:
    assert SFTConfig(**common(train_sampling_strategy="sequential")).train_sampling_strategy == "sequential"
    assert SFTConfig(**common(model_init_kwargs='{"dtype": "float16"}')).model_init_kwargs == {"dtype": "float16"}


def test_unknown_option() -> None:
    with pytest.raises(TypeError, match="num_generation_"):
        config(num_generation_=4)
    with pytest.raises(ValueError, match=r"strategy 'grpo' has no option 'epsilom', did you mean 'epsilon'"):
        make_strategy("grpo", epsilom=0.1)
    for name in ("num_gen", "compute_metrics", "compute_loss_func", "quantization_config"):
        with pytest.raises(TypeError, match=rf"GRPOTrainer: {name}= is not supported; further ones are \('data_coll"):
            grpo("nowhere/nothing", trainer={name: print})


def test_arguments_that_are_none_are_not_given(model_folder: str) -> None:
    with pytest.raises(OSError, match="no file named"):
        grpo(model_folder, trainer={"compute_metrics": None, "callbacks": None, "peft_config": None})


def test_unknown_strategy() -> None:
    with pytest.raises(ValueError, match=r"unknown strategy 'online_gpro', did you mean 'online_grpo'"):
        StrategyTrainer("nowhere/nothing", "online_gpro")
    with pytest.raises(ValueError, match="known: seq, sft, dpo"):
        make_strategy("nonsense")
    with pytest.raises(ValueError, match="'grpo' is registered already, by GRPO"):
        register_strategy("grpo", type(make_strategy("grpo")))
    with pytest.raises(TypeError, match="not a subclass"):
        register_strategy("fresh", dict)  # type: ignore[arg-type]


def test_a_config_of_another_strategy() -> None:
    with pytest.raises(
        TypeError, match=r"args of strategy 'online_grpo': got SFTConfig, see config_class\('online_gr"
    ):
        GRPOTrainer("nowhere/nothing", reward, SFTConfig(**common()), PROMPTS)


# ---- group sizes ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_generations": 3}, r"num_generations=3 does not divide the 8 completions.*allowed.* are 2, 4, 8$"),
        (
            {"num_generations": 16},
            r"num_generations=16 does not divide the 8 completions of a rollout \(per_device_train_batch_size=8 \* "
            r"steps_per_generation=1\): allowed num_generations are 2, 4, 8$",
        ),
        (
            {"num_generations": 5, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 6},
            r"does not divide the 12 completions.*allowed num_generations are 2, 3, 4, 6, 12$",
        ),
        (
            {"num_generations": 8, "per_device_train_batch_size": 1},
            r"does not divide the 1 completions.*: raise per_device_train_batch_size or steps_per_generation",
        ),
        ({"num_generations": 1}, r"num_generations=1: .*allowed is a whole number >= 2"),
        (
            {"steps_per_generation": 3, "gradient_accumulation_steps": 2},
            r"steps_per_generation=3 and gradient_accumulation_steps=2 must divide one another: allowed "
            r"steps_per_generation are 1, 2, 4, 6, 8 and further multiples of 2",
        ),
        (
            {"steps_per_generation": 4, "gradient_accumulation_steps": 6},
            "allowed steps_per_generation are 1, 2, 3, 6, 12, 18, 24 and further multiples of 6",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_group_size(options: dict[str, Any], message: str) -> None:
    """Pitfall A-22: the message lists what would do; nothing of the model is read for it."""
    with pytest.raises(ValueError, match=message):
        grpo("nowhere/nothing", **options)


@pytest.mark.parametrize("name", ["online_grpo", "online_dpo"])
def test_every_valid_group_size_is_taken(name: str, model_folder: str) -> None:
    """What the message lists does work, and so do groups of one where no row is compared with another."""
    trainer_class, config_of = CLASSES[name]
    for size in (2, 4, 8):
        args = config_of(**common(per_device_train_batch_size=8, num_generations=size, max_completion_length=4))
        with pytest.raises(OSError, match="no file named"):
            trainer_class(model_folder, reward_funcs=reward, args=args, train_dataset=PROMPTS)
    ppo, ppo_config = CLASSES["online_ppo"]
    args = ppo_config(**common(num_generations=1, max_completion_length=4))
    with pytest.raises(OSError, match="no file named"):
        ppo(model_folder, reward_funcs=reward, args=args, train_dataset=PROMPTS)


# ---- datasets ----


def test_datasets_of_prompts(model_folder: str) -> None:
    """Pitfall A-24: a streaming dataset would bypass the sampler that keeps groups together."""
    with pytest.raises(ValueError, match="the train dataset is empty"):
        grpo(model_folder, [])
    with pytest.raises(ValueError, match="the eval dataset is empty"):
        grpo(model_folder, trainer={"eval_dataset": Dataset.from_list([])})
    with pytest.raises(ValueError, match=r"has 1 prompts, one rollout takes 2 .*add prompts or lower these"):
        grpo(model_folder, PROMPTS[:1])
    with pytest.raises(ValueError, match=r"has 8 prompts, one rollout takes 12 \(per_device_train_batch_size=8 \* "):
        grpo(model_folder, gradient_accumulation_steps=6)
    with pytest.raises(ValueError, match=r"dataset row 0: a row needs a 'prompt'.*it has \['question'\]"):
        grpo(model_folder, [{"question": "x"}] * 4)
    with pytest.raises(TypeError, match="train dataset: got IterableDataset"):
        grpo(model_folder, IterableDataset.from_generator(lambda: iter(PROMPTS)))
    with pytest.raises(TypeError, match="eval_hard dataset: got generator"):
        grpo(model_folder, trainer={"eval_dataset": {"easy": PROMPTS, "hard": (p for p in PROMPTS)}})
    with pytest.raises(
        TypeError, match=r"train dataset: got DatasetDict, allowed are a map-style datasets.Dataset or"
    ):
        grpo(model_folder, DatasetDict(train=Dataset.from_list(PROMPTS)))


def test_a_dataset_that_just_fills_a_rollout(model_folder: str) -> None:
    with pytest.raises(OSError, match="no file named"):
        grpo(model_folder, PROMPTS[:2])


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        (
            "dpo",
            [{"prompt": "x"}],
            r"columns \['prompt'\]; one of these sets is needed: prompt, chosen, rejected; pro",
        ),
        ("dpo", [{"text": "x"}], r"columns \['text'\]; one of these sets is needed: prompt, chosen"),
        ("grpo", PROMPTS, r"columns \['answer', 'prompt'\]; one of these sets is needed: .*prompt, completions, rewa"),
        ("sft", PAIRS, r"columns \['chosen', 'prompt', 'rejected'\]; one of these sets is needed: prompt, completion"),
        ("seq", GROUPS, r"columns \['completions', 'prompt', 'rewards'\]; one of these sets"),
        ("sft", [{"prompt": "a" * 300, "completion": "b"}], r"no row .* can train \(1 rows, dropped: \{'prompt_too_l"),
        ("grpo", [{**GROUPS[0], "rewards": [1.0]}], "dataset row 0: rewards has 1 entries for 2 completions"),
        ("grpo", [{**GROUPS[0], "completions": ["a"], "rewards": [1.0]}], "dropped: {'group_too_small': 1}"),
        (
            "grpo",
            [{**GROUPS[0], "old_logprobs": [[-1.0, -1.0], [-1.0, -1.0, -1.0]]}, {**GROUPS[1], "old_logprobs": None}],
            "old_logprobs is given in 1 of 2 rows: give it in all of them or none",
        ),
    ],
)
def test_datasets_of_given_rows(name: str, data: list[dict[str, Any]], message: str, model_folder: str) -> None:
    """Pitfalls C-55, D-66: what is missing or cannot train is said, with the columns there are."""
    trainer_class, config_of = CLASSES[name]
    with pytest.raises(ValueError, match=message):
        trainer_class(model_folder, args=config_of(**common(max_length=64)), train_dataset=data)


def test_lists_of_rows(model_folder: str) -> None:
    """A column that the first row lacks is a column; what is no row, or no column, is named."""
    with pytest.raises(TypeError, match="eval_a dataset row 1: got str, allowed is a dict"):
        grpo(model_folder, trainer={"eval_dataset": {"a": [PROMPTS[0], "q"]}})
    with pytest.raises(ValueError, match="the train dataset has no columns"):
        grpo(model_folder, [{}] * 4)
    with pytest.raises(ValueError, match="train dataset, column 'answer': its values make no column of one type"):
        grpo(model_folder, [*PROMPTS, {"prompt": "a", "answer": 5}])
    with pytest.raises(ValueError, match=r"train dataset, column 'prompt': its values make .* surrogates not allowed"):
        grpo(model_folder, [*PROMPTS, {"prompt": "a\ud800", "answer": "a"}])
    with pytest.raises(ValueError, match=r"eval_dataset=\{\}: allowed is a dataset, or a dict of at least one"):
        grpo(model_folder, trainer={"eval_dataset": {}})
    with pytest.raises(ValueError, match=r"eval_b dataset row 1: prompt '' has no tokens"):
        grpo(model_folder, trainer={"eval_dataset": {"b": [PROMPTS[0], {"prompt": "", "answer": "a"}]}})
    old = {"old_logprobs": [[-1.0, -1.0], [-1.0, -1.0, -1.0]]}
    with pytest.raises(ValueError, match="old_logprobs is given in 3 of 4 rows"):
        GRPOTrainer(model_folder, None, config(), [GROUPS[0], *({**group, **old} for group in GROUPS[1:])])
    seen: list[Any] = []

    def spy(completions: list[str], hint: list[Any], **kwargs: Any) -> list[float]:
        seen.extend(hint)
        return [0.0] * len(completions)

    hinted = [PROMPTS[0], *({**row, "hint": "h"} for row in PROMPTS[1:])]
    trainer = grpo(make_model(), hinted, spy, {"processing_class": make_tokenizer()}, num_train_epochs=1)
    trainer.train()
    assert sorted(set(seen), key=str) == [None, "h"]


def test_ids_of_another_tokenizer(model_folder: str) -> None:
    for name in ("sft", "seq"):
        trainer_class, config_of = CLASSES[name]
        with pytest.raises(
            ValueError, match=r"a row holds the token id 999, the model's embedding has \d+: was it enc"
        ):
            trainer_class(model_folder, args=config_of(**common()), train_dataset=[{"input_ids": [1, 999]}])


def test_dropped_rows_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    """Pitfall D-66: counted by reason and by dataset, and said."""
    data = [{"prompt": "a" * n, "completion": "b"} for n in (2, 70, 3, 80)]
    with caplog.at_level(logging.WARNING):
        trainer = SFTTrainer(
            make_model(),
            SFTConfig(**common(max_length=64)),
            data,
            eval_dataset={"one": data[:2], "two": data[2:3]},
            processing_class=make_tokenizer(),
        )
    assert trainer.dropped == {"train": {"prompt_too_long": 2}, "eval_one": {"prompt_too_long": 1}}
    assert "train dataset: left out {'prompt_too_long': 2}" in caplog.text
    assert len(trainer.train_dataset) == 2


def test_columns_that_the_prompt_does_without_are_said(caplog: pytest.LogCaptureFixture) -> None:
    """Images are for models that see."""
    with caplog.at_level(logging.WARNING):
        GRPOTrainer(make_model(), reward, config(), PROMPTS, processing_class=make_tokenizer())
        assert "does not go into the prompt" not in caplog.text
        described = [{**row, "image": "a.png"} for row in PROMPTS]
        GRPOTrainer(make_model(), reward, config(), described, processing_class=make_tokenizer())
    assert "train dataset: the column 'image' does not go into the prompt" in caplog.text


def test_scored_groups_without_recorded_logprobs_are_said(caplog: pytest.LogCaptureFixture) -> None:
    def build(data: list[dict[str, Any]]) -> None:
        GRPOTrainer(make_model(), None, config(), data, processing_class=make_tokenizer())

    with caplog.at_level(logging.WARNING):
        build([{**g, "old_logprobs": [[-1.0, -1.0], [-1.0, -1.0, -1.0]]} for g in GROUPS])
        assert "old_logprobs" not in caplog.text
        build(GROUPS)
    assert caplog.text.count("the scored groups have no old_logprobs") == 1


# ---- rewards ----


def needs_gold(completions: list[str], gold: list[str]) -> list[float]:
    return [0.0] * len(completions)


def needs_prompt(completions: list[str], prompt: list[str]) -> list[float]:
    return [0.0] * len(completions)


def test_rewards_at_construction(model_folder: str) -> None:
    message = r"reward 'needs_gold' asks for the column 'gold'; the train dataset has \['answer'\] beside the prompt"
    with pytest.raises(ValueError, match=message):
        grpo(model_folder, reward_funcs=needs_gold)
    with_gold = [{**row, "gold": "g"} for row in PROMPTS]
    with pytest.raises(ValueError, match=r"asks for the column 'gold'; the eval dataset has \['answer'\]"):
        grpo(model_folder, with_gold, reward_funcs=[reward, needs_gold], trainer={"eval_dataset": PROMPTS})
    with pytest.raises(OSError, match="no file named"):
        grpo(model_folder, with_gold, reward_funcs=[reward, needs_gold], trainer={"eval_dataset": with_gold})
    # Rewards get `prompts`; a parameter `prompt` would find nothing.
    with pytest.raises(ValueError, match=r"reward 'needs_prompt' asks for .* every reward is offered .*prompts"):
        grpo(model_folder, reward_funcs=needs_prompt)
    with pytest.raises(ValueError, match="reward_weights has 2 entries, reward_funcs 1"):
        grpo(model_folder, reward_weights=[1.0, 2.0])
    with pytest.raises(ValueError, match=r"reward_weights=\[0.0\]: all are 0, nothing would be learned"):
        grpo(model_folder, reward_weights=[0.0])
    with pytest.raises(ValueError, match="reward_funcs is empty"):
        grpo(model_folder, reward_funcs=[])
    with pytest.raises(TypeError, match="reward_funcs: 3 cannot be called"):
        grpo(model_folder, reward_funcs=[reward, 3])
    with pytest.raises(TypeError, match="reward_funcs: LlamaForCausalLM gives no score"):
        grpo(model_folder, reward_funcs=make_model())
    scorer = AutoModelForSequenceClassification.from_config(make_model().config)
    with pytest.raises(
        ValueError, match="reward_processing_classes is needed: LlamaForSequenceClassification does not"
    ):
        grpo(model_folder, reward_funcs=scorer)
    with pytest.raises(
        ValueError, match="reward_funcs: '/nowhere' cannot be loaded as a sequence-classification model"
    ):
        grpo(model_folder, reward_funcs="/nowhere")
    with pytest.raises(TypeError, match="reward_funcs: <class 'dict'> does not say which parameters it takes"):
        grpo(model_folder, reward_funcs=dict)
    with pytest.raises(ValueError, match=r"names must differ, got \['reward'\] twice"):
        grpo(model_folder, reward_funcs=[reward, reward])


def test_rewards_missing_or_superfluous() -> None:
    online = config_class("online_grpo")(**common())
    with pytest.raises(ValueError, match="'online_grpo' scores its own completions: reward_funcs is needed"):
        StrategyTrainer("nowhere/nothing", "online_grpo", online, PROMPTS)
    for name in ("online_dpo", "online_ppo"):
        trainer_class, config_of = CLASSES[name]
        with pytest.raises(ValueError, match=f"'{name}' scores its own completions: reward_funcs is needed"):
            trainer_class("nowhere/nothing", args=config_of(**common()), train_dataset=PROMPTS)
    offline = config_class("grpo")(**common())
    with pytest.raises(ValueError, match="'grpo' trains on given rows and makes no rollouts"):
        StrategyTrainer("nowhere/nothing", "grpo", offline, GROUPS, reward_funcs=reward)
    with pytest.raises(ValueError, match="'dpo' trains on given rows and makes no rollouts: leave reward_funcs out"):
        DPOTrainer("nowhere/nothing", None, DPOConfig(**common()), PAIRS, reward_funcs=reward)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda completions, **k: [1.0], r"reward 'broken' returned 1 values for 8 completions"),
        (lambda completions, **k: [float("inf")] * 8, r"reward 'broken' returned inf for row 0"),
        (lambda completions, **k: [1e30] * 8, r"reward 'broken' returned 1e\+30 for row 0: allowed is at most 1e\+18"),
        (lambda completions, **k: ["good"] * 8, r"reward 'broken' returned 'good' for row 0"),
        (lambda completions, **k: None, r"reward 'broken' returned NoneType"),
        (lambda completions, **k: [None] * 8, r"no reward returned a number for any of the first 8 completions"),
    ],
    ids=["short", "inf", "huge", "text", "none", "all none"],
)
def test_reward_values(bad: Any, message: str) -> None:
    """Pitfall A-4 and TRL's broadcast of a list of length 1."""
    bad.__name__ = "broken"
    trainer = grpo(make_model(), reward_funcs=bad, trainer={"processing_class": make_tokenizer()})
    with pytest.raises(RewardError, match=message):
        trainer.train()


def test_reward_that_raises_is_located() -> None:
    def touchy(completion_ids: list[list[int]], prompts: list[str], **kwargs: Any) -> list[float]:
        for prompt in prompts:
            if prompt == bad[0]:
                raise RuntimeError("cannot read this")
        return [0.0] * len(prompts)

    bad = ["?"]
    trainer = grpo(make_model(), reward_funcs=touchy, trainer={"processing_class": make_tokenizer()})
    bad[0] = next(iter(trainer.get_train_dataloader()))["examples"][1]["prompt"]
    with pytest.raises(RewardError, match=r"reward 'touchy' raised RuntimeError on row 4 .*cannot read this"):
        trainer.train()


# ---- tokenizer and model ----


def test_tokenizer_and_model(model_folder: str) -> None:
    """Pitfall F-92, and sizes that do not fit."""
    chat = [{"prompt": [{"role": "user", "content": "hi"}]} for _ in range(8)]
    bare = {"processing_class": make_tokenizer(chat=False)}
    with pytest.raises(ValueError, match=r"dataset row 0: .*no chat_template: set tokenizer.chat_template"):
        grpo(model_folder, chat, trainer=bare)
    with pytest.raises(ValueError, match=r"dataset row 0: .*no chat_template: set tokenizer.chat_template"):
        SFTTrainer(model_folder, SFTConfig(**common()), [{"messages": row["prompt"]} for row in chat], **bare)
    with pytest.raises(OSError, match="no file named"):  # plain rows need none
        grpo(model_folder, trainer=bare)
    with pytest.raises(ValueError, match=r"longest row has 301 tokens \(prompt and completion\), the model holds 256"):
        grpo(model_folder, [*PROMPTS, {"prompt": "a" * 297, "answer": ""}])
    with pytest.raises(ValueError, match=r"longest row has 301 tokens .*the model holds 256"):
        grpo(model_folder, trainer={"eval_dataset": [{"prompt": "a" * 297, "answer": ""}]})
    with pytest.raises(OSError, match="no file named"):  # 252 + 4 fit exactly
        grpo(model_folder, [*PROMPTS, {"prompt": "a" * 252, "answer": ""}])
    with pytest.raises(ValueError, match=r"longest row has 301 tokens .*the model holds 256"):
        SFTTrainer(model_folder, SFTConfig(**common(max_length=None)), [{"text": "a" * 300}])
    wide = make_tokenizer()
    wide.add_tokens([f"<extra{i}>" for i in range(9)])
    with pytest.raises(ValueError, match=r"tokenizer has \d+ tokens, the model's embedding only \d+: resize"):
        grpo(model_folder, trainer={"processing_class": wide})
    endless = make_tokenizer()
    endless.pad_token = endless.eos_token = None
    with pytest.raises(ValueError, match="the tokenizer has neither pad_token nor eos_token"):
        grpo(model_folder, trainer={"processing_class": endless})


def test_models_of_the_wrong_kind() -> None:
    with pytest.raises(TypeError, match="model: got Linear, allowed are an id or path, PreTrainedModel, PeftModel"):
        grpo(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="processing_class is not given and the model does not say which tokenizer"):
        grpo(make_model())
    with pytest.raises(ValueError, match="peft_config is given together with a PeftModel: pass one of them"):
        grpo(lora(make_model()), trainer={"processing_class": make_tokenizer(), "peft_config": LoraConfig(r=2)})


def test_adapters_that_do_not_train(tmp_path: Path) -> None:
    """Pitfall A-28: an adapter loaded for inference, as `from_pretrained` does unless told otherwise."""
    lora(make_model()).save_pretrained(tmp_path)
    frozen = PeftModel.from_pretrained(make_model(), tmp_path)
    with pytest.raises(ValueError, match=r"no trainable parameter: load the adapter with .*is_trainable=True"):
        grpo(frozen, trainer={"processing_class": make_tokenizer()})
    trained = PeftModel.from_pretrained(make_model(), tmp_path, is_trainable=True)
    assert grpo(trained, trainer={"processing_class": make_tokenizer()}).model is trained
    with pytest.raises(ValueError, match=r"has no trainable parameter$"):
        grpo(make_model().requires_grad_(False), trainer={"processing_class": make_tokenizer()})


def test_runs_that_would_end_late(tmp_path: Path, model_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Trainer says after the weights are loaded, or at the end of the run."""
    for options in ({"eval_strategy": "steps"}, {"eval_strategy": "epoch"}, {"eval_on_start": True}):
        name = next(iter(options))
        with pytest.raises(ValueError, match=f"eval_dataset is not given, and {name}.* asks for evaluations"):
            grpo(model_folder, **options)
        with pytest.raises(OSError, match="no file named"):
            grpo(model_folder, trainer={"eval_dataset": PROMPTS}, **options)
    with pytest.raises(ValueError, match=r"load_best_model_at_end=True: which one is best .* set eval_strategy"):
        grpo(model_folder, trainer={"eval_dataset": PROMPTS}, load_best_model_at_end=True)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ValueError, match=r"output_dir='.*file': allowed is a folder, this is a file"):
        grpo(model_folder, output_dir=str(file))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("hf_strategies.trainers.checks.get_token", lambda: None)
    with pytest.raises(ValueError, match="push_to_hub=True needs a token"):
        grpo(model_folder, push_to_hub=True)
    with pytest.raises(OSError, match="no file named"):
        grpo(model_folder, push_to_hub=True, hub_token="a")


@pytest.mark.parametrize("name", ["sft", "seq", "dpo", "grpo"])
def test_batches_that_are_all_dropped(name: str, model_folder: str) -> None:
    trainer_class, config_of = CLASSES[name]

    def build(batch: int) -> None:
        args = config_of(**common(dataloader_drop_last=True, per_device_train_batch_size=batch, max_length=4))
        trainer_class(model_folder, args=args, train_dataset=data)

    data = [{"text": "abc"}] * 8 if name == "seq" else rows(name, 8)
    if name in ("dpo", "grpo", "sft"):
        data = [{**row, "prompt": "a"} for row in data]
    with pytest.raises(ValueError, match=r"dataloader_drop_last=True drops all 8 rows .*: a batch takes 9 "):
        build(9)
    with pytest.raises(OSError, match="no file named"):
        build(8)


def test_models_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model='/nowhere/nothing' is no folder of a model with a config.json"):
        grpo("/nowhere/nothing")
    with pytest.raises(ValueError, match=r"model='.*' is no folder of a model with a config.json"):
        grpo(str(tmp_path))
    lora(make_model()).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"model='.*' is an adapter: to train it on, load it with AutoPeftModelForCaus"
    ):
        grpo(str(tmp_path))
    with pytest.raises(TypeError, match="processing_class: got str, allowed is a tokenizer"):
        grpo(make_model(), trainer={"processing_class": "name"})


@pytest.mark.parametrize("kind", [AutoModel, AutoModelForSequenceClassification, AutoModelForMaskedLM])
def test_models_that_are_no_causal_lm(kind: Any, tmp_path: Path) -> None:
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    settings = BertConfig(vocab_size=60, **small) if kind is AutoModelForMaskedLM else LlamaConfig(**small)
    model = kind.from_config(settings)
    with pytest.raises(ValueError, match=f"model: {type(model).__name__} is no causal LM"):
        grpo(model, trainer={"processing_class": make_tokenizer()})
    T5Config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="model: t5 is no causal LM; load it with AutoModelForCausalLM"):
        grpo(str(tmp_path), trainer={"processing_class": make_tokenizer()})


def test_adapters_that_cannot_be_trained(model_folder: str) -> None:
    for given, error, message in (
        ({"r": 4}, TypeError, "peft_config: got dict, allowed is a PeftConfig"),
        ("lora", TypeError, "peft_config: got str, allowed is a PeftConfig"),
        (PromptTuningConfig(num_virtual_tokens=2), ValueError, "peft_config: PromptTuningConfig adds tokens to every"),
        (LoraConfig(inference_mode=True), ValueError, "peft_config.inference_mode=True: allowed is False"),
    ):
        with pytest.raises(error, match=message):
            grpo(model_folder, trainer={"peft_config": given})


@pytest.mark.parametrize("config", [None, LoraConfig(r=2, target_modules="all-linear")], ids=["alone", "another"])
def test_adapters_without_their_model(config: LoraConfig | None) -> None:
    """An adapter put on top would silently take the place of the trained one."""
    more = {"processing_class": make_tokenizer(), "peft_config": config}
    with pytest.raises(
        ValueError, match="holds adapter layers of another PeftModel: give that PeftModel, or merge it"
    ):
        grpo(lora(make_model()).get_base_model(), trainer=more)
    merged = grpo(lora(make_model()).merge_and_unload().requires_grad_(True), trainer=more).model
    trained = [name for name, parameter in merged.named_parameters() if parameter.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained) == (config is not None)


def test_several_active_adapters() -> None:
    model = lora(make_model())
    model.add_adapter("second", LoraConfig(r=2, target_modules="all-linear"))
    more = {"processing_class": make_tokenizer()}
    assert grpo(model, trainer=more).model is model
    model.base_model.set_adapter(["default", "second"])
    with pytest.raises(ValueError, match=r"several active adapters, \['default', 'second'\]: allowed is one"):
        grpo(model, trainer=more)


def test_references_that_cannot_score(model_folder: str) -> None:
    def build(reference: Any) -> None:
        DPOTrainer(model_folder, reference, DPOConfig(**common()), PAIRS)

    with pytest.raises(TypeError, match="ref_model: got str, allowed are a PreTrainedModel, PeftModel"):
        build("nowhere/nothing")
    with pytest.raises(TypeError, match="ref_model: got Linear"):
        build(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"ref_model: the tokenizer has \d+ tokens, the model's embedding only 20"):
        build(make_model(vocab_size=20))
    with pytest.raises(ValueError, match=r"ref_model: the longest row has 4 tokens .*, the model holds 3"):
        build(make_model(max_position_embeddings=3))
    with pytest.raises(OSError, match="no file named"):
        build(make_model())


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
def test_the_policy_as_its_own_reference(adapter: bool, beta: float) -> None:
    """A new adapter is put into the very model that was given as the reference."""
    model = make_model()
    more: dict[str, Any] = {"processing_class": make_tokenizer(), "ref_model": model}
    if adapter:
        more["peft_config"] = LoraConfig(r=2, target_modules="all-linear")
    with pytest.raises(ValueError, match="ref_model is the policy itself"):
        grpo(model, beta=beta, trainer=more)
    base = make_model()
    with pytest.raises(ValueError, match="ref_model is the policy itself"):
        make_reference(lora(base), base)


def test_a_reference_that_is_not_used_is_said(caplog: pytest.LogCaptureFixture) -> None:
    more = {"processing_class": make_tokenizer(), "ref_model": make_model(seed=1)}
    with caplog.at_level(logging.WARNING):
        grpo(make_model(), beta=0.1, trainer=more)
        assert "ref_model" not in caplog.text
        grpo(make_model(), beta=0.0, trainer=more)
    assert "ref_model is not used: online_grpo compares with no reference under these options" in caplog.text


def test_the_callers_objects_stay_as_they_are() -> None:
    """Lists and dicts of the caller are read, not changed."""
    data = [dict(row) for row in PROMPTS]
    functions, weights, init = [reward], [0.5], {"dtype": torch.float32}
    grpo(
        make_model(),
        data,
        functions,
        {"processing_class": make_tokenizer(), "eval_dataset": {"a": data[:2]}},
        reward_weights=weights,
        model_init_kwargs=init,
    )
    assert data == PROMPTS
    assert (functions, weights, init) == ([reward], [0.5], {"dtype": torch.float32})
