"""What generates completions: the protocol every rollout engine follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from hf_strategies.modeling.sampling import Completion, Sampling


@dataclass
class RolloutGroup:
    """All completions of one prompt.

    Attributes:
        prompt_ids: token ids the completions were conditioned on.
        completions: G completions, in sampling order.
        policy_version: applied optimizer steps of the policy that sampled them.
        loss_masks: per completion and token, False where a token is seen but not trained (a tool's answer).
    """

    prompt_ids: list[int]
    completions: list[Completion]
    policy_version: int = 0
    loss_masks: list[list[bool]] | None = None


class RolloutEngine(Protocol):
    """Samples grouped completions; token ids in, token ids out."""

    def generate(
        self,
        prompt_ids: Sequence[list[int]],
        n: int,
        sampling: Sampling,
        noise_keys: Sequence[Sequence[tuple[int, ...]]],
    ) -> list[RolloutGroup]:
        """Sample ``n`` completions of every prompt.

        Args:
            prompt_ids: token ids of B prompts.
            n: completions per prompt, G.
            sampling: the options.
            noise_keys: [B][G] keys of the sampling noise; an engine that can seed only per call may ignore them.

        Returns:
            B groups, in order, with log-probabilities of the sampled tokens and the version of the weights used.
        """
        ...

    def sync_weights(self, model: nn.Module, version: int) -> None:
        """Sample from these weights from now on."""
        ...
