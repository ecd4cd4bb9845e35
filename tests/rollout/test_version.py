"""Policy versions: weights and count change together, and no rollout is older than allowed."""

from __future__ import annotations

import re

import pytest

from hf_strategies.rollout.version import PolicyVersion, PolicyVersionError


def test_versions_count_applied_steps() -> None:
    version = PolicyVersion()
    for expected in (1, 2, 3):
        version.begin_step()
        assert version.current == expected - 1, "not before the weights have changed"
        assert version.publish() == version.current == expected
    assert PolicyVersion(7).current == 7


def test_a_skipped_step_publishes_nothing() -> None:
    version = PolicyVersion(2)
    version.begin_step()
    version.skip_step()
    assert version.current == 2
    version.check_rollout_may_start()
    with pytest.raises(PolicyVersionError, match="version 3 published without an optimizer step"):
        version.publish()


def test_publication_without_a_step() -> None:
    version = PolicyVersion()
    with pytest.raises(PolicyVersionError, match="version 1 published without an optimizer step"):
        version.publish()
    version.begin_step()
    version.publish()
    with pytest.raises(PolicyVersionError, match="version 2 published without"):
        version.publish()
    assert version.current == 1


def test_no_rollout_between_change_and_publication() -> None:
    version = PolicyVersion(4)
    version.check_rollout_may_start()
    version.begin_step()
    message = re.escape("rollout started between a weight change and its publication (version 4)")
    with pytest.raises(PolicyVersionError, match=message):
        version.check_rollout_may_start()
    # A step that raised never comes to its publication: the weights are of no version from then on.
    with pytest.raises(PolicyVersionError, match=message):
        version.check_rollout_may_start()
    version.publish()
    version.check_rollout_may_start()


def test_lag() -> None:
    version = PolicyVersion(5)
    assert [version.check_lag(v, 2) for v in (5, 4, 3)] == [0, 1, 2]
    message = re.escape("rollout policy lag 3 exceeds max_policy_lag=2 (rollout=2, live=5)")
    with pytest.raises(PolicyVersionError, match=message):
        version.check_lag(2, 2)
    with pytest.raises(PolicyVersionError, match=re.escape("future policy version (rollout=6, live=5)")):
        version.check_lag(6, 2)
    assert version.check_lag(5, 0) == 0
