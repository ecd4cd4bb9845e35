"""The policy that DPO and KL penalties compare with: the weights the run started from, in memory.

Nothing is reloaded from a path: weights that were changed after loading would be silently ignored. A reference may
follow the policy at a distance (trust-region methods, arXiv 2404.09656): `Reference.mix`.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor, nn

REFERENCE_ADAPTER = "reference"
# Rank of a mixed reference, in ranks of the policy's adapter. A mixture has a rank more with every step; of four, with
# TRL's weight of 0.6, what is five steps old and could be lost weighs 0.4 ** 4.
MIXED_RANKS = 4


class Reference(ABC):
    """A frozen model that scores batches."""

    @abstractmethod
    def activated(self, policy: nn.Module) -> AbstractContextManager[nn.Module]:
        """Context in which the yielded model gives the reference's outputs.

        Args:
            policy: the policy as it is called in training, wrapped or not.
        """

    def identity(self, policy: nn.Module) -> tuple[nn.Module, Mapping[str, Tensor]]:
        """The model that gives its outputs, and the weights among that model's that do.

        Args:
            policy: unwrapped policy.
        """
        raise TypeError(f"a reference of the kind {type(self).__name__} is not asked ahead of training")

    def mix(self, policy: nn.Module, alpha: float) -> None:
        """Become ``alpha * policy + (1 - alpha) * reference``.

        Args:
            policy: unwrapped policy.
            alpha: in (0, 1].
        """
        raise TypeError(f"a reference of the kind {type(self).__name__} does not change")

    def state(self) -> dict[str, Tensor]:
        """What `mix` changes, for a checkpoint."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:  # noqa: B027 - most have none
        """Restore what `state` gave."""

    def park(self) -> None:  # noqa: B027 - most hold nothing of their own
        """Free the accelerator until the next use."""


class Present(Reference):
    """The policy as it is now: only before its first update."""

    @contextmanager
    def activated(self, policy: nn.Module) -> Iterator[nn.Module]:  # noqa: D102 - see Reference
        yield policy

    def identity(self, policy: nn.Module) -> tuple[nn.Module, Mapping[str, Tensor]]:  # noqa: D102 - see Reference
        return policy, policy.state_dict()


class AdapterOff(Reference):
    """The base model under a fresh adapter: the policy with its adapter switched off. No second model in memory."""

    def __init__(self, model: PeftModel) -> None:
        self.model = model

    @contextmanager
    def activated(self, policy: nn.Module) -> Iterator[nn.Module]:  # noqa: D102 - see Reference
        with self.model.disable_adapter():
            yield policy

    def identity(self, policy: nn.Module) -> tuple[nn.Module, Mapping[str, Tensor]]:  # noqa: D102 - see Reference
        base, prefix = self.model.get_base_model(), cast(str, self.model.base_model.prefix)
        # Named as without an adapter.
        weights = {name.replace(".base_layer.", "."): value for name, value in base.state_dict().items()}
        return base, {name: value for name, value in weights.items() if prefix not in name}


class FrozenAdapter(Reference):
    """A frozen copy of an adapter, on the same base model.

    Args:
        model: the policy.
        mixed: give the copy the rank that mixtures need. The product of its matrices is what is mixed, not the
            matrices: the mean of two products is no product of means.
    """

    def __init__(self, model: PeftModel, *, mixed: bool = False) -> None:
        self.model = model
        self.mixed = mixed
        self.policy_adapter = model.active_adapter
        if not isinstance(self.policy_adapter, str):
            raise ValueError(f"one active adapter is needed to copy a reference from, got {self.policy_adapter}")
        if REFERENCE_ADAPTER in model.peft_config:
            raise ValueError(f"the model has an adapter called {REFERENCE_ADAPTER!r} already; rename or delete it")
        trainable = _requires_grad(model)
        config = copy.deepcopy(model.peft_config[self.policy_adapter])
        if isinstance(config, LoraConfig):
            config.init_lora_weights = True  # others (PiSSA, OLoRA) would take their part out of the base once more
        if mixed:
            assert isinstance(config, LoraConfig)
            config.r *= MIXED_RANKS
            config.rank_pattern = {name: MIXED_RANKS * rank for name, rank in (config.rank_pattern or {}).items()}
        model.add_adapter(REFERENCE_ADAPTER, config)
        model.set_adapter(self.policy_adapter)
        self.mix(model, 1.0)
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

    @torch.no_grad()
    def mix(self, policy: nn.Module, alpha: float) -> None:  # noqa: D102 - see Reference
        if not self.mixed:
            self.load_state(_adapter_state(self.model, self.policy_adapter))
            return
        for module in self.model.modules():
            if isinstance(module, LoraLayer) and REFERENCE_ADAPTER in module.lora_A:
                _mix_products(module, self.policy_adapter, REFERENCE_ADAPTER, alpha)

    def state(self) -> dict[str, Tensor]:  # noqa: D102 - see Reference
        return _adapter_state(self.model, REFERENCE_ADAPTER)

    def load_state(self, state: Mapping[str, Tensor]) -> None:  # noqa: D102 - see Reference
        set_peft_model_state_dict(self.model, dict(state), adapter_name=REFERENCE_ADAPTER)


