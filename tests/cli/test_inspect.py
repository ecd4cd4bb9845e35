"""``hf-strategies inspect`` on small files: every token by hand, and the same data as training gets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import CONFIGS, make_tokenizer

from hf_strategies import SFTConfig, SFTTrainer
from hf_strategies.cli.__main__ import main
from hf_strategies.trainers.datasets import prepare_data


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a configuration and a tokenizer, and no weights: whoever loads the model fails."""
    folder = str(tmp_path_factory.mktemp("model"))
    CONFIGS["llama"]().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def look(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the command on rows and returns its lines."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(strategy: str, rows: list[dict[str, Any]], *flags: str) -> list[str]:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        named = ["--strategy", strategy, "--model_name_or_path", model, "--dataset_name", str(path)]
        main(["inspect", *named, "--use_cpu", *flags])
        return capsys.readouterr().out.splitlines()

    return run


def test_prompt_and_completion(look: Any, tmp_path: Path, model: str) -> None:
    """4 prompt tokens; of 3 completion tokens max_length=6 leaves 2; the second row's prompt leaves no room."""
    rows = [{"prompt": "a+b=", "completion": "cd"}, {"prompt": "abcdef", "completion": "c"}]
    lines = look("sft", rows, "--max_length", "6")
    assert lines[0] == f"sft on {tmp_path / 'rows.jsonl'}, tokens of {model}"
    assert lines[1] == ("tokenizer: 51 tokens, bos '<bos>' (1), eos '<eos>' (2), pad '<pad>' (0), a chat template")
    assert lines[3:] == [
        "",
        "Example 0 of 1: 6 tokens, 2 trained (33.3 %)",
        "  cut at max_length",
        "        a¦+¦b¦=¦",
        "  train c¦d¦",
        "",
        "Examples: 2 read, 1 to train on, 1 left out",
        "  left out, prompt_too_long: 1",
        "Tokens: 6, of which 2 train (33.3 %)",
        "Cut at max_length=6: 1 of 1 rows",
        "Tokens of a row, prompt and completion:",
        "  shortest 6, median 6, 95 % within 6, longest 6",
        "  6 to 6 1 " + "█" * 40,
    ]


def test_conversation(look: Any) -> None:
    rows = [{"messages": [{"role": "user", "content": "hi\nyou"}, {"role": "assistant", "content": "yo"}]}]
    lines = look("sft", rows)
    assert lines[4:8] == [
        "Example 0 of 1: 12 tokens, 11 trained (91.7 %)",
        "        <user>¦",
        "  train h¦i¦⏎¦",
        "  train y¦o¦u¦<eos>¦<assistant>¦y¦o¦<eos>¦",
    ]


def test_pair(look: Any) -> None:
    """The prompt once for both answers."""
    lines = look("dpo", [{"prompt": "ab", "chosen": "c", "rejected": "de"}])
    assert lines[4:13] == [
        "Example 0 of 1: 7 tokens, 5 trained (71.4 %)",
        "  prompt, 2 tokens, once for 2 completions",
        "        a¦b¦",
        "  chosen, 2 tokens",
        "  train c¦<eos>¦",
        "  rejected, 3 tokens",
        "  train d¦e¦<eos>¦",
        "",
        "Examples: 1 read, 1 to train on, 0 left out",
    ]


def test_scored_group(look: Any) -> None:
    rows = [{"prompt": "ab", "completions": ["c", "d"], "rewards": [1.0, 0.25]}]
    lines = look("grpo", rows)
    assert [line for line in lines if line.startswith("  completion")] == [
        "  completion 1, reward 1, 2 tokens",
        "  completion 2, reward 0.25, 2 tokens",
    ]


def test_prompts(look: Any) -> None:
    """What is sampled is not there yet; what the rewards will read is."""
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(3)]
    lines = look("online_grpo", rows, "--rows", "1", "--first_row", "2", "--max_completion_length", "9")
    assert lines[4:8] == ["Example 2 of 3: prompt of 4 tokens", "        2¦+¦1¦=¦", "  answer: '3'", ""]
    assert lines[9] == "Tokens: 12 in prompts; 8 completions of at most 9 tokens are sampled for each"


def test_documents_of_a_packed_row(look: Any) -> None:
    """Documents of 3 and 2 tokens fill one row of 6; each one's first token has nothing to be predicted from."""
    lines = look("seq", [{"text": "ab"}, {"text": "c"}], "--max_length", "6")
    assert lines[4:11] == [
        "Example 0 of 1: 5 tokens, 3 trained (60.0 %)",
        "  document 1, 3 tokens",
        "        a¦",
        "  train b¦<eos>¦",
        "  document 2, 2 tokens",
        "        c¦",
        "  train <eos>¦",
    ]


