"""Every recipe from command line to saved model, on a tiny model, and the data it runs on by default."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import make_model, make_tokenizer
from peft import PeftModel
from transformers import AutoModelForCausalLM

from hf_strategies import GRPOConfig, SeqConfig, SFTConfig, SFTTrainer
from hf_strategies.cli import DataArguments, ModelArguments, RewardArguments
from hf_strategies.data.demo import (
    demo_documents,
    demo_groups,
    demo_pairs,
    demo_solutions,
    demo_task,
    divided_numbers,
)
from hf_strategies.data.reasoning import strict_answer
from hf_strategies.recipe import online_task, parse_recipe
from hf_strategies.recipe.heldout import HeldOut
from hf_strategies.recipe.tasks import held_out

RECIPES = Path(__file__).parents[2] / "recipes"
OFFLINE = ("dpo", "grpo_offline", "seq", "sft")
ONLINE = ("grpo", "online_dpo", "ppo")
# What the recipe measures; an untrained tiny model answers nothing right, so sampled scores are there but 0.
MEASURES = {
    "dpo": ("loss", "pairs_ranked_rightly", "better_answer_likelier", "held_out"),
    "grpo_offline": ("loss", "held_out"),
    "seq": ("loss",),
    "sft": ("loss", "held_out"),
} | dict.fromkeys(ONLINE, ("held_out",))
SIZES = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "per_device_eval_batch_size": 64}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model in a folder, as a user would name it."""
    folder = str(tmp_path_factory.mktemp("tiny"))
    make_model("llama", max_position_embeddings=2048).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def run(name: str, monkeypatch: pytest.MonkeyPatch, **flags: Any) -> None:
    arguments = [str(part) for key, value in flags.items() for part in (f"--{key}", value)]
    monkeypatch.setattr(sys, "argv", [str(RECIPES / f"{name}.py"), *arguments])
    runpy.run_path(str(RECIPES / f"{name}.py"), run_name="__main__")


@pytest.mark.slow
@pytest.mark.parametrize("name", OFFLINE + ONLINE)
def test_recipe_trains_measures_and_saves(
    name: str, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recipe's own YAML, made small; the last line is the figures, the folder a plain adapter."""
    sizes = SIZES | ({"num_generations": 2} if name in ONLINE else {})
    run(
        name,
        monkeypatch,
        config=RECIPES / "configs" / f"{name}.yaml",
        model_name_or_path=tiny,
        max_steps=1,
        output_dir=tmp_path,
        use_cpu=True,
        disable_tqdm=True,
        **sizes,
    )
    result = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert result["optimizer_steps"] == 1
    for measure in MEASURES[name]:
        assert {f"{measure}_before", f"{measure}_after"} <= result.keys()
    assert result["held_out_rows"] == (12 if name == "seq" else 256)
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny), tmp_path)


@pytest.mark.parametrize("name", OFFLINE + ONLINE)
def test_yaml_is_complete(name: str) -> None:
    """Every recipe has a YAML of its own, with its own output folder."""
    content = yaml.safe_load((RECIPES / "configs" / f"{name}.yaml").read_text())
    assert content["output_dir"] == f"runs/{name}"