class FrozenModel(Reference):
    """A second model: the one given, or a copy of the policy as it is now."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model.eval().requires_grad_(False)
        # Float32 beside weights of half precision, in which a small step of a mixture would be rounded away.
        self._exact: dict[str, Tensor] = {}

    @classmethod
    def snapshot(cls, policy: nn.Module) -> FrozenModel:
        """Copy the policy's weights in memory."""
        return cls(copy.deepcopy(policy))

    @contextmanager
    def activated(self, policy: nn.Module) -> Iterator[nn.Module]:  # noqa: D102 - see Reference
        device = next(policy.parameters()).device
        yield self.model.to(device)

    def identity(self, policy: nn.Module) -> tuple[nn.Module, Mapping[str, Tensor]]:  # noqa: D102 - see Reference
        return self.model, self.model.state_dict()

    @torch.no_grad()
    def mix(self, policy: nn.Module, alpha: float) -> None:  # noqa: D102 - see Reference
        current = dict(policy.named_parameters())
        for name, parameter in self.model.named_parameters():
            exact: Tensor = parameter
            if parameter.dtype in (torch.bfloat16, torch.float16):
                exact = self._exact.setdefault(name, parameter.detach().float())
            exact.lerp_(current[name].detach().to(exact), alpha)
            parameter.copy_(exact)

    def state(self) -> dict[str, Tensor]:  # noqa: D102 - see Reference
        return {name: self._exact.get(name, parameter.detach()) for name, parameter in self.model.named_parameters()}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:  # noqa: D102 - see Reference
        for name, parameter in self.model.named_parameters():
            parameter.copy_(state[name])
            if state[name].dtype != parameter.dtype:
                self._exact[name] = state[name].to(parameter.device)

    def park(self) -> None:  # noqa: D102 - see Reference
        if not hasattr(self.model, "hf_device_map"):  # what is spread over devices stays there
            self.model.to("cpu")


def make_reference(
    policy: nn.Module, ref_model: nn.Module | None = None, *, copied: bool = True, mixup_alpha: float | None = None
) -> Reference:
    """The cheapest reference that is right for this policy.

    Args:
        policy: unwrapped policy, before the first update and before a critic is attached.
        ref_model: explicit reference, if the caller has one.
        copied: False where it is asked before the first update only, so that nothing needs to be copied.
        mixup_alpha: the weight of the policy, where the reference will be mixed with it.

    Returns:
        The given model; else, for a fresh adapter, the policy without it; for a trained adapter, or one to mix with, a
        frozen copy of it; for a full model, or an adapter that trains biases of the base model, a copy of all weights
        in memory.

    Raises:
        ValueError: a reference that is the policy, or that cannot be mixed with it.
    """
    reference = _reference(policy, ref_model, copied, mixup_alpha)
    if isinstance(reference, FrozenModel) and mixup_alpha is not None:
        _check_mixable(policy, reference.model, mixup_alpha)
    return reference


