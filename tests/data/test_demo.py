"""The default task and reasoning-gym's tasks: what is divided, what is parsed, what is scored."""

from __future__ import annotations

import json
import pickle
import sys
from typing import Any

import pytest

pytest.importorskip("reasoning_gym")

from hf_strategies.data.demo import HIGH, LOW, Task, demo_pairs, demo_task, divided_numbers, messages
from hf_strategies.data.reasoning import (
    AccuracyReward,
    create_task,
    format_reward,
    lenient_answer,
    load_reasoning_gym,
    problem_row,
    score_answer,
    strict_answer,
)


@pytest.fixture(scope="module")
def task() -> Task:
    return demo_task(seed=0)


def question(row: dict[str, Any]) -> str:
    return row["prompt"][-1]["content"]


def operands(row: dict[str, Any]) -> set[int]:
    left, _, right = question(row).split()
    return {int(left), int(right)}


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def test_numbers_are_divided_without_rest() -> None:
    train, heldout = divided_numbers()
    assert not set(train) & set(heldout)
    assert sorted(train + heldout) == list(range(LOW, HIGH + 1))


def test_the_answers_of_a_pair_differ_in_their_sum_alone() -> None:
    """Neither length nor form tells which one is right, and the held-out operands are not in training."""
    pairs = demo_pairs(seed=0)
    for row in [*pairs.train, *pairs.heldout]:
        left, _, right = question(row).split()
        (chosen,), (rejected,) = ([turn["content"] for turn in row[side]] for side in ("chosen", "rejected"))
        total = int(left) + int(right)
        wrong = int(rejected.rsplit(" ", 1)[1])
        assert chosen == f"{left} + {right} = {total}\nAnswer: {total}"
        assert rejected == f"{left} + {right} = {wrong}\nAnswer: {wrong}"
        assert wrong != total
        assert len(chosen) == len(rejected)
    seen = set().union(*map(operands, pairs.train))
    assert not seen & set().union(*map(operands, pairs.heldout))


def test_no_held_out_number_occurs_in_training_or_in_the_example(task: Task) -> None:
    train = set().union(*map(operands, task.train))
    heldout = set().union(*map(operands, task.heldout))
    assert len(heldout) > 10
    assert not train & heldout
    # Everything the prompt shows before the question is seen in training too: the example and its sum.
    shown = " ".join(message["content"] for message in messages("")).replace("\n", " ").split()
    assert not {int(word) for word in shown if word.isdigit()} & heldout


def test_problems_are_distinct_and_right(task: Task) -> None:
    for rows, count in ((task.train, 2000), (task.heldout, 256)):
        questions = [question(row) for row in rows]
        assert len(questions) == len(set(questions)) == count
        for row in rows:
            left, operator, right = question(row).split()
            assert operator == "+"
            assert row["answer"] == str(int(left) + int(right))


def test_held_out_is_fixed_and_training_follows_the_seed(task: Task) -> None:
    other, again = demo_task(seed=1_000_000), demo_task(seed=0)
    assert list(map(question, other.heldout)) == list(map(question, task.heldout))
    assert list(map(question, again.train)) == list(map(question, task.train))
    assert list(map(question, other.train)) != list(map(question, task.train))


def test_neighbouring_seeds_have_their_own_training_problems(task: Task) -> None:
    mine, other = (set(map(question, rows)) for rows in (task.train, demo_task(seed=1).train))
    assert len(mine & other) < 0.9 * len(mine)


def test_sizes_are_options_with_a_limit() -> None:
    small = demo_task(seed=0, train_problems=5, held_out_problems=3)
    assert (len(small.train), len(small.heldout)) == (5, 3)
    with pytest.raises(ValueError, match="401 problems asked for, 20 numbers make only 400"):
        demo_task(seed=0, train_problems=5, held_out_problems=401)


def test_rewards_of_the_task(task: Task) -> None:
    row = task.heldout[0]
    right, wrong = row["answer"], str(int(row["answer"]) + 1)
    completions = [
        f"Answer: {right}",
        f"so\nAnswer: {right}\n\n",
        f"Answer: {wrong}",
        f"Answer: {right} or so",
        right,
        "",
    ]
    columns = {key: [row[key]] * len(completions) for key in ("prompt", "answer", "task", "entry")}
    accuracy, form = (reward(completions=completions, **columns) for reward in task.rewards)
    assert 0 < score_answer("chain_sum", f"{right} or so", row["entry"]) < 1
    # What is partly right for the task's scorer counts as wrong. A bare number has not the form.
    assert accuracy == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert form == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]
    conversational = [said(text) for text in completions]
    assert task.rewards[0](completions=conversational, **columns) == accuracy
    assert task.rewards[1](completions=conversational, **columns) == form


