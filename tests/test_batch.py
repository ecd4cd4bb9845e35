"""Collation, selection, cutting and stacking of rows."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pure import NAN, close

from hf_strategies.batch import TOKEN_FIELDS, Batch, Row

PAD = 99


def three() -> Batch:
    """Two rows of group 4 and one of group 2, ragged everywhere; id 0 and the pad id occur as text."""
    rows = [
        Row([5, 6, 0], [7], group=4, reward=1.0, old_logprobs=[-1.0], sampling_logprobs=[-2.0], policy_version=3),
        Row([5, 6, 0], [8, PAD, 9, 1], [True, False, True, True], group=4, reward=None, old_logprobs=[-1, -2, -3, -4],
            sampling_logprobs=[0.0] * 4, truncated=True),
        Row([3], [], group=2, reward=-0.5, old_logprobs=[], sampling_logprobs=[]),
    ]  # fmt: skip
    return Batch.from_rows(rows, pad_token_id=PAD)


def rows_of(*sizes: int) -> Batch:
    """Groups of the given sizes; row i's only completion token is i."""
    groups = [g for g, size in enumerate(sizes) for _ in range(size)]
    return Batch.from_rows([Row([1], [i], group=g, reward=float(i)) for i, g in enumerate(groups)])


def ids(batches: list[Batch]) -> list[list[int]]:
    """Completion tokens of one-token rows that belong to a group."""
    return [batch.completion_ids[batch.in_group, 0].tolist() for batch in batches]


# ---- rows and collation ----