def _reference(policy: nn.Module, ref_model: nn.Module | None, copied: bool, mixup_alpha: float | None) -> Reference:
    if ref_model is not None:
        # Not only the same object: an adapter is put into the very modules of the model it is made for.
        trained = {id(parameter) for parameter in policy.parameters() if parameter.requires_grad}
        if any(id(parameter) in trained for parameter in ref_model.parameters()):
            raise ValueError("ref_model is the policy itself: it would change with every update; leave it unset")
        return FrozenModel(ref_model)
    fresh = isinstance(policy, PeftModel) and not _trains_base_bias(policy) and _is_identity(policy)
    if not copied and not fresh:
        return Present()
    if not isinstance(policy, PeftModel) or _trains_base_bias(policy):
        return FrozenModel.snapshot(policy)
    if mixup_alpha is None:
        return AdapterOff(policy) if fresh else FrozenAdapter(policy)
    if mixup_alpha < 1 and not _is_plain_lora(policy):
        raise ValueError(
            f"ref_model_mixup_alpha={mixup_alpha}: only LoRA of linear layers without anything besides (DoRA, "
            "modules_to_save, embeddings) can be mixed; allowed with this adapter is 1.0, the policy as it is"
        )
    return FrozenAdapter(policy, mixed=mixup_alpha < 1)


def _check_mixable(policy: nn.Module, model: nn.Module, alpha: float) -> None:
    shapes, own = ({name: p.shape for name, p in m.named_parameters()} for m in (policy, model))
    if shapes != own:
        raise ValueError(
            "sync_ref_model=True mixes ref_model with the policy, weight by weight: allowed is one of the same "
            "architecture, with the same adapter or none; or leave ref_model out"
        )
    if alpha < 1 and isinstance(policy, PeftModel):
        raise ValueError(
            f"ref_model_mixup_alpha={alpha}: the matrices of an adapter cannot be mixed one by one; allowed with this "
            "adapter is 1.0, the policy as it is"
        )


def _mix_products(layer: Any, policy: str, reference: str, alpha: float) -> None:
    """Give a layer's reference the best product of its rank for the mean of both products."""
    a = torch.cat([layer.lora_A[policy].weight, layer.lora_A[reference].weight]).float()
    own, other = alpha * layer.scaling[policy], (1 - alpha) * layer.scaling[reference]
    b = torch.cat([own * layer.lora_B[policy].weight, other * layer.lora_B[reference].weight], dim=1).float()
    left, of_b = torch.linalg.qr(b)
    right, of_a = torch.linalg.qr(a.t())
    u, sizes, v = torch.linalg.svd(of_b @ of_a.t())
    rank = min(layer.r[reference], len(sizes))
    roots = (sizes[:rank] / layer.scaling[reference]).sqrt()
    for module, value in (
        (layer.lora_A[reference], roots.unsqueeze(1) * (v[:rank] @ right.t())),
        (layer.lora_B[reference], (left @ u[:, :rank]) * roots),
    ):
        weight = cast(Tensor, module.weight)
        weight.zero_()
        weight[tuple(slice(size) for size in value.shape)] = value.to(weight)


def _adapter_state(model: PeftModel, adapter: str) -> dict[str, Tensor]:
    # peft would add the base's embeddings where the vocabulary has grown.
    return get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)


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


def _is_plain_lora(model: PeftModel) -> bool:
    """Whether all that an adapter does is a product of two matrices beside each of some linear layers."""
    config = model.peft_config[model.active_adapter]
    extras = ("modules_to_save", "use_dora", "lora_bias", "trainable_token_indices", "target_parameters")
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    plain = isinstance(config, LoraConfig) and not any(getattr(config, name, None) for name in extras)
    return plain and bool(layers) and all(map(_is_product, layers))


def _is_product(layer: LoraLayer) -> bool:
    # Whatever the base layer is: quantised ones too.
    parts = (*layer.lora_A.values(), *layer.lora_B.values())
    return bool(parts) and all(type(part) is nn.Linear for part in parts) and not getattr(layer, "lora_variant", None)


def _trains_base_bias(model: PeftModel) -> bool:
    """Whether training moves biases that belong to the base model: no adapter switch brings the old ones back."""
    return getattr(model.peft_config[model.active_adapter], "bias", "none") != "none"


def _requires_grad(model: nn.Module) -> dict[str, bool]:
    return {name: parameter.requires_grad for name, parameter in model.named_parameters()}
