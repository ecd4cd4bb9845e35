"""Group-relative policy optimisation (DeepSeekMath, arXiv 2402.03300).

    A_i = (r_i - mean_group(r)) / (std_group(r) + 1e-4)
    L   = aggregate_t[ -min(rho_t A, clip(rho_t, 1 - eps, 1 + eps_high) A) + beta * KL_t ],   rho_t = p(t) / p_old(t)

KL_t is the k3 estimate of KL(policy || reference). Where no optimizer step falls between sampling and loss, p_old is
the policy itself, detached: the ratio is 1 and the gradient that of REINFORCE with a group baseline.

Deviation from the paper: tokens are averaged over the optimizer step (DAPO) unless ``loss_type`` says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

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
class GRPOOptions(SamplerCorrectionOptions):
    """Options of GRPO; names and defaults are TRL's."""

    beta: float = option(
        0.0,
        "Weight of the KL term, >= 0. 0 needs no reference model. DeepSeekMath used 0.04.",
    )
    epsilon: float = option(0.2, "Clip distance below ratio 1, in [0, 1].")
    epsilon_high: float | None = option(None, "Clip distance above ratio 1, >= 0; unset: epsilon. DAPO used 0.28.")
    loss_type: str = option(
        "dapo",
        "How token losses are averaged: dapo (tokens of the step), grpo (rows), dr_grpo (constant), bnpo.",
    )
    scale_rewards: str = option(
        "group",
        "What advantages are divided by: group (std of the group), batch (std of all rows), none (Dr. GRPO).",
    )
    max_completion_length: int = option(512, "Most tokens of a completion, >= 1; also the constant of dr_grpo.")

    def validate(self) -> None:  # noqa: D102 - see Options
        super().validate()
        self.require_number("beta", 0.0)
        self.require_number("epsilon", 0.0, 1.0)
        if self.epsilon_high is not None:
            self.require_number("epsilon_high", 0.0)
        self.require_one_of("loss_type", f.AGGREGATIONS)
        # TRL writes the two ends of this switch as booleans.
        if isinstance(self.scale_rewards, bool):
            self.scale_rewards = "group" if self.scale_rewards else "none"
        self.require_one_of("scale_rewards", credit.REWARD_SCALES)
        self.require_integer("max_completion_length", 1)


class GRPO(Strategy):
    """See the module's docstring."""

    Options: ClassVar[type[Options]] = GRPOOptions
    options: GRPOOptions
    needs_rewards = True
    min_group_size = 2

    @property
    def needs_reference(self) -> bool:  # noqa: D102 - see Strategy
        return self.options.beta > 0

    @property
    def needs_reward_std(self) -> bool:  # noqa: D102 - see Strategy
        return self.options.scale_rewards == "batch"

    def assign_credit(self, batch: Batch) -> tuple[Batch, Metrics]:  # noqa: D102 - see Strategy
        assert batch.rewards is not None
        advantages = credit.group_advantages(
            batch.rewards, batch.group, self.options.scale_rewards, batch_std=batch.reward_std
        )
        scorable = ~batch.rewards.isnan()
        batch = batch.replace(
            advantages=advantages.float().unsqueeze(-1).expand(batch.loss_mask.shape).contiguous(),
            loss_mask=batch.loss_mask & scorable.unsqueeze(-1),
        )
        return batch, credit.reward_metrics(batch)

    def count_items(self, batch: Batch) -> Tensor:  # noqa: D102 - see Strategy
        return f.count_items(batch.loss_mask, self.options.loss_type, self.options.max_completion_length)

    def idle_rows(self, batch: Batch) -> Tensor:
        """Rows without advantage, as those of a group of equal rewards, where no KL term pulls at them."""
        if batch.advantages is None or self.needs_reference:
            return super().idle_rows(batch)
        return ~(batch.advantages.ne(0) & batch.loss_mask).any(dim=-1)

    def loss(self, policy: PolicyOutput, batch: Batch, num_items: Tensor) -> tuple[Tensor, Metrics]:  # noqa: D102
        assert batch.advantages is not None
        o, mask = self.options, batch.loss_mask
        epsilon_high = o.epsilon if o.epsilon_high is None else o.epsilon_high
        old = policy.logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        ratio = f.log_ratio(policy.logprobs, old, mask).exp()
        weights, metrics = o.sampler_weights(policy, old, batch, mask)
        token_loss = weights * f.clipped_surrogate(ratio, batch.advantages, o.epsilon, epsilon_high)
        loss = f.aggregate(token_loss, mask, num_items, o.loss_type)
        metrics["policy_loss"] = self.share(loss, batch, num_items)
        if self.needs_reference:
            assert batch.ref_logprobs is not None
            kl = f.kl_divergence(policy.logprobs, batch.ref_logprobs, mask, "k3")
            loss = loss + o.beta * f.aggregate(kl, mask, num_items, o.loss_type)
            metrics["kl"] = Mean.of(kl, mask)
        metrics |= f.clip_metrics(ratio.detach(), batch.advantages, mask, o.epsilon, epsilon_high)
        metrics |= self.entropy_metric(policy, mask)
        return loss, metrics
