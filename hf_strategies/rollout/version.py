"""The policy version: the number of optimizer steps that were really applied."""

from __future__ import annotations


class PolicyVersionError(RuntimeError):
    """Weights and version do not belong together, or a rollout is too old or from the future."""


class PolicyVersion:
    """Counts applied optimizer steps and keeps weights and count together.

    Between the moment the optimizer may touch the weights and the publication of the new version no rollout may start:
    it would carry a version that its weights are not. A step that raises or is skipped publishes nothing.

    Args:
        current: version to start from, as persisted with a checkpoint.
    """

    def __init__(self, current: int = 0) -> None:
        self.current = current
        self._changing = False

    def begin_step(self) -> None:
        """The optimizer is about to change the weights."""
        self._changing = True

    def publish(self) -> int:
        """The weights have changed: count the step.

        Raises:
            PolicyVersionError: no step was begun.
        """
        if not self._changing:
            raise PolicyVersionError(f"version {self.current + 1} published without an optimizer step")
        self._changing = False
        self.current += 1
        return self.current

    def skip_step(self) -> None:
        """The optimizer left the weights as they were (a skipped half-precision step)."""
        self._changing = False

    def check_rollout_may_start(self) -> None:
        """Raise unless weights and version belong together."""
        if self._changing:
            raise PolicyVersionError(
                f"rollout started between a weight change and its publication (version {self.current})"
            )

    def check_lag(self, rollout_version: int, max_policy_lag: int) -> int:
        """Distance of a rollout's policy from the live one.

        Raises:
            PolicyVersionError: more than ``max_policy_lag`` steps old, or from a version that does not exist yet.
        """
        lag = self.current - rollout_version
        if lag < 0:
            raise PolicyVersionError(
                f"rollout is from a future policy version (rollout={rollout_version}, live={self.current})"
            )
        if lag > max_policy_lag:
            raise PolicyVersionError(
                f"rollout policy lag {lag} exceeds max_policy_lag={max_policy_lag} "
                f"(rollout={rollout_version}, live={self.current})"
            )
        return lag
