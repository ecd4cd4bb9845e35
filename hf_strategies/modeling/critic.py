"""The learned critic: a value head on the policy's own trunk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")

# Name under which the critic hangs in the causal LM; no checkpoint of the policy may contain it.
CRITIC_NAME = "critic"


class Critic(nn.Module):
    """Value head V(s) = w . h + b on the hidden state that also feeds the LM head.

    Initialised to zero, so that V = 0 everywhere before the first update. It is a submodule of the causal LM and is
    computed inside the model's own forward (by hooks), so one call of the wrapped model returns logits and values and
    DDP or ZeRO reduce its gradients like any others.

    Args:
        hidden_size: width of the trunk.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.head = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self._collecting = False
        self._hidden: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        """Values [..., S] in reward units from hidden states [..., S, H]."""
        return self.head(hidden.to(self.head.weight.dtype)).squeeze(-1)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Model calls inside this context return ``critic_values``."""
        self._collecting = True
        try:
            yield
        finally:
            self._collecting = False
            self._hidden = None

    def keep_hidden(self, lm_head: nn.Module, args: tuple[Any, ...]) -> None:
        """Pre-hook of the LM head: what goes in is the hidden state of the positions whose logits are kept."""
        if self._collecting:
            self._hidden = args[0]

    def add_values(self, causal_lm: nn.Module, args: Any, output: Any) -> Any:
        """Hook of the causal LM: adds the values to its output."""
        if self._collecting:
            assert self._hidden is not None
            # A plain dict: DDP rebuilds what a model returns, and a ModelOutput refuses a field it does not declare.
            return {**output, "critic_values": self(self._hidden)}
        return output


def attach_critic(causal_lm: Any) -> Critic:
    """Give a causal LM (not its PEFT or DDP wrapper) a zero-initialised value head, in float32.

    Raises:
        ValueError: the model has no LM head that could be hooked.
    """
    lm_head = causal_lm.get_output_embeddings()
    if lm_head is None:
        raise ValueError(f"{type(causal_lm).__name__} has no output embeddings to read hidden states from")
    hidden_size = causal_lm.get_input_embeddings().weight.shape[-1]
    critic = Critic(getattr(causal_lm.config.get_text_config(), "hidden_size", hidden_size))
    critic.to(device=lm_head.weight.device, dtype=torch.float32)
    causal_lm.add_module(CRITIC_NAME, critic)
    lm_head.register_forward_pre_hook(critic.keep_hidden)
    causal_lm.register_forward_hook(critic.add_values)
    return critic


def critic_of(model: Any) -> Critic | None:
    """The critic inside a model, whatever wraps it."""
    return next((module for module in model.modules() if isinstance(module, Critic)), None)


def without_critic(state_dict: dict[str, T]) -> dict[str, T]:
    """A state dict without the critic's entries."""
    marker = f"{CRITIC_NAME}.head."
    return {key: value for key, value in state_dict.items() if marker not in key}
