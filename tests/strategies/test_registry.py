"""The table of strategy names and its errors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from torch import Tensor

from hf_strategies import Batch, PolicyOutput, Strategy, make_strategy, register_strategy
from hf_strategies.options import Options
from hf_strategies.stats import Metrics
from hf_strategies.strategies import DPO, GRPO, PPO, SFT, STRATEGIES, Seq, get_entry

NAMES = "seq, sft, dpo, online_dpo, grpo, online_grpo, online_ppo"


@dataclass
class NoOptions(Options):
    """None."""


class Own(Strategy):
    """A user's strategy."""

    Options = NoOptions

    def loss(self, policy: PolicyOutput, batch: Batch, num_items: Tensor) -> tuple[Tensor, Metrics]:
        return policy.logprobs.sum() * 0.0, {}


@pytest.fixture
def table() -> Iterator[None]:
    """The table, as it was afterwards."""
    before = dict(STRATEGIES)
    yield
    STRATEGIES.clear()
    STRATEGIES.update(before)


def test_names() -> None:
    assert {name: (entry.strategy, entry.online) for name, entry in STRATEGIES.items()} == {
        "seq": (Seq, False),
        "sft": (SFT, False),
        "dpo": (DPO, False),
        "online_dpo": (DPO, True),
        "grpo": (GRPO, False),
        "online_grpo": (GRPO, True),
        "online_ppo": (PPO, True),
    }
    assert ", ".join(STRATEGIES) == NAMES


@pytest.mark.parametrize("name", STRATEGIES)
def test_names_make_strategies_with_their_options(name: str) -> None:
    strategy = make_strategy(name)
    assert type(strategy) is get_entry(name).strategy
    assert type(strategy.options) is type(strategy).Options


UNCORRECTED = {"sampler_correction": "auto", "sampler_correction_min": None, "sampler_correction_max": None}
DEFAULTS = {
    "sft": {"loss_type": "nll", "label_smoothing": 0.0},
    "dpo": {
        "loss_type": ["sigmoid"],
        "loss_weights": None,
        "beta": 0.1,
        "reduction": "sum",
        "label_smoothing": 0.0,
        "f_divergence_type": "reverse_kl",
        "f_alpha_divergence_coef": 0.5,
        "ld_alpha": None,
        "use_weighting": False,
        "discopop_tau": 0.05,
        "bco_running_mean": False,
        "simpo_gamma": 0.5,
        "pair_selection": "best_worst",
    },
    "grpo": {
        "beta": 0.0,
        "epsilon": 0.2,
        "epsilon_high": None,
        "loss_type": "dapo",
        "scale_rewards": "group",
        "max_completion_length": 512,
        **UNCORRECTED,
    },
    "online_ppo": {
        "epsilon": 0.2,
        "vf_coef": 0.5,
        "kl_coef": 0.01,
        "gamma": 1.0,
        "gae_lambda": 0.95,
        **UNCORRECTED,
    },
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_defaults(name: str) -> None:
    same = {"seq": "sft", "online_dpo": "dpo", "online_grpo": "grpo"}
    assert vars(make_strategy(name).options) == DEFAULTS[same.get(name, name)]


def test_options_arrive() -> None:
    assert make_strategy("grpo", epsilon=0.1, beta=0.3).options == GRPO.Options(epsilon=0.1, beta=0.3)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("online_gpro", ", did you mean 'online_grpo'?"), ("sfft", ", did you mean 'sft'?"), ("reinforce", "")],
)
def test_unknown_name(name: str, hint: str) -> None:
    message = f"unknown strategy {name!r}{hint} (known: {NAMES})"
    for call in (get_entry, make_strategy):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            call(name)


@pytest.mark.parametrize(("option", "hint"), [("bete", ", did you mean 'beta'?"), ("temperature", "")])
def test_unknown_option(option: str, hint: str) -> None:
    message = f"strategy 'dpo' has no option {option!r}{hint} (known: {', '.join(DEFAULTS['dpo'])})"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make_strategy("dpo", **{option: 1.0})


def test_bad_value() -> None:
    with pytest.raises(ValueError, match=r"^beta=0: allowed is a number > 0.0$"):
        make_strategy("dpo", beta=0)


@pytest.mark.usefixtures("table")
def test_register() -> None:
    register_strategy("own", Own)
    register_strategy("online_own", Own, online=True, reads="prompt, gold")
    assert isinstance(make_strategy("own"), Own)
    assert (get_entry("own").online, get_entry("own").reads) == (False, "prompt")
    assert (get_entry("online_own").online, get_entry("online_own").reads) == (True, "prompt, gold")
    with pytest.raises(ValueError, match=r"^strategy 'own' has no option 'beta' \(known: none\)$"):
        make_strategy("own", beta=1.0)


@pytest.mark.usefixtures("table")
def test_names_are_taken_once() -> None:
    with pytest.raises(ValueError, match=r"^strategy 'dpo' is registered already, by DPO$"):
        register_strategy("dpo", Own)
    assert get_entry("dpo").strategy is DPO


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("wrong", [NoOptions, Own(NoOptions()), "own", None])
def test_only_strategies_are_registered(wrong: object) -> None:
    message = f"strategy 'own': {wrong!r} is not a subclass of hf_strategies.strategies.Strategy"
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        register_strategy("own", wrong)  # type: ignore[arg-type]
    assert "own" not in STRATEGIES


def test_a_strategy_without_a_loss_is_refused() -> None:
    class Half(Strategy):
        Options = NoOptions

    with pytest.raises(TypeError, match=r"abstract method '?loss'?"):
        Half(NoOptions())  # type: ignore[abstract]
