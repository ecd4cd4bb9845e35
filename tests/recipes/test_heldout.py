"""Figures of a measurement."""

from __future__ import annotations

import pytest

from hf_strategies.recipe.heldout import mean_interval


def test_wilson_interval_by_hand() -> None:
    # k=2, n=4, z^2=3.8415: half width = 1.95996 * sqrt(0.25/4 + 3.8415/64) / (1 + 3.8415/4) = 0.68605/1.96036
    assert mean_interval([1.0, 0.0, 1.0, 0.0]) == pytest.approx((0.15004, 0.84996), abs=1e-5)
    # k=0: the lower end is 0 and the upper z^2 / (n + z^2) = 3.8415/7.8415
    assert mean_interval([0.0] * 4) == pytest.approx((0.0, 0.48989), abs=1e-5)


def test_interval_of_other_scores_by_hand() -> None:
    # mean 0.5, standard error 0.5/sqrt(3) = 0.288675, t(0.975, 2) = 4.302653: half width 1.242069
    assert mean_interval([0.0, 0.5, 1.0]) == pytest.approx((-0.742069, 1.742069), abs=1e-5)
    assert mean_interval([0.5, 0.5]) == (0.5, 0.5)
    assert mean_interval([0.3]) == (0.3, 0.3)
