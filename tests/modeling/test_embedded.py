"""The embedded model, for real."""

from __future__ import annotations

import tempfile

import pytest
import torch
from harness import gradients
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from hf_strategies import GRPOConfig, GRPOTrainer
from hf_strategies.data.demo import demo_task, divided_numbers, mean_interval
from hf_strategies.data.reasoning import lenient_answer, load_reasoning_gym, strict_answer
from hf_strategies.modeling.embedded import embedded_model_path


def test_demo_task_divides_the_numbers() -> None:
    task = demo_task(seed=3, train_problems=300)
    assert task.heldout is not None
    assert len(task.train) == 300
    assert len(task.heldout) == 256

    def numbers(rows: object) -> set[int]:
        questions = [row["prompt"][-1]["content"] for row in rows]  # type: ignore[attr-defined]
        assert len(set(questions)) == len(questions)
        return {int(number) for question in questions for number in question.split(" + ")}

    train, heldout = divided_numbers()
    assert numbers(task.train) <= set(train)
    assert numbers(task.heldout) <= set(heldout)
    assert not set(train) & set(heldout)
    row = task.train[0]
    accuracy, form = task.rewards
    texts = [f"sum\nAnswer: {row['answer']}", f"it is {row['answer']}", "Answer: 1", f"Answer: {row['answer']}\nbye"]
    columns = {"task": [row["task"]] * 4, "entry": [row["entry"]] * 4}
    assert accuracy(completions=texts, **columns) == [1.0, 0.0, 0.0, 0.0]
    assert form(completions=texts) == [1.0, 0.0, 1.0, 0.0]


def test_parsers() -> None:
    assert strict_answer("a\nAnswer: 12\n\n") == "12"
    assert strict_answer("Answer: 12\nso") is None
    assert strict_answer("") is None
    assert lenient_answer("Answer: 12\nso 13") == "12"
    assert lenient_answer("it is 12, or -13") == "-13"
    assert lenient_answer("none") is None


def test_unknown_task_names_near_ones() -> None:
    with pytest.raises(ValueError, match=r"no task 'chain_sums'.*near: .*chain_sum"):
        load_reasoning_gym("reasoning_gym:chain_sums", 2, 0)


def test_intervals() -> None:
    """Wilson for 8 of 10: centre (0.8 + 1.9207 / 10) / (1 + 3.8415 / 10), half width 0.2268."""
    low, high = mean_interval([1.0] * 8 + [0.0] * 2)
    assert (low, high) == pytest.approx((0.4902, 0.9433), abs=1e-3)
    low, high = mean_interval([0.1, 0.2, 0.3])
    assert (low + high) / 2 == pytest.approx(0.2)
    assert mean_interval([0.5, 0.5, 0.5]) == (0.5, 0.5)


@pytest.mark.slow
def test_real_model_one_grpo_step() -> None:
    """The embedded model answers, trains one step on the demo task, and its adapter loads with plain peft."""
    path = embedded_model_path()
    folder = tempfile.mkdtemp()
    task = demo_task(seed=1, train_problems=16)
    captured: list[dict[str, torch.Tensor]] = []

    class Capture(TrainerCallback):
        def on_pre_optimizer_step(self, args: object, state: object, control: object, **kwargs: object) -> None:
            captured.append(gradients(kwargs["model"]))  # type: ignore[arg-type]

    args = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=8,
        num_generations=8,
        max_completion_length=16,
        max_steps=1,
        logging_steps=1,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        learning_rate=1e-3,
    )
    trainer = GRPOTrainer(
        str(path),
        task.rewards,
        args,
        task.train,
        peft_config=LoraConfig(target_modules="all-linear"),
        callbacks=[Capture()],
    )
    trainer.train()
    trainer.save_model()
    assert any(bool(g.abs().max() > 0) for name, g in captured[0].items() if "lora_B" in name)
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    loaded = PeftModel.from_pretrained(base, folder).eval()
    ids = torch.tensor([tokenizer("7 + 5 =")["input_ids"]])
    with torch.no_grad():
        expected = trainer.model.eval()(ids).logits
        torch.testing.assert_close(loaded(ids).logits, expected, atol=1e-4, rtol=1e-4)
        with loaded.disable_adapter():
            assert not torch.allclose(loaded(ids).logits, expected, atol=1e-4)
