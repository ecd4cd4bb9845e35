"""Correction for rollouts that another precision or another engine sampled than the one that trains.

    w_t = p_trainer(t) / p_sampler(t), detached, multiplies the policy's loss per token

p_trainer is the policy as it was when the rollout was made. Uncorrected, the gradient is biased toward what the
sampler likes better than the policy does (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy
RL Training").
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hf_strategies import functional as f
from hf_strategies.batch import Batch
from hf_strategies.options import Options, option
from hf_strategies.policy_output import PolicyOutput
from hf_strategies.stats import Extreme, Mean, Metrics

# Bounds of the weights that the methods' authors use.
BOUNDS = {
    "off": (0.0, 0.0),
    "token_truncate": (0.0, 2.0),
    "token_mask": (0.5, 5.0),
    "sequence_truncate": (0.0, 3.0),
    "sequence_mask": (0.0, 3.0),
}


@dataclass
class SamplerCorrectionOptions(Options):
    """Options of the correction."""

    sampler_correction: str = option(
        "auto",
        "Weights for rollouts of another precision or engine: token_truncate, token_mask, sequence_truncate, "
        "sequence_mask, off; auto: token_truncate where another samples, else off.",
    )
    sampler_correction_min: float | None = option(None, "Lower bound of token_mask, >= 0; unset: 0.5.")
    sampler_correction_max: float | None = option(
        None, "Upper bound of the weights, > 0; unset: 2 (token_truncate), 5 (token_mask), 3 (sequence_*)."
    )

    def validate(self) -> None:  # noqa: D102 - see Options
        super().validate()
        self.require_one_of("sampler_correction", ("auto", *f.SAMPLER_CORRECTIONS))
        if self.sampler_correction_min is not None:
            self.require_number("sampler_correction_min", 0.0)
        if self.sampler_correction_max is not None:
            self.require_number("sampler_correction_max", above=0.0)

    def sampler_weights(
        self, policy: PolicyOutput, old_logprobs: Tensor, batch: Batch, mask: Tensor
    ) -> tuple[Tensor | float, Metrics]:
        """Weights [N, C] for the tokens' losses, and how far sampler and trainer are apart.

        Args:
            policy: of this pass.
            old_logprobs: [N, C] of the policy that was sampled, as the training path computes it.
            batch: N rows; without ``sampling_logprobs`` there is nothing to correct.
            mask: [N, C] bool, tokens that train.
        """
        if batch.sampling_logprobs is None:
            return 1.0, {}
        computed = policy.computed_of(mask)
        how = "off" if self.sampler_correction == "auto" else self.sampler_correction
        low, high = BOUNDS[how]
        low = low if self.sampler_correction_min is None else self.sampler_correction_min
        high = high if self.sampler_correction_max is None else self.sampler_correction_max
        weights = f.sampler_weights(old_logprobs, batch.sampling_logprobs, computed, how, low, high)
        apart = f.log_ratio(old_logprobs.detach(), batch.sampling_logprobs, computed)
        metrics: Metrics = {
            "sampling/sampling_logp_difference/mean": Mean.of(apart.abs(), computed),
            "sampling/sampling_logp_difference/max": Extreme(apart.abs().max(), "max"),
        }
        if how != "off":
            metrics["sampling/importance_sampling_ratio/mean"] = Mean.of(weights, computed)
        return weights, metrics
