"""Six steps equal three, a checkpoint, and three more, bit for bit."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from harness import NAMES, ONLINE, build, logged, policy, rows, weights


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("adapter", [False, True])
def test_resume_is_exact(name: str, adapter: bool) -> None:
    """Pitfalls F-86, F-87, F-89: with real sampling, the checkpoint in the middle of a rollout's use."""
    options: dict[str, object] = {
        "per_device_train_batch_size": 4 if name in ONLINE else 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "optim": "adamw_torch",
        "num_train_epochs": 4,
        "max_steps": 6,
        "save_strategy": "steps",
        "save_steps": 3,
        "output_dir": tempfile.mkdtemp(),
    }
    if name in ONLINE:
        # One rollout serves 4 micro-steps twice: 4 optimizer steps, so step 3 lies within the first rollout.
        options |= {"steps_per_generation": 4, "num_iterations": 2, "engine": None}
    data = rows(name, 8)
    straight = build(name, policy("llama", adapter), data, **options)
    straight.train()
    options["output_dir"], first = tempfile.mkdtemp(), options["output_dir"]
    resumed = build(name, policy("llama", adapter), data, **options)
    resumed.train(resume_from_checkpoint=str(Path(str(first)) / "checkpoint-3"))
    assert resumed.state.global_step == 6
    expected = weights(straight.model)
    got = weights(resumed.model)
    start = weights(policy("llama", adapter))
    assert any(not torch.equal(start[k], v) for k, v in expected.items() if k in start)
    assert all(torch.equal(got[k], v) for k, v in expected.items())
    assert logged(resumed, "loss")[-3:] == logged(straight, "loss")[-3:]
    assert resumed.num_tokens == straight.num_tokens
    if name in ONLINE:
        assert resumed.rollouts.version.current == 6  # type: ignore[union-attr]
        assert logged(resumed, "policy_version")[-1] == 6


def test_checkpoint_without_critic() -> None:
    """Pitfall B-48: the error says what is missing."""
    folder = tempfile.mkdtemp()
    options: dict[str, object] = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1, "output_dir": folder}
    build("online_ppo", **options).train()
    (Path(folder) / "checkpoint-1" / "critic.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no critic \(critic.safetensors is missing\)"):
        build("online_ppo", **options).train(resume_from_checkpoint=str(Path(folder) / "checkpoint-1"))
