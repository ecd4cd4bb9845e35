"""From rewards to what losses read: group advantages, token rewards, advantages and returns of a critic.

Tensors in, tensors out. Shapes use the legend of `hf_strategies.batch`; masks are bool, True = counts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_strategies.batch import Batch
from hf_strategies.stats import Mean, Metrics

REWARD_SCALES = ("group", "batch", "none")


def group_advantages(
    rewards: Tensor,
    group: Tensor,
    scale: str = "group",
    *,
    unbiased: bool = True,
    eps: float = 1e-4,
    batch_std: Tensor | None = None,
) -> Tensor:
    """Advantage of each row over the mean of its group.

    ``A = (r - mean_g) / (std + eps)`` (GRPO, arXiv 2402.03300); without the division it is Dr. GRPO
    (arXiv 2503.20783). Computed in float64; a group whose rewards are all equal gets exactly 0, because in floating
    point its mean need not equal its members and a tiny std would blow the difference up.

    Args:
        rewards: [N], NaN = not scorable: outside the statistics, advantage 0.
        group: [N] long.
        scale: ``group`` std of the group, ``batch`` std over all scorable rows, ``none`` no division.
        unbiased: divide the squared deviations by n - 1 (TRL, DeepSeek) instead of n.
        eps: added to the std.
        batch_std: std for ``batch``, scalar or [N], where there are more rows than these; theirs when left out.

    Returns:
        [N] float64.

    Raises:
        ValueError: another ``scale``.
    """
    if scale not in REWARD_SCALES:
        raise ValueError(f"scale={scale!r}: allowed are {REWARD_SCALES}")
    rewards = rewards.to(torch.float64)
    scorable = ~rewards.isnan()
    safe = torch.where(scorable, rewards, torch.zeros_like(rewards))
    _, index = group.unique(return_inverse=True)
    groups = int(index.max()) + 1 if index.numel() else 0

    def per_group(values: Tensor) -> Tensor:
        return values.new_zeros(groups).index_add(0, index, values)

    count = per_group(scorable.to(torch.float64))
    mean = per_group(safe) / count.clamp(min=1)
    deviation = torch.where(scorable, safe - mean[index], torch.zeros_like(safe))
    constant = constant_groups(rewards, group)
    deviation = torch.where(constant, torch.zeros_like(deviation), deviation)
    if scale == "none":
        return deviation
    if scale == "group":
        squares = per_group(deviation.square())
        std = (squares / (count - int(unbiased)).clamp(min=1)).sqrt()[index]
    elif batch_std is not None:
        std = batch_std
    else:
        total = scorable.sum().clamp(min=1)
        batch_mean = safe.sum() / total
        squares = torch.where(scorable, (safe - batch_mean).square(), torch.zeros_like(safe)).sum()
        std = (squares / (total - int(unbiased)).clamp(min=1)).sqrt()
    return deviation / (std + eps)


def constant_groups(rewards: Tensor, group: Tensor) -> Tensor:
    """[N] bool, True for rows whose group has no two different scorable rewards."""
    scorable = ~rewards.isnan()
    _, index = group.unique(return_inverse=True)
    groups = int(index.max()) + 1 if index.numel() else 0
    high = torch.where(scorable, rewards, torch.full_like(rewards, -torch.inf))
    low = torch.where(scorable, rewards, torch.full_like(rewards, torch.inf))
    maximum = high.new_full((groups,), -torch.inf).scatter_reduce(0, index, high, "amax")
    minimum = low.new_full((groups,), torch.inf).scatter_reduce(0, index, low, "amin")
    return (maximum <= minimum)[index]


def shaped_rewards(rewards: Tensor, kl: Tensor | None, mask: Tensor, kl_coef: float) -> Tensor:
    """Token rewards of PPO: the row's reward on its last trained token, a KL penalty on every trained token.

    Args:
        rewards: [N]; of rows that train nothing, or NaN, it is not used.
        kl: [N, C] per-token divergence estimate, in nats, or None.
        mask: [N, C] bool.
        kl_coef: weight of the penalty.

    Returns:
        [N, C], 0 where masked.
    """
    positions = torch.arange(mask.shape[-1], device=mask.device).expand_as(mask)
    last = torch.where(mask, positions, torch.full_like(positions, -1)).amax(dim=-1, keepdim=True)
    terminal = mask & (positions == last)
    spread = rewards.nan_to_num(0.0).unsqueeze(-1).expand_as(mask)
    out = torch.where(terminal, spread, torch.zeros_like(spread))
    if kl is not None:
        out = out - kl_coef * torch.where(mask, kl.to(out.dtype), torch.zeros_like(out))
    return out


def generalized_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the trained tokens of each row (arXiv 1506.02438).

    ``delta_t = r_t + gamma V_{t+1} - V_t``, ``A_t = delta_t + gamma lambda A_{t+1}``, ``R_t = A_t + V_t``, where t + 1
    is the *next trained token*: a masked token (a tool's answer, padding) is jumped over, value and accumulator carry
    across it. After the last trained token the episode is over and V is 0.

    Args:
        rewards: [N, C].
        values: [N, C], V of the state before each token.
        mask: [N, C] bool.
        gamma: discount in [0, 1].
        gae_lambda: in [0, 1].

    Returns:
        advantages and returns, both [N, C], 0 where masked.
    """
    rewards = torch.where(mask, rewards, torch.zeros_like(rewards))
    values = torch.where(mask, values.to(rewards.dtype), torch.zeros_like(rewards))
    advantages = torch.zeros_like(rewards)
    next_value = torch.zeros_like(rewards[..., 0])
    accumulator = torch.zeros_like(next_value)
    for t in range(mask.shape[-1] - 1, -1, -1):
        here = mask[..., t]
        delta = rewards[..., t] + gamma * next_value - values[..., t]
        accumulator = torch.where(here, delta + gamma * gae_lambda * accumulator, accumulator)
        next_value = torch.where(here, values[..., t], next_value)
        advantages[..., t] = torch.where(here, accumulator, torch.zeros_like(accumulator))
    return advantages, advantages + values


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """1 - Var(returns - values) / Var(returns) over masked-in tokens; NaN when the returns do not vary."""
    returns, values = returns[mask].double(), values[mask].double()
    if returns.numel() < 2 or returns.max() == returns.min():
        return torch.tensor(float("nan"), dtype=torch.float64, device=returns.device)
    return 1.0 - (returns - values).var(correction=0) / returns.var(correction=0)


def reward_metrics(batch: Batch) -> Metrics:
    """``reward`` (mean), ``reward_std`` (mean over groups of their std) and ``frac_reward_zero_std``.

    Groups of one row have nothing to vary: where there are no others, the latter two are left out.
    """
    assert batch.rewards is not None
    # On the host: on an accelerator every group would wait for it several times.
    rewards, group = batch.rewards.cpu(), batch.group.cpu()
    scorable = ~rewards.isnan()
    stds, constant = [], []
    for number in group[group >= 0].unique():
        rows = group == number
        members = rewards[rows & scorable]
        if int(rows.sum()) > 1 and members.numel():
            stds.append(members.std() if members.numel() > 1 else members.new_zeros(()))
            constant.append((members.max() == members.min()).to(rewards.dtype))
    metrics: Metrics = {"reward": Mean.of(rewards, scorable)}
    if stds:
        count = torch.tensor(len(stds))
        metrics["reward_std"] = Mean(torch.stack(stds).sum(), count)
        metrics["frac_reward_zero_std"] = Mean(torch.stack(constant).sum(), count)
    return metrics
