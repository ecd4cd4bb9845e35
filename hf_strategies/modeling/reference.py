"""The frozen policy that DPO and KL penalties compare with: always the weights the run started from, in memory.

Nothing is reloaded from a path: weights that were changed after loading would be silently ignored.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import cast

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from torch import nn

REFERENCE_ADAPTER = "reference"


class Reference(ABC):
    """A frozen model that scores batches."""

    @abstractmethod
    def activated(self, policy: nn.Module) -> AbstractContextManager[nn.Module]:
        """Context in which the yielded model gives the reference's outputs.

        Args:
            policy: the policy as it is called in training, wrapped or not.
        """


class AdapterOff(Reference):
    """The base model under a fresh adapter: the policy with its adapter switched off. No second model in memory."""

    def __init__(self, model: PeftModel) -> None:
        self.model = model

    @contextmanager
    def activated(self, policy: nn.Module) -> Iterator[nn.Module]:  # noqa: D102 - see Reference
        with self.model.disable_adapter():
            yield policy


class FrozenAdapter(Reference):
    """A frozen copy of an already trained adapter, on the same base model."""

    def __init__(self, model: PeftModel) -> None:
        self.model = model
        self.policy_adapter = model.active_adapter
        if not isinstance(self.policy_adapter, str):
            raise ValueError(f"one active adapter is needed to copy a reference from, got {self.policy_adapter}")
        if REFERENCE_ADAPTER in model.peft_config:
            raise ValueError(f"the model has an adapter called {REFERENCE_ADAPTER!r} already; rename or delete it")
        trainable = _requires_grad(model)
        weights = get_peft_model_state_dict(model, adapter_name=self.policy_adapter)
        model.add_adapter(REFERENCE_ADAPTER, copy.deepcopy(model.peft_config[self.policy_adapter]))
        set_peft_model_state_dict(model, weights, adapter_name=REFERENCE_ADAPTER)
        model.set_adapter(self.policy_adapter)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trainable.get(name, False))

    @contextmanager
    def activated(self, policy: nn.Module) -> Iterator[nn.Module]:  # noqa: D102 - see Reference
        # Switching adapters switches requires_grad too; the optimizer and DDP must find it as it was.
        trainable = _requires_grad(self.model)
        self.model.set_adapter(REFERENCE_ADAPTER)
        try:
            yield policy
        finally:
            self.model.set_adapter(self.policy_adapter)
            for name, parameter in self.model.named_parameters():
                parameter.requires_grad_(trainable[name])


class FrozenModel(Reference):
    """A second model: the one given, or a copy of the policy as it is now."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model.eval().requires_grad_(False)

    @classmethod
    def snapshot(cls, policy: nn.Module) -> FrozenModel:
        """Copy the policy's weights in memory."""
        return cls(copy.deepcopy(policy))

    @contextmanager
    def activated(self, policy: nn.Module) -> Iterator[nn.Module]:  # noqa: D102 - see Reference
        device = next(policy.parameters()).device
        yield self.model.to(device)


def make_reference(policy: nn.Module, ref_model: nn.Module | None = None) -> Reference:
    """The cheapest reference that is right for this policy.

    Args:
        policy: unwrapped policy, before the first update and before a critic is attached.
        ref_model: explicit reference, if the caller has one.

    Returns:
        The given model; else, for a fresh adapter, the policy without it; for a trained adapter, a frozen copy of it;
        for a full model, or an adapter that trains biases of the base model, a copy of all weights in memory.
    """
    if ref_model is not None:
        # Not only the same object: an adapter is put into the very modules of the model it is made for.
        trained = {id(parameter) for parameter in policy.parameters() if parameter.requires_grad}
        if any(id(parameter) in trained for parameter in ref_model.parameters()):
            raise ValueError("ref_model is the policy itself: it would change with every update; leave it unset")
        return FrozenModel(ref_model)
    if not isinstance(policy, PeftModel) or _trains_base_bias(policy):
        return FrozenModel.snapshot(policy)
    return AdapterOff(policy) if _is_identity(policy) else FrozenAdapter(policy)


def _is_identity(model: PeftModel) -> bool:
    """Whether the active adapter changes nothing: plain LoRA whose B matrices are all zero."""
    config = model.peft_config[model.active_adapter]
    if getattr(config, "modules_to_save", None):
        return False
    found = False
    for module in model.modules():
        if isinstance(module, LoraLayer):
            for part in (*module.lora_B.values(), *module.lora_embedding_B.values()):
                weight = cast(torch.Tensor, part.weight if isinstance(part, nn.Module) else part)
                found = True
                if torch.count_nonzero(weight):
                    return False
            if getattr(config, "use_dora", False):
                return False
    return found


def _trains_base_bias(model: PeftModel) -> bool:
    """Whether training moves biases that belong to the base model: no adapter switch brings the old ones back."""
    return getattr(model.peft_config[model.active_adapter], "bias", "none") != "none"


def _requires_grad(model: nn.Module) -> dict[str, bool]:
    return {name: parameter.requires_grad for name, parameter in model.named_parameters()}