@pytest.mark.parametrize(
    ("text", "strict", "lenient"),
    [
        ("12 + 7 = 19\nAnswer: 19", "19", "19"),
        ("  Answer:   19  \n \n", "19", "19"),
        ("Answer: 19\nI hope that helps, all 3 of you.", None, "19"),
        ("Answer: 18\nno\nAnswer: 19", "19", "19"),
        ("12 + 7 = 19", None, "19"),
        ("It is -3.5 degrees.", None, "-3.5"),
        ("The Answer: 19", None, "19"),
        ("answer: 19", None, "19"),
        ("Answer:", None, None),
        ("", None, None),
        ("nothing", None, None),
    ],
)
def test_parsers(text: str, strict: str | None, lenient: str | None) -> None:
    assert strict_answer(text) == strict
    assert lenient_answer(text) == lenient


def test_lenient_reward_finds_the_number_the_strict_one_refuses(task: Task) -> None:
    row = task.heldout[0]
    columns = {"task": [row["task"]], "entry": [row["entry"]]}
    completion = [f"{question(row)} = {row['answer']}"]
    assert AccuracyReward()(completion, **columns) == [0.0]
    assert AccuracyReward(lenient=True)(completion, **columns) == [1.0]


def test_rewards_are_picklable_and_named(task: Task) -> None:
    row = task.heldout[0]
    reward = pickle.loads(pickle.dumps(AccuracyReward()))
    assert reward.name == "accuracy"
    assert reward([f"Answer: {row['answer']}"], task=[row["task"]], entry=[row["entry"]]) == [1.0]
    assert AccuracyReward(lenient=True).name == "lenient_accuracy"
    assert pickle.loads(pickle.dumps(format_reward)) is format_reward


def test_columns_of_any_task() -> None:
    rows = load_reasoning_gym("reasoning_gym:leg_counting", size=3, seed=5, max_animals=3)
    assert rows.column_names == ["prompt", "answer", "task", "entry"]
    assert len(rows) == 3
    assert rows[0]["prompt"][0]["role"] == "user"
    assert json.loads(rows[0]["entry"])["answer"] == rows[0]["answer"]
    again = load_reasoning_gym("reasoning_gym:leg_counting", size=3, seed=5, max_animals=3)
    assert again["entry"] == rows["entry"]


@pytest.mark.parametrize("name", ["chain_sum", "countdown", "leg_counting", "knights_knaves", "word_sorting"])
def test_scorers_survive_the_json_column(name: str) -> None:
    row = problem_row(name, create_task(name, size=1, seed=3)[0])
    assert score_answer(name, row["answer"], row["entry"]) == 1.0
    assert score_answer(name, None, row["entry"]) == 0.0


@pytest.mark.parametrize("name", ["prime_factorization", "boxnet"])
@pytest.mark.parametrize("answer", ["foo", "12", "[1]"])
def test_a_scorer_that_stumbles_over_an_answer_gives_zero(name: str, answer: str) -> None:
    # Some of reasoning-gym's scorers raise on text that they cannot read; a policy writes such text all the time.
    row = problem_row(name, create_task(name, size=1, seed=3)[0])
    assert AccuracyReward()([f"Answer: {answer}"], task=[name], entry=[row["entry"]]) == [0.0]


@pytest.mark.parametrize("name", ["n_queens", "tower_of_hanoi", "arc_agi"])
def test_a_task_with_answers_of_several_lines_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"task '{name}' cannot be used: an answer is read from one line"):
        load_reasoning_gym(f"reasoning_gym:{name}", size=1, seed=0)


def test_a_task_that_gives_no_answer_can_be_used() -> None:
    rows = load_reasoning_gym("reasoning_gym:rush_hour", size=2, seed=0)
    assert [json.loads(entry)["answer"] for entry in rows["entry"]] == [None, None]


def test_a_scorer_has_the_options_of_its_problems() -> None:
    # puzzle24 counts a solution with numbers above its max_value as wrong; the default is 10.
    entry = {"question": "", "answer": None, "metadata": {}}
    plain, small = problem_row("puzzle24", entry), problem_row("puzzle24", entry, config={"max_value": 8})
    assert score_answer("puzzle24", "10 + 10 + 2 + 2", plain["entry"]) == 1.0
    assert score_answer("puzzle24", "10 + 10 + 2 + 2", small["entry"]) < 1.0
    rows = load_reasoning_gym("reasoning_gym:puzzle24", size=2, seed=0, max_value=8)
    assert json.loads(rows[0]["entry"])["task_config"] == {"max_value": 8}


def test_unknown_task_names_near_ones() -> None:
    with pytest.raises(ValueError, match=r"no task 'chain_sums' \(\d{3} known; near: .*chain_sum"):
        load_reasoning_gym("reasoning_gym:chain_sums", size=1, seed=0)


def test_bad_task_option_is_named() -> None:
    with pytest.raises(ValueError, match=r"'chain_sum' refuses .*no_such_option"):
        load_reasoning_gym("reasoning_gym:chain_sum", size=1, seed=0, no_such_option=1)


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'hf-strategies\[demo\]'"):
        create_task("chain_sum", size=1)
