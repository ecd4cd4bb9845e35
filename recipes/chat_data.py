"""Write conversations for supervised fine-tuning, as JSON lines with a column messages.

    python recipes/chat_data.py --out chat.jsonl                  # 3,000 conversations
    python recipes/chat_data.py --out chat.jsonl --rows 5000 --seed 1
    accelerate launch recipes/sft.py --config recipes/configs/sft_chat.yaml --dataset_name chat.jsonl

Half of the conversations explain Python's standard library, in the words of its docstrings, with questions that
follow up; the other half are arithmetic word problems with worked solutions (reasoning-gym's gsm_symbolic, from
one to three in a conversation). Three in four open with a system prompt. Nothing is downloaded; the same seed
gives the same file under the same version of Python.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import random
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_strategies.data.reasoning import create_task, generator_seed

ROWS = 3000
MODULES = """
abc argparse array ast asyncio base64 binascii bisect bz2 calendar cmath codecs collections collections.abc
configparser contextlib copy csv dataclasses datetime decimal difflib email.message email.utils enum fileinput
fnmatch fractions functools gc getpass gettext glob graphlib gzip hashlib heapq hmac html html.parser http.client
inspect io ipaddress itertools json keyword linecache locale logging lzma mailbox math mimetypes numbers operator
os os.path pathlib pickle pkgutil platform plistlib pprint queue quopri random re reprlib sched secrets select
selectors shelve shlex shutil signal smtplib socket sqlite3 ssl stat statistics string struct subprocess sys
sysconfig tarfile tempfile textwrap threading time timeit tokenize traceback types typing unicodedata unittest
unittest.mock urllib.parse urllib.request uuid warnings wave weakref xml.dom.minidom xml.etree.ElementTree zipfile
zlib builtins
""".split()  # noqa: SIM905 - one name a line would be longer than the rest of the file
SHORTEST, LONGEST = 40, 1500  # characters of a docstring that makes a good answer

PYTHON_SYSTEM = (
    "You are a helpful assistant for Python programmers.",
    "You answer questions about Python's standard library. Be brief and precise.",
    "You are an experienced Python developer who explains things to colleagues.",
)
MATHS_SYSTEM = (
    "You are a patient tutor. Solve the problem step by step and end with the answer on a line of its own.",
    "You are a helpful assistant that is good at arithmetic.",
    "Solve word problems. Show your work, then give the result.",
)
WHAT = (
    "What does {} do?",
    "I came across {} in some code. What is it for?",
    "Can you explain {}?",
    "What is {} in Python?",
    "hi, could you tell me about {}",
)
MORE = ("Can you tell me more?", "Are there any details that I should know?", "Go on, please.")
HOW_TO_IMPORT = ("How do I import it?", "Where do I get it from?", "What do I have to import to use it?")
ARGUMENTS = ("Which arguments does it take?", "What can I pass to it?", "And the parameters?")
SIMILAR = ("What else is there?", "Is there anything similar next to it?", "What else should I look at there?")
NEXT = ("Here is another one: {}", "Thanks! Next: {}", "And this one? {}", "{}")


@dataclass(frozen=True)
class Topic:
    """A documented name of the standard library.

    Attributes:
        module: where it is.
        name: within the module, ``Class.method`` for methods.
        signature: how it is called, with parentheses; empty where it does not say.
        arguments: what can be passed, one description each.
        paragraphs: of its docstring.
        neighbours: other public names of the module.
    """

    module: str
    name: str
    signature: str
    arguments: tuple[str, ...]
    paragraphs: tuple[str, ...]
    neighbours: tuple[str, ...]

    @property
    def full_name(self) -> str:
        """With the module, where the name needs one."""
        return self.name if self.module == "builtins" else f"{self.module}.{self.name}"


def topics() -> list[Topic]:
    """Documented functions, classes and methods, each docstring once, always in the same order."""
    found: dict[str, Topic] = {}
    for module_name in MODULES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some names of old modules are deprecated
            module = importlib.import_module(module_name)
            public = {name: value for name, value in sorted(vars(module).items()) if not name.startswith("_")}
        for name, value in _documented(module_name, public):
            text = inspect.getdoc(value) or ""
            if SHORTEST <= len(text) <= LONGEST and text not in found:
                signature, arguments = _signature(value)
                near = tuple(other for other in public if callable(public[other]) and other != name.split(".")[0])
                paragraphs = tuple(part.strip("\n") for part in re.split(r"\n\s*\n", text))
                found[text] = Topic(module_name, name, signature, arguments, paragraphs, near)
    return list(found.values())


def _documented(module: str, public: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Callables that belong to the module, and methods of its classes."""
    for name, value in public.items():
        home = str(getattr(value, "__module__", None) or module).lstrip("_")
        if not callable(value) or home.split(".")[0] not in (module.split(".")[0], "builtins", "posixpath", "posix"):
            continue
        yield name, value
        if inspect.isclass(value):
            for method, function in sorted(vars(value).items()):
                if not method.startswith("_") and inspect.isroutine(function):
                    yield f"{name}.{method}", function


