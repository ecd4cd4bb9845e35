"""The one batch layout.

Shape legend, used in every docstring of the package:

    B   prompts (groups) of a batch
    G   rows per prompt; groups may have different sizes
    N   rows, N = sum of the group sizes (B * G when they are equal), stored group after group
    P   padded prompt length          C   padded completion length          S   P + C
    T   tokens of a token stream      V   vocabulary size

A row is a prompt and one completion of it. Everything a strategy trains on is such rows: a document is its first
token and the rest (G = 1), a preference pair is two rows of one prompt with rewards 1 and 0, a GRPO group is G rows.
Prompts are padded on the left and completions on the right: column P + j of every row holds completion token j.

Masks say what True means: ``*_mask`` of the tokens marks real ones, ``loss_mask`` marks the ones that train (a tool's
answer inside a completion is seen but not trained). No mask is ever derived from a token id.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise

import torch
from torch import Tensor

# Per-token tensors [N, C] that ride along with the completions; all optional.
TOKEN_FIELDS = (
    "sampling_logprobs",
    "old_logprobs",
    "ref_logprobs",
    "values",
    "advantages",
    "returns",
)


@dataclass
class Row:
    """One prompt with one completion, ragged and on the host.

    Attributes:
        prompt_ids: token ids the completion is conditioned on; at least one.
        completion_ids: token ids that are scored, EOS included where the text ended; may be empty.
        loss_mask: per completion token, True where it trains; None means all of them.
        group: number of the group the row belongs to, unique within a batch.
        reward: scalar reward; NaN means not scorable; None means the strategy uses no rewards.
        sampling_logprobs: per completion token, log-probability under the distribution it was sampled from, in nats.
        old_logprobs: per completion token, log-probability under the policy before the update, in nats.
        ref_logprobs: per completion token, log-probability under the reference, in nats.
        truncated: True when generation stopped at the length limit instead of at an end-of-sequence token.
        policy_version: number of optimizer steps the sampling policy had seen.
    """

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    loss_mask: Sequence[bool] | None = None
    group: int = 0
    reward: float | None = None
    sampling_logprobs: Sequence[float] | None = None
    old_logprobs: Sequence[float] | None = None
    ref_logprobs: Sequence[float] | None = None
    truncated: bool = False
    policy_version: int = 0

    def __post_init__(self) -> None:
        if len(self.prompt_ids) == 0:
            raise ValueError("Row.prompt_ids is empty: the first completion token needs a token to be predicted from")
        for name in ("loss_mask", "sampling_logprobs", "old_logprobs", "ref_logprobs"):
            given = getattr(self, name)
            if given is not None and len(given) != len(self.completion_ids):
                raise ValueError(
                    f"{name} shape must match completions: got {len(given)}, expected {len(self.completion_ids)}"
                )


@dataclass
class Batch:
    """Rows in padded tensors (see the module's legend).

    Attributes:
        prompt_ids: [N, P] long, left-padded.
        prompt_mask: [N, P] bool, True = real token.
        completion_ids: [N, C] long, right-padded.
        completion_mask: [N, C] bool, True = real token.
        loss_mask: [N, C] bool, True = this token trains; never True where ``completion_mask`` is False.
        group: [N] long, equal numbers belong to the same prompt; rows of a group are neighbours.
        rewards: [N] float64 or None; NaN = not scorable.
        reward_std: [N] float64 or None; std of the rewards of all rows of the rollout or step, over all processes, the
            same number in every row.
        truncated: [N] bool, True = the completion hit the length limit.
        policy_version: [N] long, applied optimizer steps of the policy that sampled the row.
        sampling_logprobs, old_logprobs, ref_logprobs, values, advantages, returns: [N, C] float or None, in nats
            (log-probs) or reward units; meaningless where ``completion_mask`` is False.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    completion_ids: Tensor
    completion_mask: Tensor
    loss_mask: Tensor
    group: Tensor
    rewards: Tensor | None = None
    reward_std: Tensor | None = None
    truncated: Tensor | None = None
    policy_version: Tensor | None = None
    sampling_logprobs: Tensor | None = None
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    values: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None
    pad_token_id: int = field(default=0, compare=False)

    @property
    def num_rows(self) -> int:
        """N."""
        return self.completion_ids.shape[0]

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.completion_ids.device

    @property
    def input_ids(self) -> Tensor:
        """[N, S] prompt and completion side by side."""
        return torch.cat([self.prompt_ids, self.completion_ids], dim=1)

    @property
    def attention_mask(self) -> Tensor:
        """[N, S] bool, True = real token."""
        return torch.cat([self.prompt_mask, self.completion_mask], dim=1)

    @property
    def position_ids(self) -> Tensor:
        """[N, S] long, counted over real tokens, so that padding on the left shifts nothing."""
        return (self.attention_mask.long().cumsum(dim=1) - 1).clamp(min=0)

    @property
    def num_tokens(self) -> Tensor:
        """Scalar long, real tokens of prompts and completions; blank rows (see `blank`) do not count."""
        return (self.attention_mask & self.in_group.unsqueeze(-1)).sum()

    @property
    def in_group(self) -> Tensor:
        """[N] bool, False for blank rows."""
        return self.group >= 0

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are set, by field name."""
        named = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in named.items() if isinstance(value, Tensor)}

    def replace(self, **changes: Tensor | None) -> Batch:
        """A batch with the given fields exchanged; tensors are shared with this one."""
        current = {f.name: getattr(self, f.name) for f in fields(self)}
        unknown = changes.keys() - current.keys()
        if unknown:
            raise ValueError(f"Batch has no field {sorted(unknown)}; it has {sorted(current)}")
        return Batch(**{**current, **changes})  # type: ignore[arg-type]

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on ``device``."""
        return self.replace(**{name: value.to(device) for name, value in self.tensors().items()})

    def select(self, index: Tensor | Sequence[int]) -> Batch:
        """Rows ``index`` in that order, padding trimmed to what they need.

        Args:
            index: row numbers, or a [N] bool mask.
        """
        index = torch.as_tensor(index, device=self.device)
        if index.numel() == 0:
            index = index.long()
        return self.replace(**{name: value[index] for name, value in self.tensors().items()}).trim()

    def trim(self) -> Batch:
        """The same rows without columns that are padding in every row (one column always stays)."""
        prompt_len = int(self.prompt_mask.sum(dim=1).max()) if self.num_rows else 0
        completion_len = int(self.completion_mask.sum(dim=1).max()) if self.num_rows else 0
        prompt_start = self.prompt_ids.shape[1] - max(prompt_len, 1)
        completion_end = max(completion_len, 1)
        changes: dict[str, Tensor | None] = {
            "prompt_ids": self.prompt_ids[:, prompt_start:],
            "prompt_mask": self.prompt_mask[:, prompt_start:],
        }
        for name in ("completion_ids", "completion_mask", "loss_mask", *TOKEN_FIELDS):
            value = getattr(self, name)
            changes[name] = None if value is None else value[:, :completion_end]
        return self.replace(**changes)

    def split(self, parts: int, *, keep_groups: bool = False) -> list[Batch]:
        """Cut into exactly ``parts`` batches of neighbouring rows, as even as possible.

        Where there are fewer rows (or groups) than parts, the surplus batches hold one row that trains nothing: a
        micro-step always runs, on every rank, because the engines count forward and backward passes.

        Args:
            parts: number of batches, at least 1.
            keep_groups: cut only between groups.
        """
        if keep_groups:
            _, sizes_tensor = torch.unique_consecutive(self.group, return_counts=True)
            sizes = sizes_tensor.tolist()
        else:
            sizes = [1] * self.num_rows
        units = len(sizes)
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + size)
        bounds = [starts[round(part * units / parts)] for part in range(parts + 1)]
        return [self.select(range(low, high)) if high > low else self.blank() for low, high in pairwise(bounds)]

    def blank(self) -> Batch:
        """One row of this batch that trains nothing and has no group of its own (its group number is -1)."""
        if self.num_rows == 0:
            raise ValueError("a batch without rows has no row to blank")
        row = self.select([0])
        rewards = None if row.rewards is None else torch.full_like(row.rewards, float("nan"))
        return row.replace(
            loss_mask=torch.zeros_like(row.loss_mask),
            group=torch.full_like(row.group, -1),
            rewards=rewards,
        )

    @classmethod
    def from_rows(cls, rows: Sequence[Row], pad_token_id: int = 0) -> Batch:
        """Collate ragged rows.

        Args:
            rows: at least one; rows of a group must be neighbours. Optional fields are taken over when every row has
                them and must not be given by some rows only.
            pad_token_id: id written into padding; it is never looked at.

        Raises:
            ValueError: no rows, rows of a group that are apart, or a field that only some rows have.
        """
        if not rows:
            raise ValueError("cannot collate zero rows")
        groups = [row.group for row in rows]
        if len(set(groups)) != 1 + sum(a != b for a, b in pairwise(groups)):
            raise ValueError(f"rows of a group must be neighbours, got groups {groups}")
        n = len(rows)
        prompt_len = max(len(row.prompt_ids) for row in rows)
        completion_len = max(1, max(len(row.completion_ids) for row in rows))
        prompt_ids = torch.full((n, prompt_len), pad_token_id, dtype=torch.long)
        prompt_mask = torch.zeros((n, prompt_len), dtype=torch.bool)
        completion_ids = torch.full((n, completion_len), pad_token_id, dtype=torch.long)
        completion_mask = torch.zeros((n, completion_len), dtype=torch.bool)
        loss_mask = torch.zeros((n, completion_len), dtype=torch.bool)
        for i, row in enumerate(rows):
            size = len(row.completion_ids)
            prompt_ids[i, prompt_len - len(row.prompt_ids) :] = torch.as_tensor(row.prompt_ids)
            prompt_mask[i, prompt_len - len(row.prompt_ids) :] = True
            completion_ids[i, :size] = torch.as_tensor(row.completion_ids, dtype=torch.long)
            completion_mask[i, :size] = True
            loss_mask[i, :size] = True if row.loss_mask is None else torch.as_tensor(row.loss_mask, dtype=torch.bool)

        def per_token(name: str) -> Tensor | None:
            given = [getattr(row, name) for row in rows]
            if all(value is None for value in given):
                return None
            if any(value is None for value in given):
                raise ValueError(f"{name} is given for some rows only: {[value is not None for value in given]}")
            out = torch.zeros((n, completion_len), dtype=torch.float32)
            for i, value in enumerate(given):
                out[i, : len(value)] = torch.as_tensor(value, dtype=torch.float32)
            return out

        rewards: Tensor | None = None
        if any(row.reward is not None for row in rows):
            rewards = torch.tensor(
                [float("nan") if row.reward is None else row.reward for row in rows],
                dtype=torch.float64,
            )
        return cls(
            prompt_ids=prompt_ids,
            prompt_mask=prompt_mask,
            completion_ids=completion_ids,
            completion_mask=completion_mask,
            loss_mask=loss_mask,
            group=torch.tensor(groups),
            rewards=rewards,
            truncated=torch.tensor([row.truncated for row in rows]),
            policy_version=torch.tensor([row.policy_version for row in rows]),
            sampling_logprobs=per_token("sampling_logprobs"),
            old_logprobs=per_token("old_logprobs"),
            ref_logprobs=per_token("ref_logprobs"),
            pad_token_id=pad_token_id,
        )

    @classmethod
    def cat(cls, batches: Iterable[Batch]) -> Batch:
        """Stack rows, padding prompts on the left and completions on the right to common lengths.

        Group numbers are kept apart: the groups of each batch are renumbered to follow those of the one before it
        (blank rows keep -1). Optional fields must be set in all batches or in none.
        """
        batches = list(batches)
        if not batches:
            raise ValueError("cannot concatenate zero batches")
        prompt_len = max(batch.prompt_ids.shape[1] for batch in batches)
        completion_len = max(batch.completion_ids.shape[1] for batch in batches)
        padded: dict[str, list[Tensor]] = {}
        next_group = 0
        for batch in batches:
            group = batch.group
            if (group >= 0).any():
                group = torch.where(group >= 0, group - group[group >= 0].min() + next_group, group)
                next_group = int(group.max()) + 1
            for name, value in batch.replace(group=group).tensors().items():
                if name in ("prompt_ids", "prompt_mask"):
                    missing, side = prompt_len - value.shape[1], "left"
                elif value.dim() == 2:
                    missing, side = completion_len - value.shape[1], "right"
                else:
                    missing, side = 0, "right"
                if missing:
                    fill = batch.pad_token_id if name.endswith("_ids") else 0
                    filler = value.new_full((value.shape[0], missing), fill)
                    value = torch.cat([filler, value] if side == "left" else [value, filler], dim=1)
                padded.setdefault(name, []).append(value)
        partial = sorted(name for name, values in padded.items() if len(values) != len(batches))
        if partial:
            raise ValueError(f"fields {partial} are set in some of the batches only")
        return cls(
            **{name: torch.cat(values) for name, values in padded.items()},  # type: ignore[arg-type]
            pad_token_id=batches[0].pad_token_id,
        )
