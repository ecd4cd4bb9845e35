"""A run's tokenizer: template and special tokens as the config says."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import CHAT_TEMPLATE, END, make_model, make_tokenizer

from hf_strategies import SFTConfig, SFTTrainer
from hf_strategies.modeling.tokenizer import adapt_tokenizer, read_chat_template


def test_missing_pad_becomes_eos() -> None:
    tokenizer = make_tokenizer()
    tokenizer.pad_token = None
    assert adapt_tokenizer(tokenizer).pad_token == "<eos>"
    tokenizer.pad_token = tokenizer.eos_token = None
    with pytest.raises(ValueError, match="neither pad_token nor eos_token"):
        adapt_tokenizer(tokenizer)
    with pytest.raises(TypeError, match="processing_class: got int, allowed is a tokenizer"):
        adapt_tokenizer(3)  # type: ignore[arg-type]


def test_other_special_tokens() -> None:
    tokenizer = adapt_tokenizer(make_tokenizer(), eos_token="<end>", pad_token="<end>")
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == END
    for name in ("eos_token", "pad_token"):
        with pytest.raises(ValueError, match=f"{name}='<nowhere>': allowed is a token of the tokenizer's vocabulary"):
            adapt_tokenizer(make_tokenizer(), **{name: "<nowhere>"})


def test_templates_come_from_files_and_tokenizers(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(CHAT_TEMPLATE + "a")
    assert read_chat_template(str(tmp_path / "chat.jinja")) == CHAT_TEMPLATE + "a"
    make_tokenizer().save_pretrained(tmp_path / "with")
    make_tokenizer(chat=False).save_pretrained(tmp_path / "without")
    assert read_chat_template(str(tmp_path / "with")) == CHAT_TEMPLATE
    with pytest.raises(
        ValueError, match=r"chat_template_path='.*without': that tokenizer has no single chat_template"
    ):
        read_chat_template(str(tmp_path / "without"))
    with pytest.raises(ValueError, match=r"chat_template_path='.*nowhere' is neither a file nor a folder or id"):
        read_chat_template(str(tmp_path / "nowhere"))


def test_a_run_saves_the_tokenizer_that_it_used(tmp_path: Path) -> None:
    """Pitfall F-92: template and tokens go with the model."""
    (tmp_path / "chat.jinja").write_text(CHAT_TEMPLATE.replace("<eos>", "<end>"))
    args = SFTConfig(
        output_dir=str(tmp_path / "out"),
        use_cpu=True,
        max_steps=1,
        per_device_train_batch_size=1,
        report_to=[],
        eos_token="<end>",
        chat_template_path=str(tmp_path / "chat.jinja"),
        assistant_only_loss=True,
    )
    rows = [{"question": "a", "answer": "b"}]
    trainer = SFTTrainer(
        make_model(),
        args,
        rows,
        processing_class=make_tokenizer(chat=False),
        formatting_func=lambda row: [
            {"role": "user", "content": row["question"]},
            {"role": "assistant", "content": row["answer"]},
        ],
    )
    (row,) = trainer.train_dataset[0]["rows"]
    assert row["completion_ids"] == [*make_tokenizer()("b")["input_ids"], END]
    trainer.train()
    trainer.save_model()
    saved = make_tokenizer().from_pretrained(tmp_path / "out")
    assert saved.eos_token == "<end>"
    assert saved.chat_template == (tmp_path / "chat.jinja").read_text()
    with pytest.raises(TypeError, match="row 0: formatting_func returned int, allowed are a text, a list of messages"):
        SFTTrainer(make_model(), args, rows, processing_class=make_tokenizer(), formatting_func=lambda row: 3)
