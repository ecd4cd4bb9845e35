"""The import direction, read from the source."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import hf_strategies

ROOT = Path(hf_strategies.__file__).parent
BOTTOM = {"batch", "options", "policy_output", "stats", "functional", "credit", "preference"}
MIDDLE = {"strategies", "rollout", "modeling", "data", "reporting"}
# As in pyproject.toml: rollouts run the generation code of the models.
ALLOWED_BESIDE = {("rollout", "modeling")}
FILES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_point_down(path: Path) -> None:
    layer = path.parts[0].removesuffix(".py")
    own = {name for name in imports(path) if name.startswith("hf_strategies.")}
    for name in own:
        target = name.split(".")[1]
        if layer in BOTTOM:
            assert target in BOTTOM, f"{path} imports {name}"
        elif layer in MIDDLE:
            beside = target in MIDDLE - {layer} and (layer, target) not in ALLOWED_BESIDE
            assert not beside, f"{path} imports {name}"
            assert target in BOTTOM | MIDDLE, f"{path} imports {name}"
    if layer in BOTTOM | {"strategies"}:
        outside = {name.split(".")[0] for name in imports(path)}
        assert not outside & {"transformers", "peft", "accelerate", "datasets"}, f"{path} sees more than numbers"
