"""The engine that is always there: `model.generate` on the policy itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from hf_strategies.modeling.generation import eos_token_ids, sample_completions
from hf_strategies.modeling.sampling import Sampling
from hf_strategies.rollout.engine import RolloutGroup


class GenerateEngine:
    """Samples from the live policy with `model.generate`.

    Args:
        tokenizer: for the pad id and the end-of-sequence ids.
        max_rows: most completions sampled in one call of `generate`; whole groups are kept together.
    """

    def __init__(self, tokenizer: Any, max_rows: int = 64) -> None:
        self.tokenizer = tokenizer
        self.max_rows = max_rows
        self._model: Any = None
        self._version = 0

    def sync_weights(self, model: nn.Module, version: int) -> None:  # noqa: D102 - see RolloutEngine
        # The policy's own parameters are sampled from: there is nothing to copy, only a version to remember.
        self._model = model
        self._version = version

    def generate(  # noqa: D102 - see RolloutEngine
        self,
        prompt_ids: Sequence[list[int]],
        n: int,
        sampling: Sampling,
        noise_keys: Sequence[Sequence[tuple[int, ...]]],
    ) -> list[RolloutGroup]:
        if self._model is None:
            raise RuntimeError("GenerateEngine.generate was called before sync_weights")
        base = self._model.get_base_model() if hasattr(self._model, "get_base_model") else self._model
        eos_ids = eos_token_ids(base, self.tokenizer)
        groups: list[RolloutGroup] = []
        prompts_per_call = max(1, self.max_rows // n)
        for start in range(0, len(prompt_ids), prompts_per_call):
            prompts = list(prompt_ids[start : start + prompts_per_call])
            keys = noise_keys[start : start + prompts_per_call]
            completions = sample_completions(
                self._model,
                [prompt for prompt in prompts for _ in range(n)],
                sampling,
                [key for group in keys for key in group],
                eos_ids,
                self.tokenizer.pad_token_id,
            )
            for i, prompt in enumerate(prompts):
                groups.append(RolloutGroup(list(prompt), completions[i * n : (i + 1) * n], self._version))
        return groups

    def close(self) -> None:  # noqa: D102 - see RolloutEngine
        self._model = None
