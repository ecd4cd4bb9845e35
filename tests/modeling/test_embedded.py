"""The embedded model, for real."""

from __future__ import annotations

import tempfile

import pytest
import torch
from harness import gradients
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from hf_strategies import GRPOConfig, GRPOTrainer
from hf_strategies.data.demo import demo_task
from hf_strategies.modeling.embedded import embedded_model_path


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