def test_collation_by_hand() -> None:
    batch = three()
    assert batch.prompt_ids.tolist() == [[5, 6, 0], [5, 6, 0], [PAD, PAD, 3]]
    assert batch.prompt_mask.long().tolist() == [[1, 1, 1], [1, 1, 1], [0, 0, 1]]
    assert batch.completion_ids.tolist() == [[7, PAD, PAD, PAD], [8, PAD, 9, 1], [PAD] * 4]
    assert batch.completion_mask.long().tolist() == [[1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]
    assert batch.loss_mask.long().tolist() == [[1, 0, 0, 0], [1, 0, 1, 1], [0, 0, 0, 0]]
    assert batch.group.tolist() == [4, 4, 2]
    assert batch.truncated.tolist() == [False, True, False]  # type: ignore[union-attr]
    assert batch.policy_version.tolist() == [3, 0, 0]  # type: ignore[union-attr]
    assert batch.rewards.dtype == torch.float64  # type: ignore[union-attr]
    close(batch.rewards, [1.0, NAN, -0.5])  # type: ignore[arg-type]
    close(batch.old_logprobs, [[-1, 0, 0, 0], [-1, -2, -3, -4], [0, 0, 0, 0]])  # type: ignore[arg-type]
    close(batch.sampling_logprobs, [[-2, 0, 0, 0], [0] * 4, [0] * 4])  # type: ignore[arg-type]
    assert batch.pad_token_id == PAD
    assert batch.num_rows == 3
    assert {name for name in TOKEN_FIELDS if getattr(batch, name) is not None} == {"old_logprobs", "sampling_logprobs"}


def test_masks_come_from_lengths_not_from_ids() -> None:
    """Pitfalls A-10, D-63: with pad == eos the genuine EOS stays, and ids equal to padding inside a text too."""
    eos = 2
    batch = Batch.from_rows([Row([eos, 7], [eos, 8, eos]), Row([7], [eos], group=1)], pad_token_id=eos)
    assert batch.prompt_mask.long().tolist() == [[1, 1], [0, 1]]
    assert batch.completion_mask.long().tolist() == [[1, 1, 1], [1, 0, 0]]
    assert torch.equal(batch.loss_mask, batch.completion_mask)


def test_views_of_whole_rows() -> None:
    """Pitfall A-16: positions count real tokens, so padding on the left shifts nothing."""
    batch = three()
    assert batch.input_ids[2].tolist() == [PAD, PAD, 3, PAD, PAD, PAD, PAD]
    assert batch.attention_mask[0].long().tolist() == [1, 1, 1, 1, 0, 0, 0]
    assert batch.attention_mask[2].long().tolist() == [0, 0, 1, 0, 0, 0, 0]
    assert batch.position_ids[0].tolist()[:4] == [0, 1, 2, 3]
    assert batch.position_ids[1].tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert batch.position_ids[2].tolist()[:3] == [0, 0, 0]
    beside = Row([1] * 8, [1], reward=0.0, old_logprobs=[0.0], sampling_logprobs=[0.0])
    shifted = Batch.cat([batch, Batch.from_rows([beside])])
    assert shifted.position_ids[0, 5:9].tolist() == [0, 1, 2, 3]
    assert batch.num_tokens == 4 + 7 + 1
    assert batch.device == torch.device("cpu")


def test_empty_completions_keep_one_column() -> None:
    batch = Batch.from_rows([Row([1], [])])
    assert batch.completion_ids.shape == (1, 1)
    assert not batch.completion_mask.any()


def test_rewards_are_optional() -> None:
    batch = Batch.from_rows([Row([1], [1])])
    assert batch.rewards is None
    assert batch.pad_token_id == 0


def test_bad_rows() -> None:
    with pytest.raises(ValueError, match=r"^Row.prompt_ids is empty"):
        Row([], [1])
    for name in ("loss_mask", "old_logprobs", "sampling_logprobs"):
        with pytest.raises(ValueError, match=rf"^{name} shape must match completions: got 1, expected 2$"):
            Row([1], [1, 2], **{name: [0]})
    with pytest.raises(ValueError, match=r"^cannot collate zero rows$"):
        Batch.from_rows([])
    with pytest.raises(ValueError, match=re.escape("rows of a group must be neighbours, got groups [0, 1, 0]")):
        Batch.from_rows([Row([1], [1], group=g) for g in (0, 1, 0)])
    for name in ("old_logprobs", "sampling_logprobs"):
        with pytest.raises(ValueError, match=re.escape(f"{name} is given for some rows only: [False, True]")):
            Batch.from_rows([Row([1], [1]), Row([1], [1], **{name: [0.0]})])


# ---- choosing and cutting ----


def test_select_reorders_and_trims() -> None:
    batch = three().replace(reward_std=torch.tensor([1.0, 2.0, 3.0]))
    chosen = batch.select([2, 0])
    assert chosen.prompt_ids.tolist() == [[PAD, PAD, 3], [5, 6, 0]]
    assert chosen.completion_ids.tolist() == [[PAD], [7]]  # three columns were padding
    assert chosen.old_logprobs.tolist() == [[0.0], [-1.0]]  # type: ignore[union-attr]
    assert chosen.reward_std.tolist() == [3.0, 1.0]  # type: ignore[union-attr]
    assert chosen.group.tolist() == [2, 4]
    assert chosen.pad_token_id == PAD
    last = batch.select(torch.tensor([False, False, True]))
    assert last.prompt_ids.tolist() == [[3]]
    assert last.completion_ids.shape == (1, 1)
    assert batch.select([0, 0]).completion_ids.tolist() == [[7], [7]]
    assert batch.select([]).num_rows == 0
    assert batch.select(range(1, 2)).completion_ids.tolist() == [[8, PAD, 9, 1]]


def test_blank() -> None:
    batch = three()
    blank = batch.blank()
    assert blank.num_rows == 1
    assert blank.prompt_ids.tolist() == [[5, 6, 0]]
    assert blank.completion_mask.tolist() == [[True]]  # something to run the model on
    assert blank.group.tolist() == [-1]
    assert not blank.loss_mask.any()
    assert blank.rewards.isnan().all()  # type: ignore[union-attr]
    assert not blank.in_group.any()
    assert blank.num_tokens == 0
    assert Batch.cat([batch, blank]).num_tokens == batch.num_tokens
    assert Batch.from_rows([Row([1], [1])]).blank().rewards is None
    assert batch.group.tolist() == [4, 4, 2]  # the batch itself is as it was
    with pytest.raises(ValueError, match=r"^a batch without rows has no row to blank$"):
        batch.select([]).blank()


def test_split_by_hand() -> None:
    assert ids(rows_of(4).split(2)) == [[0, 1], [2, 3]]
    assert ids(rows_of(5).split(1)) == [[0, 1, 2, 3, 4]]
    assert ids(rows_of(1, 3, 2).split(2, keep_groups=True)) == [[0, 1, 2, 3], [4, 5]]
    assert ids(rows_of(2, 2, 2).split(3, keep_groups=True)) == [[0, 1], [2, 3], [4, 5]]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=12), st.integers(1, 15), st.booleans())