def test_streams_and_limits(look: Any) -> None:
    rows = [{"text": "a" * n} for n in range(1, 30)]
    lines = look("sft", rows, "--rows", "1", "--max_tokens", "4", "--first_row", "20")
    assert lines[5:9] == ["        a¦", "  train a¦", "        ... 18 tokens not shown ...", "  train a¦<eos>¦"]
    lines = look("sft", rows, "--streaming", "--max_examples", "5", "--shuffle_buffer_size", "1", "--max_steps", "1")
    assert "Examples: 5 read, 5 to train on, 0 left out" in lines


def test_what_is_printed_is_what_trains(look: Any, model: str, tmp_path: Path, monkeypatch: Any) -> None:
    """The command hands the file's rows to the function that the trainer hands them to, with equal options."""
    seen: list[Any] = []

    def noting(*args: Any, **kwargs: Any) -> Any:
        data = prepare_data(*args, **kwargs)
        seen.append(data.train.to_list())
        return data

    monkeypatch.setattr("hf_strategies.cli.inspect.prepare_data", noting)
    monkeypatch.setattr("hf_strategies.trainers.base.prepare_data", noting)
    rows = [{"prompt": f"a{i}", "completion": "b" * i} for i in range(1, 8)]
    look("sft", rows, "--max_length", "7")
    args = SFTConfig(output_dir=str(tmp_path), max_length=7, use_cpu=True)
    with pytest.raises(OSError, match="no file named"):  # nothing but the weights is missing
        SFTTrainer(model, args, rows)
    assert len(seen) == 2
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["inspect"], "--strategy is missing: allowed are seq, sft, dpo"),
        (["inspect", "--strategy", "sftt"], "unknown strategy 'sftt', did you mean 'sft'?"),
        (["inspect", "--strategy", "sft"], "--dataset_name or --datasets is missing"),
        (["inspect", "--strategy", "sft", "--rows", "-1"], "rows=-1: allowed is a whole number >= 0"),
        (["inspect", "--strategy", "sft", "--max_tokens", "0"], "max_tokens=0: allowed is a whole number >= 1"),
        (["inspect", "--strategy", "sft", "--dataset_nam", "x"], "unknown: --dataset_nam x (did you mean"),
        (["inspect", "--strategy", "sft", "--dataset_name", "x.jsonl"], "dataset_name='x.jsonl': no such file"),
        (["look"], "invalid choice: 'look'"),
        ([], "the following arguments are required: command"),
    ],
)
def test_bad_options(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(flags)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "listed"),
    [
        (["--help"], "inspect    print rows of a dataset"),
        (["inspect", "--help"], "--dataset_train_split"),
        (["inspect", "--strategy", "online_grpo", "--help"], "--num_generations"),
    ],
)
def test_help(flags: list[str], listed: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(flags)
    assert stopped.value.code == 0
    assert listed in capsys.readouterr().out


def test_rows_that_training_refuses(look: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for strategy, flags, message in (
        ("dpo", [], "one of these sets is needed: prompt, chosen, rejected"),
        ("sft", ["--first_row", "1"], "first_row=1: allowed is less than the 1 examples that train"),
        ("sft", ["--max_length", "1000"], "301 tokens (prompt and completion), the model holds 256"),
    ):
        with pytest.raises(SystemExit):
            look(strategy, [{"text": "a" * (300 if "1000" in flags else 3)}], *flags)
        assert message in capsys.readouterr().err


def test_a_recipe_s_file_is_read(look: Any) -> None:
    """All of its options are known, and hold."""
    config = Path(__file__).parents[2] / "recipes" / "configs" / "grpo.yaml"
    lines = look("online_grpo", [{"prompt": str(i)} for i in range(10, 20)], "--config", str(config), "--rows", "0")
    assert "Tokens: 20 in prompts; 8 completions of at most 20 tokens are sampled for each" in lines


def test_as_a_module_in_an_ascii_terminal(model: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.txt"
    path.write_text("ab\n")
    command = [sys.executable, "-m", "hf_strategies.cli", "inspect", "--strategy", "sft", "--use_cpu"]
    command += ["--model_name_or_path", model, "--dataset_name", str(path)]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "  train b\\xa6<eos>\\xa6" in done.stdout
