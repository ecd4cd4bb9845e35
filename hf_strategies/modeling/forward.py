"""From a batch to numbers per completion token: the only place in the package where training logits exist."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_strategies import functional as f
from hf_strategies.batch import Batch, PolicyOutput
from hf_strategies.modeling.critic import critic_of
from hf_strategies.modeling.moe import RouterLoad, is_mixture_of_experts

# Logits of this many positions are turned into log-probabilities at a time, so that the float32 copies a softmax needs
# stay small beside the logits themselves.
POSITIONS_PER_CHUNK = 1024


@dataclass
class ForwardResult:
    """Numbers for the strategy, and what a mixture of experts adds.

    Attributes:
        policy: per-token numbers.
        aux_loss: scalar load-balancing loss of this batch, unscaled, attached; None for dense models.
        router_load: which experts the batch's real tokens went to; None for dense models.
    """

    policy: PolicyOutput
    aux_loss: Tensor | None = None
    router_load: RouterLoad | None = None


def causal_lm_of(model: Any) -> Any:
    """The Hugging Face causal LM inside a PEFT model (or the model itself)."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


class Forward:
    """Scores the completions of a batch with a causal LM.

    Args:
        causal_lm: unwrapped model, PEFT or plain; read for its signature and configuration only. What is called is the
            (possibly wrapped) model given to `__call__`: calling a module inside DDP or ZeRO would lose gradients.
        temperature: log-probabilities are those of logits / temperature.
    """

    def __init__(self, causal_lm: nn.Module, temperature: float = 1.0) -> None:
        lm = causal_lm_of(causal_lm)
        parameters = inspect.signature(lm.forward).parameters
        self.temperature = temperature
        self.keeps_logits = "logits_to_keep" in parameters
        self.takes_positions = "position_ids" in parameters
        self.is_moe = is_mixture_of_experts(lm)
        self.config = lm.config

    def __call__(
        self,
        model: nn.Module,
        batch: Batch,
        *,
        entropy: bool = False,
        vocab_mean: bool = False,
        values: bool = False,
        router: bool = False,
    ) -> ForwardResult:
        """Run the model once.

        Args:
            model: the model to call, wrapped or not.
            batch: N rows.
            entropy: also return the entropy of each token's distribution, detached.
            vocab_mean: also return the mean log-probability over the vocabulary.
            values: also return the critic's values; the model must carry a critic.
            router: also return the aux loss and the router's load, if the model is a mixture of experts.

        Returns:
            Numbers of shape [N, C].
        """
        completion_len = batch.completion_ids.shape[1]
        inputs: dict[str, object] = {
            "input_ids": batch.input_ids,
            "attention_mask": batch.attention_mask.long(),
            "use_cache": False,
        }
        if self.takes_positions:
            inputs["position_ids"] = batch.position_ids
        if self.keeps_logits:
            # Completion token j is scored one position before it, the first one by the last prompt token.
            inputs["logits_to_keep"] = completion_len + 1
        if router and self.is_moe:
            inputs["output_router_logits"] = True
        critic = critic_of(model) if values else None
        if values and critic is None:
            raise ValueError("values=True, but the model carries no critic (see modeling.critic.attach_critic)")
        if critic is not None:
            with critic.collecting():
                outputs = model(**inputs)
        else:
            outputs = model(**inputs)
        scoring = slice(-completion_len - 1, -1)
        result = ForwardResult(
            self._policy_output(
                outputs["logits"][:, scoring],
                batch.completion_ids,
                entropy=entropy,
                vocab_mean=vocab_mean,
            )
        )
        if critic is not None:
            result.policy.values = outputs["critic_values"][:, scoring]
        if router and self.is_moe:
            result.aux_loss = outputs["aux_loss"]
            real = batch.attention_mask & batch.in_group.unsqueeze(-1)
            result.router_load = RouterLoad.of(outputs["router_logits"], real, self.config)
        return result

    def _policy_output(self, logits: Tensor, token_ids: Tensor, *, entropy: bool, vocab_mean: bool) -> PolicyOutput:
        rows, length, vocab = logits.shape
        flat_logits, flat_ids = logits.reshape(-1, vocab), token_ids.reshape(-1)
        logprobs, entropies, means = [], [], []
        for start in range(0, rows * length, POSITIONS_PER_CHUNK):
            chunk = flat_logits[start : start + POSITIONS_PER_CHUNK]
            if chunk.dtype in (torch.float16, torch.bfloat16):
                chunk = chunk.float()
            if self.temperature != 1.0:
                chunk = chunk / self.temperature
            logprobs.append(f.token_logprobs(chunk, flat_ids[start : start + POSITIONS_PER_CHUNK]))
            if entropy:
                with torch.no_grad():
                    entropies.append(f.entropy_from_logits(chunk))
            if vocab_mean:
                means.append(chunk.mean(dim=-1) - chunk.logsumexp(dim=-1))

        def shaped(chunks: list[Tensor]) -> Tensor:
            return torch.cat(chunks).view(rows, length)

        return PolicyOutput(
            logprobs=shaped(logprobs),
            entropy=shaped(entropies) if entropy else None,
            vocab_mean_logprobs=shaped(means) if vocab_mean else None,
        )
