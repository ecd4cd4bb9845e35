"""Completions by `model.generate`: the plain way, always there, and the oracle of the fast one.

`generate` runs the model; which token comes next is decided by the sampler, in a logits processor that hands back a
distribution with a single token left. That makes three things exact that a plain sampling call cannot offer: the
log-probability of each sampled token under the distribution it was really drawn from is kept while sampling, every
sampling option comes from the caller and none from the model's own ``generation_config``, and the noise of a row does
not depend on which other rows, chunks or processes it is sampled beside.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from hf_strategies.modeling.sampling import Completion, Sampling, StopStrings, TokenSampler, completions_of, row_noise
from hf_strategies.modeling.unwrap import causal_lm_of


class ChosenToken(LogitsProcessor):
    """Leaves `generate` the one token that a sampler has drawn.

    Args:
        sampler: draws; one row per row of the batch.
    """

    def __init__(self, sampler: TokenSampler) -> None:
        self.sampler = sampler
        self.logprobs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Reduce ``scores`` [rows, V] to the token that is next."""
        chosen, logprobs = self.sampler.next(scores)
        self.logprobs.append(logprobs)
        return torch.full_like(scores, -torch.inf).scatter(1, chosen.unsqueeze(1), 0.0)


class StopAt(StoppingCriteria):
    """Ends rows whose completion holds a stop string.

    Args:
        stop: the texts.
        prompt_len: columns of the padded prompts.
    """

    def __init__(self, stop: StopStrings, prompt_len: int) -> None:
        self.stop = stop
        self.prompt_len = prompt_len

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        """[rows] bool, True where a row is done."""
        done = [self.stop(row) for row in input_ids[:, self.prompt_len :].tolist()]
        return torch.tensor(done, dtype=torch.bool, device=input_ids.device)


@contextmanager
def neutral_generation_config(causal_lm: Any) -> Iterator[None]:
    """Hide the model's own generation defaults: `generate` would fill in whatever a caller leaves unset."""
    own = causal_lm.generation_config
    causal_lm.generation_config = GenerationConfig()
    try:
        yield
    finally:
        causal_lm.generation_config = own


@contextmanager
def generating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradient; training mode comes back afterwards, module by module."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def eos_token_ids(causal_lm: Any, tokenizer: Any) -> list[int]:
    """Every id that ends a text: the model's generation config and the tokenizer each may know some."""
    configured = getattr(causal_lm.generation_config, "eos_token_id", None)
    ids = set(configured if isinstance(configured, list | tuple) else [configured])
    ids.add(tokenizer.eos_token_id)
    return sorted(i for i in ids if i is not None)


def sample_completions(
    causal_lm: Any,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    noise_keys: Sequence[tuple[int, ...]],
    eos_ids: Sequence[int],
    pad_token_id: int,
    stop: StopStrings | None = None,
) -> list[Completion]:
    """One completion per prompt, by `model.generate`.

    Args:
        causal_lm: unwrapped model, PEFT or plain.
        prompts: token ids of each row; repeat a prompt to sample it several times.
        sampling: the options.
        noise_keys: one key per row, see `row_noise`.
        eos_ids: ids that end a completion.
        pad_token_id: written into padding, never looked at.
        stop: texts that end a completion.

    Returns:
        One `Completion` per row, in order.
    """
    device = next(causal_lm.parameters()).device
    width = max(len(prompt) for prompt in prompts)
    input_ids = torch.full((len(prompts), width), pad_token_id, dtype=torch.long)
    mask = torch.zeros((len(prompts), width), dtype=torch.bool)
    for i, prompt in enumerate(prompts):
        input_ids[i, width - len(prompt) :] = torch.as_tensor(prompt)
        mask[i, width - len(prompt) :] = True
    input_ids, mask = input_ids.to(device), mask.to(device)
    noise = row_noise(noise_keys, sampling.max_new_tokens).to(device)
    processor = ChosenToken(TokenSampler(sampling, noise, prompts, eos_ids))
    config = GenerationConfig(
        max_new_tokens=sampling.max_new_tokens,
        do_sample=False,  # the sampler has drawn already: one token is left
        eos_token_id=list(eos_ids) or None,
        pad_token_id=pad_token_id,
        use_cache=True,
    )
    with generating(causal_lm), neutral_generation_config(causal_lm_of(causal_lm)):
        output = causal_lm.generate(
            input_ids=input_ids,
            attention_mask=mask.long(),
            generation_config=config,
            logits_processor=LogitsProcessorList([processor]),
            stopping_criteria=StoppingCriteriaList([] if stop is None else [StopAt(stop, width)]),
        )
    return completions_of(output[:, width:].tolist(), torch.stack(processor.logprobs, dim=1).tolist(), eos_ids, stop)
