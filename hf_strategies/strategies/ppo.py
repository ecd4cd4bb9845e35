"""Proximal policy optimisation with a learned critic (Schulman et al. 2017, arXiv 1707.06347), token by token.

    r_t = [t is last] * reward - kl_coef * KL_t,   A, R = GAE(r, V)  (arXiv 1506.02438)
    L   = mean_t[ -min(rho_t A_t, clip(rho_t, 1 - eps, 1 + eps) A_t) ] + vf_coef * mean_t[ (V_t - R_t)^2 ]

rho_t = p(t) / p_old(t); KL_t compares the policy at rollout time with the reference (k1). V, A and R are computed once
per rollout with the critic as it was then and stay fixed over all passes on that rollout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_strategies import credit
from hf_strategies import functional as f
from hf_strategies.batch import Batch
from hf_strategies.options import Options, option
from hf_strategies.policy_output import PolicyOutput
from hf_strategies.stats import Mean, Metrics
from hf_strategies.strategies.base import Strategy
from hf_strategies.strategies.sampler_correction import SamplerCorrectionOptions


@dataclass
class PPOOptions(SamplerCorrectionOptions):
    """Options of PPO."""

    epsilon: float = option(0.2, "Clip distance of the policy ratio, in [0, 1] (PPO paper).")
    vf_coef: float = option(
        0.5,
        "Weight of the value loss, >= 0; with 0.5 it is the usual half squared error.",
    )
    kl_coef: float = option(
        0.01,
        "Weight of the KL penalty in the token rewards, >= 0; 0 needs no reference model.",
    )
    gamma: float = option(1.0, "Discount, in [0, 1].")
    gae_lambda: float = option(0.95, "Lambda of generalised advantage estimation, in [0, 1].")

    def validate(self) -> None:  # noqa: D102 - see Options
        super().validate()
        for name in ("epsilon", "gamma", "gae_lambda"):
            self.require_number(name, 0.0, 1.0)
        self.require_number("vf_coef", 0.0)
        self.require_number("kl_coef", 0.0)


class PPO(Strategy):
    """See the module's docstring."""

    Options: ClassVar[type[Options]] = PPOOptions
    options: PPOOptions
    needs_rewards = True
    needs_critic = True
    needs_old_logprobs = True

    @property
    def needs_reference(self) -> bool:  # noqa: D102 - see Strategy
        return self.options.kl_coef > 0

    def assign_credit(self, batch: Batch) -> tuple[Batch, Metrics]:  # noqa: D102 - see Strategy
        o = self.options
        if batch.old_logprobs is None:
            raise ValueError("PPO batches must provide old_logprobs captured at rollout")
        if batch.values is None:
            raise ValueError("PPO batches must provide values captured at rollout")
        assert batch.rewards is not None
        scorable = ~batch.rewards.isnan()
        mask = batch.loss_mask & scorable.unsqueeze(-1)
        empty = scorable & ~batch.loss_mask.any(dim=-1)
        rows = torch.tensor(batch.num_rows, device=batch.device)
        metrics: Metrics = {
            "reward": Mean.of(batch.rewards, scorable),
            "rows_dropped/empty_completion": Mean(empty.sum().double(), rows),
        }
        kl = None
        if self.needs_reference:
            assert batch.ref_logprobs is not None
            kl = f.kl_divergence(batch.old_logprobs, batch.ref_logprobs, mask, "k1").double()
            metrics["kl"] = Mean.of(
                f.kl_divergence(batch.old_logprobs, batch.ref_logprobs, mask, "k3"),
                mask,
            )
        token_rewards = credit.shaped_rewards(batch.rewards, kl, mask, o.kl_coef)
        advantages, returns = credit.generalized_advantages(token_rewards, batch.values, mask, o.gamma, o.gae_lambda)
        explained = credit.explained_variance(batch.values, returns, mask)
        if not explained.isnan():
            metrics["explained_variance"] = Mean(explained, torch.ones_like(explained))
        return batch.replace(loss_mask=mask, advantages=advantages.float(), returns=returns.float()), metrics

    def loss(self, policy: PolicyOutput, batch: Batch, num_items: Tensor) -> tuple[Tensor, Metrics]:  # noqa: D102
        assert batch.advantages is not None
        assert batch.returns is not None
        assert batch.old_logprobs is not None
        assert policy.values is not None
        o, mask = self.options, batch.loss_mask
        ratio = f.log_ratio(policy.logprobs, batch.old_logprobs, mask).exp()
        weights, metrics = o.sampler_weights(policy, batch.old_logprobs, batch, mask)
        surrogate = weights * f.clipped_surrogate(ratio, batch.advantages, o.epsilon, o.epsilon)
        policy_loss = f.aggregate(surrogate, mask, num_items, "dapo")
        error = torch.where(mask, policy.values - batch.returns, torch.zeros_like(policy.values))
        value_loss = f.aggregate(error.square(), mask, num_items, "dapo")
        metrics |= {
            "policy_loss": self.share(policy_loss, batch, num_items),
            "value_loss": self.share(value_loss, batch, num_items),
            **f.clip_metrics(ratio.detach(), batch.advantages, mask, o.epsilon, o.epsilon),
        }
        metrics |= self.entropy_metric(policy, mask)
        return policy_loss + o.vf_coef * value_loss, metrics