def _signature(value: Any) -> tuple[str, tuple[str, ...]]:
    try:
        signature = inspect.signature(value)
    except (ValueError, TypeError):
        return "", ()
    parameters = [parameter for parameter in signature.parameters.values() if parameter.name not in ("self", "cls")]
    shown = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
    text = str(inspect.Signature(shown))
    if " at 0x" in text or len(text) > 120:  # addresses differ from run to run
        return "", ()
    return text, tuple(
        f"`{parameter.name}`" + ("" if parameter.default is parameter.empty else f" (default `{parameter.default!r}`)")
        for parameter in shown
    )


def python_conversation(topic: Topic, source: random.Random) -> list[dict[str, str]]:
    """A question about a name of the standard library, its answer, and up to two questions that follow up."""
    call = f"`{topic.full_name}{topic.signature}`"
    quoted = f"`{topic.full_name}`" if source.random() < 0.5 else topic.full_name
    turns = [(source.choice(WHAT).format(quoted), f"{call}\n\n{topic.paragraphs[0]}")]
    further: list[tuple[str, str]] = []
    if len(topic.paragraphs) > 1:
        further.append((source.choice(MORE), "\n\n".join(topic.paragraphs[1:])))
    if topic.module != "builtins":
        first = topic.name.split(".")[0]
        use = f"Then use it as `{topic.name}`."
        further.append((source.choice(HOW_TO_IMPORT), f"```python\nfrom {topic.module} import {first}\n```\n{use}"))
    if topic.arguments:
        listed = "\n".join(f"- {argument}" for argument in topic.arguments)
        further.append((source.choice(ARGUMENTS), listed))
    if len(topic.neighbours) >= 3:
        names = ", ".join(f"`{name}`" for name in sorted(source.sample(topic.neighbours, 3)))
        further.append((source.choice(SIMILAR), f"The module `{topic.module}` also has {names}."))
    turns += source.sample(further, min(source.randrange(3), len(further)))
    return _messages(turns, PYTHON_SYSTEM, source)


def maths_conversation(problems: list[dict[str, Any]], source: random.Random) -> list[dict[str, str]]:
    """Word problems with their worked solutions, each after the other."""
    turns = []
    for number, problem in enumerate(problems):
        question = problem["question"].strip()
        work = problem["metadata"]["answer_cot"].split("####")[0].strip()
        asked = source.choice(NEXT).format(question) if number else question
        turns.append((asked, f"{work}\nAnswer: {problem['answer']}"))
    return _messages(turns, MATHS_SYSTEM, source)


def _messages(turns: list[tuple[str, str]], systems: tuple[str, ...], source: random.Random) -> list[dict[str, str]]:
    opening = [{"role": "system", "content": source.choice(systems)}] if source.random() < 0.75 else []
    return opening + [
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]


def conversations(rows: int, seed: int) -> list[dict[str, Any]]:
    """Rows of columns ``messages`` and ``source``, in random order.

    Args:
        rows: how many; half of them, or as many as there are topics, are about Python.
        seed: of everything that is drawn.
    """
    source = random.Random(seed)
    known = topics()
    source.shuffle(known)
    chosen = known[: rows // 2]
    counts = [source.choice((1, 1, 2, 3)) for _ in range(rows - len(chosen))]
    problems = iter(create_task("gsm_symbolic", size=sum(counts), seed=generator_seed(seed)))
    made = [{"messages": python_conversation(topic, source), "source": "python"} for topic in chosen]
    made += [
        {"messages": maths_conversation([next(problems) for _ in range(count)], source), "source": "arithmetic"}
        for count in counts
    ]
    source.shuffle(made)
    return made


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: allowed is a whole number >= 1")
    return int(text)


def main() -> None:
    """Write the file and say what is in it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="File to write, *.jsonl.")
    parser.add_argument("--rows", type=_positive, default=ROWS, help=f"Conversations, >= 1; {ROWS} when left out.")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows = conversations(options.rows, options.seed)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    answers = sum(message["role"] == "assistant" for row in rows for message in row["messages"])
    print(f"{options.out}: {len(rows):,} conversations with {answers:,} answers")


if __name__ == "__main__":
    main()
