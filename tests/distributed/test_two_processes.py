"""Two gloo processes under DDP train what one process trains."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness import NAMES, difference
from safetensors.torch import load_file

WORKER = Path(__file__).parent / "worker.py"
RUNS = [*NAMES, "online_grpo:sampled", "online_ppo:sampled"]
pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("two")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "29617"]
    for start, world in (([sys.executable], 1), (torchrun, 2)):
        command = [*start, str(WORKER), str(path), str(world), *RUNS]
        result = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment)
        # Some gloo processes abort at exit after all work: the result files decide, the output explains.
        missing = [run for run in RUNS if not (path / f"{run.replace(':', '-')}-{world}.safetensors").exists()]
        assert not missing, f"{missing}: {result.stdout[-2000:]}\n{result.stderr[-4000:]}"
    return path


@pytest.mark.parametrize("run", RUNS)
def test_two_processes_equal_one(folder: Path, run: str) -> None:
    """Pitfalls A-25, D-71: same updates and losses; a sampled rollout does not depend on the number of processes."""
    one, two = (load_file(folder / f"{run.replace(':', '-')}-{world}.safetensors") for world in (1, 2))
    torch.testing.assert_close(two.pop("losses"), one.pop("losses"), atol=1e-5, rtol=1e-5)
    assert difference(two, one) < 2e-5
    # The negative control: the update without the factor for the number of processes would be halved.
    halved = {name: value / 2 for name, value in two.items()}
    assert difference(halved, one) > 0.4
