"""Engines that sample from the live policy in this process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from hf_strategies.modeling.attention import why_no_stream
from hf_strategies.modeling.decoding import decoding_error, stream_completions
from hf_strategies.modeling.forward import tolerance_of
from hf_strategies.modeling.generation import eos_token_ids, sample_completions
from hf_strategies.modeling.sampling import Completion, Sampling, StopStrings
from hf_strategies.modeling.sampling_weights import sampling_weights
from hf_strategies.modeling.unwrap import causal_lm_of
from hf_strategies.rollout.engine import RolloutEngine, RolloutGroup

logger = logging.getLogger(__name__)


class GenerateEngine:
    """Samples from the live policy with `model.generate`: always there.

    Args:
        tokenizer: for the pad id and the end-of-sequence ids.
        max_rows: most completions sampled at a time; whole groups are kept together.
        dtype: precision of the weights while sampling; None: the policy's own.
    """

    def __init__(self, tokenizer: Any, max_rows: int = 64, dtype: torch.dtype | None = None) -> None:
        self.tokenizer = tokenizer
        self.max_rows = max_rows
        self.dtype = dtype
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
            raise RuntimeError(f"{type(self).__name__}.generate was called before sync_weights")
        groups: list[RolloutGroup] = []
        prompts_per_call = max(1, self.max_rows // n)
        with sampling_weights(self._model, self.dtype):
            for start in range(0, len(prompt_ids), prompts_per_call):
                prompts = list(prompt_ids[start : start + prompts_per_call])
                keys = noise_keys[start : start + prompts_per_call]
                sampled = self._sample(prompts, n, sampling, keys)
                for prompt, completions in zip(prompts, sampled, strict=True):
                    groups.append(RolloutGroup(list(prompt), completions, self._version))
        return groups

    def _sample(
        self, prompts: list[list[int]], n: int, sampling: Sampling, keys: Sequence[Sequence[tuple[int, ...]]]
    ) -> list[list[Completion]]:
        completions = sample_completions(
            self._model,
            [prompt for prompt in prompts for _ in range(n)],
            sampling,
            [key for group in keys for key in group],
            self._eos_ids(),
            self.tokenizer.pad_token_id,
            self._stop(sampling),
        )
        return [completions[i * n : (i + 1) * n] for i in range(len(prompts))]

    def _eos_ids(self) -> list[int]:
        return eos_token_ids(causal_lm_of(self._model), self.tokenizer)

    def _stop(self, sampling: Sampling) -> StopStrings | None:
        return StopStrings(sampling.stop_strings, self.tokenizer.decode) if sampling.stop_strings else None


class StreamEngine(GenerateEngine):
    """Samples the same completions with every prompt computed and kept once (see `modeling.decoding`).

    Before the first rollout a few tokens are sampled and scored again by the model's plain forward pass; a model whose
    numbers differ, or that is known not to fit, is sampled with `model.generate`.

    Args:
        tokenizer: see `GenerateEngine`.
        max_rows: see `GenerateEngine`.
        dtype: see `GenerateEngine`.
        required: raise instead of falling back.
    """

    def __init__(
        self, tokenizer: Any, max_rows: int = 64, dtype: torch.dtype | None = None, required: bool = False
    ) -> None:
        super().__init__(tokenizer, max_rows, dtype)
        self.required = required
        self._usable: bool | None = None

    def _sample(
        self, prompts: list[list[int]], n: int, sampling: Sampling, keys: Sequence[Sequence[tuple[int, ...]]]
    ) -> list[list[Completion]]:
        if self._usable is None:
            self._usable = self._try(prompts[0], sampling.temperature)
        if not self._usable:
            return super()._sample(prompts, n, sampling, keys)
        return stream_completions(self._model, prompts, n, sampling, keys, self._eos_ids(), self._stop(sampling))

    def _try(self, prompt: list[int], temperature: float) -> bool:
        base = causal_lm_of(self._model)
        reason = why_no_stream(base, training=False)
        if reason is None:
            error = decoding_error(self._model, prompt, temperature)
            if error <= tolerance_of(base.dtype):
                return True
            reason = f"its log-probabilities while sampling are off by {error:.2g} nats"
        message = f"{type(base).__name__} cannot be sampled with rollout_engine='stream': {reason}"
        if self.required:
            raise ValueError(f"{message}; use 'auto' or 'generate'")
        logger.warning("%s; sampling with model.generate", message)
        return False


ENGINES: dict[str, Callable[..., RolloutEngine]] = {
    "auto": StreamEngine,
    "stream": partial(StreamEngine, required=True),
    "generate": GenerateEngine,
}
