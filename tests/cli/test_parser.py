"""Flags and YAML files as a user may get them wrong: refused by name, before a model is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_strategies import GRPOConfig, SFTConfig
from hf_strategies.cli import DataArguments, ModelArguments, StrategyParser


def parse(*arguments: str, config: type = SFTConfig) -> tuple:
    return StrategyParser((DataArguments, ModelArguments, config)).parse(["--use_cpu", *arguments])


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, config: type = SFTConfig) -> str:
    with pytest.raises(SystemExit) as stopped:
        parse(*arguments, config=config)
    assert stopped.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        # A prefix of a flag is a mistyped flag; one of --config would lose the whole file.
        (("--learning_rat", "1"), "unknown: --learning_rat 1 (did you mean 'learning_rate'?)"),
        (("--conf", "my.yaml"), "unknown: --conf my.yaml"),
        (("--learning_rate", "nan"), "learning_rate=nan: allowed is a number >= 0.0"),
        (("--max_steps", "0"), "max_steps=0: allowed is a whole number >= 1, or -1"),
        (("--lora_dropout", "1"), "lora_dropout=1.0: allowed is a number >= 0.0 and < 1.0"),
        (("--lora_target_modules", "q_proj,"), "lora_target_modules='q_proj,': allowed are all-linear, or names"),
        (("--model_name_or_path", ""), "model_name_or_path='': allowed is a Hub id or a path"),
        (
            ("--dataset_name", " "),
            "dataset_name=' ': allowed is a Hub id, a local file or folder, or reasoning_gym:<task>",
        ),
        (("--dataset_test_split", "train"), "dataset_test_split='train' is dataset_train_split too"),
        (("--datasets", "a", " "), "argument --datasets: invalid DatasetConfig value: ' '"),
        (("--datasets", "a", "--dataset_name", "b"), "dataset_name='b' beside datasets: allowed is one of the two"),
    ],
)
def test_flags(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refused(capsys, *arguments)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"learning_rate:", "learning_rate=None: allowed is a number"),
        (b"learning_rate: {a: 1}", "learning_rate={'a': 1}: allowed is a number"),
        (b"max_steps: 1.5", "max_steps=1.5: allowed is a whole number"),
        (b"num_train_epochs: true", "num_train_epochs=True: allowed is a number"),
        (b"output_dir: [a, b]", "output_dir=['a', 'b']: allowed is a text or None"),
        (b"bf16: maybe", "argument --bf16"),
        (b"lora_r: 8.0", "lora_r=8.0: allowed is a whole number >= 1"),
        (b"stop_strings: [1]", "stop_strings=[1]: allowed is a list of texts or None"),
        (b"1: 2", "unknown option 1"),
        (b"seed: 1\nseed: 2", "'seed' is given twice"),
        (b"\xff\xfe\x00", "can't decode byte 0xff"),
    ],
)
def test_yaml(content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "my.yaml"
    file.write_bytes(content)
    assert message in refused(capsys, "--config", str(file), config=GRPOConfig)


def test_yaml_that_fits(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("learning_rate: 1e-5\nmax_steps: '3'\nscale_rewards: false\nstop_strings: ['é']", encoding="utf-8")
    *_, args = parse("--config", str(file), config=GRPOConfig)
    assert (args.learning_rate, args.max_steps, args.scale_rewards, args.stop_strings) == (1e-5, 3, "none", ["é"])


def test_a_mixture_in_yaml_and_by_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In YAML with its options, as a flag by paths alone."""
    file = tmp_path / "my.yaml"
    file.write_text("datasets:\n- {path: a.jsonl, fraction: 0.7, columns: [text]}\n- {path: me/b, fraction: 0.3}\n")
    data, *_ = parse("--config", str(file))
    assert [(source.path, source.fraction, source.columns) for source in data.datasets] == [
        ("a.jsonl", 0.7, ["text"]),
        ("me/b", 0.3, None),
    ]
    data, *_ = parse("--datasets", "a.jsonl", "b.jsonl")
    assert [source.path for source in data.datasets] == data.paths == ["a.jsonl", "b.jsonl"]
    file.write_text("datasets: [{path: a, weight: 1}]")
    assert "datasets[0] has no option 'weight'" in refused(capsys, "--config", str(file))