def test_own_file_with_its_columns(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A jsonl of pairs; held out rows are split off; nothing is sampled, for nothing scores it."""
    rows = [{"prompt": f"say {i}", "chosen": f"{i} yes", "rejected": "no"} for i in range(12)]
    data = tmp_path / "pairs.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    run(
        "dpo",
        monkeypatch,
        dataset_name=data,
        held_out_rows=4,
        model_name_or_path=tiny,
        per_device_train_batch_size=4,
        num_train_epochs=1,
        output_dir=tmp_path / "out",
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
    )
    result = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert result["held_out_rows"] == 4
    assert result["optimizer_steps"] == 2
    assert result["loss_before"] == pytest.approx(0.6931)
    assert "held_out_before" not in result


def test_mixture_from_yaml(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Shares 3 to 1 of 8 and 8 rows: 8 and round(2.67) = 3, of which 3 are held out: 8 train, in 4 steps of 2."""
    for name in "ab":
        lines = [json.dumps({"prompt": f"say {name}", "completion": str(i)}) for i in range(8)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    sources = [{"path": str(tmp_path / f"{name}.jsonl"), "fraction": share} for name, share in (("a", 3), ("b", 1))]
    config = tmp_path / "my.yaml"
    config.write_text(yaml.safe_dump({"datasets": sources, "held_out_rows": 3, "num_train_epochs": 1}))
    run(
        "sft",
        monkeypatch,
        config=config,
        model_name_or_path=tiny,
        per_device_train_batch_size=2,
        output_dir=tmp_path / "out",
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
    )
    output = capsys.readouterr().out.strip()
    assert f"Task: {tmp_path / 'a.jsonl'} + {tmp_path / 'b.jsonl'}; 8 training and 3 held-out rows." in output
    assert json.loads(output.splitlines()[-1])["optimizer_steps"] == 4


@pytest.mark.parametrize(("name", "config"), [("sft_chat", SFTConfig), ("seq_mixture", SeqConfig)])
def test_yaml_for_data_of_your_own(name: str, config: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every option exists and has a value that is allowed."""
    monkeypatch.setattr(sys, "argv", ["recipe", "--config", str(RECIPES / "configs" / f"{name}.yaml"), "--use_cpu"])
    data, _, args = parse_recipe(str(RECIPES / "sft.py"), None, DataArguments, ModelArguments, config)
    assert not data.is_embedded
    assert args.output_dir == f"runs/{name}"


def test_a_file_of_conversations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as asked for, in turns that follow each other; equal seeds write equal files; no topic occurs twice."""
    files = []
    for name, seed in (("one", 3), ("same", 3), ("other", 4)):
        files.append(tmp_path / f"{name}.jsonl")
        arguments = ["chat_data.py", "--out", str(files[-1]), "--rows", "60", "--seed", str(seed)]
        monkeypatch.setattr(sys, "argv", arguments)
        runpy.run_path(str(RECIPES / "chat_data.py"), run_name="__main__")
    one, same, other = (file.read_text() for file in files)
    assert one == same != other
    rows = [json.loads(line) for line in one.splitlines()]
    assert [row["source"] for row in rows].count("python") == 30
    first = []
    for row in rows:
        roles = [message["role"] for message in row["messages"]]
        turns = [role for role in roles if role != "system"]
        assert roles[:-1].count("system") + len(turns) == len(roles)
        assert turns == ["user", "assistant"] * (len(turns) // 2)
        assert all(message["content"].strip() for message in row["messages"])
        answers = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
        if row["source"] == "python":
            first.append(answers[0])
        else:
            assert all(strict_answer(answer) for answer in answers)
    assert len(set(first)) == 30
    assert {len(row["messages"]) for row in rows} >= {2, 3, 5, 7}


def test_problems_are_no_answers_to_train_on(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="dataset_name='reasoning_gym:gcd' holds prompts without answers"):
        run(
            "sft",
            monkeypatch,
            dataset_name="reasoning_gym:gcd",
            model_name_or_path=tiny,
            output_dir=tmp_path,
            use_cpu=True,
        )


@pytest.mark.parametrize("count", [0, 3, 300])
def test_held_out_rows_of_the_embedded_data(count: int) -> None:
    """Their first rows, all where more are asked for; what is sampled follows."""
    whole, part = demo_solutions(0), held_out(demo_solutions(0), count)
    assert part.train.to_list() == whole.train.to_list()
    if count == 0:
        assert part.heldout is part.problems is None
    else:
        assert part.heldout["prompt"] == whole.heldout["prompt"][:count]
        assert part.problems["prompt"] == whole.problems["prompt"][:count]


def test_interval_is_of_problems() -> None:
    """Two completions of each of two problems are two measurements, 1 and 0, whose Wilson interval is known."""
    measured = HeldOut(scores=[1.0, 1.0, 0.0, 0.0], per_problem=2)
    assert measured.means == [1.0, 0.0]
    assert measured.describe("x") == ["x: score 0.500  (95 % interval 0.095 to 0.905, n = 2 x 2)"]
    assert measured.figures("after") == {"held_out_after": 0.5, "held_out_after_interval": [0.0945, 0.9055]}


def test_resumes_from_the_last_checkpoint_and_names_the_chat(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--resume_from_checkpoint true`` goes on from the newest one; the chat is named where it lies."""
    data = tmp_path / "texts.jsonl"
    data.write_text("\n".join(json.dumps({"text": f"say {i}"}) for i in range(8)))
    flags = {
        "dataset_name": data,
        "held_out_rows": 2,
        "model_name_or_path": tiny,
        "per_device_train_batch_size": 2,
        "save_steps": 1,
        "output_dir": tmp_path / "out",
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": "none",
    }
    run("sft", monkeypatch, max_steps=1, **flags)
    capsys.readouterr()
    steps: list[int] = []
    monkeypatch.setattr(SFTTrainer, "training_step", counted(SFTTrainer.training_step, steps))
    run("sft", monkeypatch, max_steps=2, resume_from_checkpoint="true", **flags)
    assert steps == [1]
    assert f"{RECIPES / 'chat.py'} --model {tmp_path / 'out'}" in capsys.readouterr().out


def counted(step: Any, steps: list[int]) -> Any:
    """A training step that notes how many optimizer steps were done before it."""

    def noting(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        steps.append(trainer.state.global_step)
        return step(trainer, *args, **kwargs)

    return noting


def test_a_built_in_reward_that_is_mistyped() -> None:
    """Taken for the id of a reward model, it would be looked for on the Hub."""
    with pytest.raises(ValueError, match="reward_funcs: 'acuracy' is unknown, did you mean 'accuracy'"):
        online_task(DataArguments(), RewardArguments(reward_funcs=["acuracy"]), 0)


def total(prompt: list[dict[str, str]]) -> int:
    return sum(int(number) for number in prompt[-1]["content"].split(" + "))


@pytest.mark.parametrize("make", [demo_solutions, demo_pairs, demo_groups])
def test_right_and_wrong_solutions(make: Any) -> None:
    """What should be learned is right, what should not is wrong, and both sides of the division stay apart."""
    task = make(7)
    train_numbers, held_out_numbers = map(set, divided_numbers())
    for rows, numbers in ((task.train, train_numbers), (task.heldout, held_out_numbers)):
        for row in rows.select(range(100)):
            assert {int(number) for number in row["prompt"][-1]["content"].split(" + ")} <= numbers
            right, wrong = str(total(row["prompt"])), []
            if "completions" in row:
                assert row["rewards"] == [1.0, 0.2, 0.2, 0.0]
                good, *wrong = (turns[0]["content"] for turns in row["completions"])
                assert strict_answer(wrong.pop()) is None
            elif "chosen" in row:
                good, wrong = row["chosen"][0]["content"], [row["rejected"][0]["content"]]
            else:
                good = row["completion"][0]["content"]
            assert strict_answer(good) == right
            assert all(strict_answer(text) not in (None, right) for text in wrong)
    assert task.problems["prompt"] == demo_task(0).heldout["prompt"]
    assert make(8).train["prompt"] != task.train["prompt"]
    assert make(8).heldout.to_list() == task.heldout.to_list()


def test_documents_are_divided_once() -> None:
    one, other = demo_documents(1), demo_documents(2)
    assert one.heldout["text"] == other.heldout["text"]
    assert one.train["text"] != other.train["text"]
    assert sorted(one.train["text"]) == sorted(other.train["text"])
    assert not set(one.train["text"]) & set(one.heldout["text"])
    assert one.problems is None


def test_preset_of_the_origin_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every option exists, and rollouts, micro-batches and groups fit together."""
    monkeypatch.setattr(sys, "argv", ["grpo.py", "--config", str(RECIPES / "configs" / "origin.yaml"), "--use_cpu"])
    *_, args = parse_recipe(str(RECIPES / "grpo.py"), None, DataArguments, RewardArguments, ModelArguments, GRPOConfig)
    args.check_rollouts(min_group_size=2)
    assert (args.num_generations, args.prompts_per_rollout, args.beta) == (4, 512, 0.01)
