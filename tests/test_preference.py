"""Every loss of preference pairs by hand, and its gradient."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from conftest import f64
from pure import close
from torch import Tensor

from hf_strategies import preference as p
from hf_strategies.preference import LOSSES, Pairs
from hf_strategies.strategies.dpo import DPOOptions

LN = math.log


def logit(probability: float) -> float:
    return LN(probability / (1 - probability))


# Rewards whose logistic functions are 3/4 and 1/4: their margin is ln 9, of which it is 9/10.
GOOD, BAD = f64([LN(3.0)]), f64([-LN(3.0)])
MARGIN = GOOD - BAD


def test_sigmoid() -> None:
    close(p.sigmoid(MARGIN), [-LN(0.9)])
    # Conservative: a tenth of the pairs the other way round.
    close(p.sigmoid(MARGIN, 0.1), [-0.9 * LN(0.9) - 0.1 * LN(0.1)])


def test_robust() -> None:
    close(p.robust(MARGIN, 0.1), [(-0.9 * LN(0.9) + 0.1 * LN(0.1)) / 0.8])
    close(p.robust(MARGIN, 0.0), [-LN(0.9)])


def test_hinge() -> None:
    close(p.hinge(f64([0.25, 1.5, -2.0])), [0.75, 0.0, 3.0])


def test_ipo() -> None:
    close(p.ipo(f64([1.5]), 0.25), [0.25])  # (1.5 - 1 / 0.5)^2


def test_exo_pair() -> None:
    close(p.exo_pair(MARGIN, 0.2), [0.9 * LN(0.9 / 0.8) + 0.1 * LN(0.1 / 0.2)])
    close(p.exo_pair(MARGIN, 0.1), [0.0])  # the two distributions are the same


def test_nca_pair() -> None:
    close(p.nca_pair(GOOD, BAD), [-LN(0.75) - 0.5 * LN(0.25) - 0.5 * LN(0.75)])


def test_bco_pair() -> None:
    close(p.bco_pair(GOOD, BAD), [-2 * LN(0.75)])
    # A shift of ln 3: 0 for the chosen, -2 ln 3 for the rejected one.
    close(p.bco_pair(GOOD, BAD, LN(3.0)), [-LN(0.5) - LN(0.9)])


def test_sppo_hard() -> None:
    close(p.sppo_hard(f64([3.0]), f64([-1.0]), 0.25), [2.0])  # (3 - 2)^2 + (-1 + 2)^2


def test_apo() -> None:
    close(p.apo_zero(GOOD, BAD), [0.25 + 0.25])
    close(p.apo_down(GOOD, BAD), [0.75 + 0.1])


def test_discopop() -> None:
    close(p.discopop(MARGIN, 1.0), [-0.1 * LN(0.9) + 0.9 / 9])
    # m / tau = 0.5 ln 9 = ln 3
    close(p.discopop(MARGIN, 2.0), [-0.25 * LN(0.9) + 0.75 / 9])


def test_simpo() -> None:
    # 2 * (-0.5 - -1.5) - (2 - ln 9) = ln 9
    close(p.simpo(f64([1.0]), 2.0, 2.0 - LN(9.0)), [-LN(0.9)])


def test_orpo() -> None:
    # Mean probabilities 1/2 and 1/4: odds 1 and 1/3, their ratio 3.
    close(p.orpo(f64([LN(0.5)]), f64([LN(0.25)]), 0.2), [LN(2.0) - 0.2 * LN(0.75)])


def test_orpo_of_a_certain_completion_is_finite() -> None:
    for chosen, rejected in ((0.0, -1.0), (-1.0, 0.0)):
        value = f64([chosen]).requires_grad_()
        loss = p.orpo(value, f64([rejected]), 0.1)
        (gradient,) = torch.autograd.grad(loss.sum(), value)
        assert bool(loss.isfinite().all())
        assert bool(gradient.isfinite().all())


def test_sorted_sigmoid() -> None:
    # Sorted: 0, ln 3 and -ln 3, 0: ln 3 twice, whoever belongs to whom.
    close(p.sorted_sigmoid(f64([LN(3.0), 0.0]), f64([-LN(3.0), 0.0])), [-LN(0.75)] * 2)
    close(
        p.sorted_sigmoid(f64([0.0, LN(3.0)]), f64([0.0, -LN(3.0)]), 0.1),
        [-0.9 * LN(0.75) - 0.1 * LN(0.25)] * 2,
    )
    close(p.sorted_sigmoid(f64([2.0]), f64([0.0]), beta=0.5 * LN(3.0)), [-LN(0.75)])


@pytest.mark.parametrize(
    ("kind", "alpha", "at_ln_2"),
    [
        ("reverse_kl", 0.5, LN(2.0)),
        ("forward_kl", 0.5, 0.5),  # 1 - 1 / 2
        ("js_divergence", 0.5, LN(4 / 3)),  # log(2 * 2 / 3)
        ("alpha_divergence", 3.0, 1.5),  # (2^2 - 1) / 2
        ("alpha_divergence", 0.0, 0.5),  # (2^-1 - 1) / -1
        ("alpha_divergence", 1.0, LN(2.0)),
    ],
)
def test_divergences(kind: str, alpha: float, at_ln_2: float) -> None:
    close(p.divergence_score(f64([LN(2.0), 0.0]), kind, alpha), [at_ln_2, 0.0])
    for far in (500.0, -500.0):
        assert bool(p.divergence_score(torch.tensor([far]), kind, alpha).isfinite())


def test_unknown_divergence() -> None:
    with pytest.raises(ValueError, match="f_divergence_type='kl': allowed are 'reverse_kl', 'forward_kl'"):
        p.divergence_score(f64([0.0]), "kl", 0.5)


def pairs_of(values: Tensor, **further: Any) -> Pairs:
    """Two pairs: log-probabilities [2, 2], references -2, lengths 2, 4 and 1, 3."""
    lengths = torch.tensor([[2, 4], [1, 3]])
    return Pairs(values, torch.full_like(values, -2.0), lengths, values / lengths, **further)


def options_of(name: str, **further: Any) -> DPOOptions:
    smoothing = {"label_smoothing": 0.1} if LOSSES[name].smooths else {}
    return DPOOptions(loss_type=name, beta=0.5, **{**smoothing, **further})


@pytest.mark.parametrize("name", LOSSES)
def test_gradients(name: str) -> None:
    """Analytic against numeric, at two pairs that no kink or tie is near."""
    values = f64([[-1.0, -3.5], [-2.7, -1.2]]).requires_grad_()
    for average in (False, True):
        kinds = p.DIVERGENCES if LOSSES[name].diverges else ("reverse_kl",)
        for kind in kinds:
            o = options_of(name, f_divergence_type=kind)
            assert torch.autograd.gradcheck(
                lambda v, o=o, average=average, kind=kind: LOSSES[name].compute(
                    pairs_of(v, average=average, divergence=kind), o
                ),
                (values,),
            )


# Log-ratios of `pairs_of(VALUES)`: 1 and -1.5 | -0.7 and 0.8. Averages: 0.5, -0.375 | -0.7, 0.8 / 3.
VALUES = f64([[-1.0, -3.5], [-2.7, -1.2]])


def test_what_the_table_feeds_its_losses() -> None:
    """Which numbers each name reads, with beta 0.5 and label smoothing 0.1 where it is defined."""
    pairs = pairs_of(VALUES)
    x, y, h = f64([1.0, -0.7]), f64([-1.5, 0.8]), f64([0.5 + 0.375, -0.7 - 0.8 / 3])
    means = (f64([-0.5, -2.7]), f64([-0.875, -0.4]))
    margin = 0.5 * (x - y)
    expected = {
        "sigmoid": p.sigmoid(margin, 0.1),
        "sigmoid_norm": p.sigmoid(0.5 * h, 0.1),
        "robust": p.robust(margin, 0.1),
        "hinge": p.hinge(margin),
        "ipo": p.ipo(h, 0.5),
        "exo_pair": p.exo_pair(margin, 0.1),
        "nca_pair": p.nca_pair(0.5 * x, 0.5 * y),
        "bco_pair": p.bco_pair(0.5 * x, 0.5 * y),
        "sppo_hard": p.sppo_hard(x, y, 0.5),
        # Sorted pi_c - pi_r: -1.5, 2.5; of the reference 0, 0.
        "aot": p.sigmoid(0.5 * f64([-1.5, 2.5]), 0.1),
        # Sorted x_c: -0.7, 1; sorted x_r: -1.5, 0.8.
        "aot_unpaired": p.sigmoid(0.5 * f64([0.8, 0.2]), 0.1),
        "apo_zero": p.apo_zero(0.5 * x, 0.5 * y),
        "apo_down": p.apo_down(0.5 * x, 0.5 * y),
        "discopop": p.discopop(margin, 0.05),
        "simpo": p.sigmoid(0.5 * (means[0] - means[1]) - 0.5, 0.1),
        "orpo": p.orpo(*means, 0.5),
        "sft": -means[0],
    }
    assert set(expected) == set(LOSSES)
    for name, values in expected.items():
        close(LOSSES[name].compute(pairs, options_of(name)), values)


def test_averaged_log_ratios() -> None:
    """With ``average`` a loss of sums reads averages; one of averages divides once all the same."""
    averaged = pairs_of(VALUES, average=True)
    h = f64([0.5 + 0.375, -0.7 - 0.8 / 3])
    close(LOSSES["sigmoid"].compute(averaged, options_of("sigmoid")), p.sigmoid(0.5 * h, 0.1))
    close(
        LOSSES["sppo_hard"].compute(averaged, options_of("sppo_hard")),
        p.sppo_hard(f64([0.5, -0.7]), f64([-0.375, 0.8 / 3]), 0.5),
    )
    for name in ("ipo", "sigmoid_norm", "simpo", "orpo", "sft"):
        o = options_of(name)
        close(LOSSES[name].compute(averaged, o), LOSSES[name].compute(pairs_of(VALUES), o))


def test_what_is_declared() -> None:
    """Without a reference: two losses and plain likelihood; sorted over the micro-batch: the two of AOT."""
    assert {name for name, loss in LOSSES.items() if not loss.reference} == {"simpo", "orpo", "sft"}
    assert {name for name, loss in LOSSES.items() if loss.sorts} == {"aot", "aot_unpaired"}
    assert {name for name, loss in LOSSES.items() if loss.smooths} == {
        "sigmoid", "sigmoid_norm", "robust", "exo_pair", "aot", "aot_unpaired", "simpo",
    }  # fmt: skip
    assert {name for name, loss in LOSSES.items() if loss.diverges} == {
        "sigmoid", "sigmoid_norm", "robust", "hinge", "ipo", "exo_pair", "discopop",
    }  # fmt: skip