def test_split_keeps_every_row_once(sizes: list[int], parts: int, keep_groups: bool) -> None:
    """Exactly ``parts`` batches, in order, sizes that differ by at most one unit; surplus ones train nothing."""
    batch = rows_of(*sizes)
    batches = batch.split(parts, keep_groups=keep_groups)
    assert len(batches) == parts
    assert [i for part in ids(batches) for i in part] == list(range(batch.num_rows))
    assert all(b.num_rows >= 1 for b in batches)
    assert sum(int(b.num_tokens) for b in batches) == batch.num_tokens
    groups = [set(b.group[b.in_group].tolist()) for b in batches]
    if keep_groups:
        assert sum(len(g) for g in groups) == len(sizes)
        units = [len(g) for g in groups]
    else:
        units = [int(b.in_group.sum()) for b in batches]
    assert max(units) - min(units) <= 1
    for b in batches:
        assert bool(b.in_group.any()) == bool(b.loss_mask.any())


# ---- stacking and exchanging ----


def test_cat_pads_both_ways() -> None:
    short = Batch.from_rows([Row([1], [2], group=7, old_logprobs=[-9.0], sampling_logprobs=[-8.0], reward=2.0)], PAD)
    both = Batch.cat([short, three()])
    assert both.prompt_ids.tolist() == [[PAD, PAD, 1], [5, 6, 0], [5, 6, 0], [PAD, PAD, 3]]
    assert both.prompt_mask[0].tolist() == [False, False, True]
    assert both.completion_ids[0].tolist() == [2, PAD, PAD, PAD]
    assert both.completion_mask[0].tolist() == [True, False, False, False]
    assert both.loss_mask[0].tolist() == [True, False, False, False]
    assert both.old_logprobs[0].tolist() == [-9.0, 0.0, 0.0, 0.0]  # type: ignore[union-attr]
    close(both.rewards, [2.0, 1.0, NAN, -0.5])  # type: ignore[arg-type]
    assert both.pad_token_id == PAD
    # Trimming takes back what stacking added.
    again = both.select([0])
    assert (again.prompt_ids.tolist(), again.completion_ids.tolist()) == ([[1]], [[2]])


def test_cat_keeps_groups_apart() -> None:
    batches = [rows_of(2, 1), rows_of(1).blank(), rows_of(1, 2), three().replace(truncated=None)]
    for name in ("old_logprobs", "sampling_logprobs"):
        batches[3] = batches[3].replace(**{name: None})
    batches = [b.replace(truncated=None) for b in batches]
    # Groups 0 0 1 | -1 | 0 1 1 | 4 4 2: the smallest of each batch follows the largest before it.
    assert Batch.cat(batches).group.tolist() == [0, 0, 1, -1, 2, 3, 3, 6, 6, 4]
    assert Batch.cat([rows_of(1), rows_of(1), rows_of(2)]).group.tolist() == [0, 1, 2, 2]
    assert Batch.cat(iter([rows_of(2)])).group.tolist() == [0, 0]


def test_cat_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"^cannot concatenate zero batches$"):
        Batch.cat([])
    with pytest.raises(
        ValueError, match=re.escape("fields ['rewards', 'values'] are set in some of the batches only")
    ):
        Batch.cat([rows_of(1).replace(values=torch.zeros(1, 1)), rows_of(1).replace(rewards=None)])


def test_replace_and_to() -> None:
    batch = three()
    changed = batch.replace(rewards=None, values=torch.ones(3, 4))
    assert (changed.rewards, batch.values) == (None, None)
    assert changed.completion_ids is batch.completion_ids
    assert "rewards" not in changed.tensors()
    assert list(changed.tensors())[:3] == ["prompt_ids", "prompt_mask", "completion_ids"]
    with pytest.raises(ValueError, match=r"^Batch has no field \['reward'\]; it has \['advantages', "):
        batch.replace(reward=torch.zeros(3))
    moved = batch.to("meta")
    assert moved.device == torch.device("meta")
    assert {value.device.type for value in moved.tensors().values()} == {"meta"}
    assert moved.pad_token_id == PAD
