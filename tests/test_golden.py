"""Golden numbers: the origin's formulas (right values where the origin is wrong) and TRL's."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import f64, golden_case, golden_trl
from pure import batch_of
from transformers import get_cosine_with_min_lr_schedule_with_warmup

from hf_strategies import Batch, GRPOConfig, PolicyOutput, Row, credit, make_strategy
from hf_strategies import functional as f
from hf_strategies.data.packing import best_fit_decreasing, doc_boundary_mask, document_ids
from hf_strategies.modeling.moe import RouterLoad
from hf_strategies.rollout.buffer import RolloutBuffer
from hf_strategies.rollout.version import PolicyVersion, PolicyVersionError

EXACT = {"atol": 1e-12, "rtol": 1e-10}

# Entries whose subject does not exist yet, with the reason; everything else in the two files is covered below.
LATER: tuple[tuple[str, str], ...] = (
    ("rloo_adv", "the leave-one-out advantage estimator"),
    ("grpo.seq_ratio", "ratios of whole sequences"),
    ("grpo.gspo_grpo_agg", "ratios of whole sequences"),
    ("grpo.vespo_W", "the loss type vespo"),
    ("grpo.vespo_phi", "the loss type vespo"),
)  # fmt: skip
COVERED_TRL = (
    "group_adv",
    "grpo.token_loss",
    "grpo.grpo",
    "grpo.bnpo=dapo",
    "grpo.dr_grpo",
    "k3",
    "gae",
)
# Golden loss -> options that give it.
DPO_LOSSES: dict[str, dict[str, Any]] = {
    **{
        name: {"loss_type": name}
        for name in ("sigmoid", "hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "sigmoid_norm")
    },
    "exo_pair_eps1e-3": {"loss_type": "exo_pair", "label_smoothing": 1e-3},
    "cdpo_ls.1(not in TRL)": {"label_smoothing": 0.1},
    "sigmoid|js": {"f_divergence_type": "js_divergence"},
    "sigmoid|alpha.5": {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.5},
}


def rows_of(values: object) -> torch.Tensor:
    """[B, G, R] lists as [B * G, R]."""
    tensor = f64(values)
    return tensor.reshape(-1, tensor.shape[-1])


def bools_of(values: object) -> torch.Tensor:
    return rows_of(values).bool()


def same(actual: torch.Tensor, expected: object) -> None:
    expected = f64(expected)
    torch.testing.assert_close(actual.to(torch.float64).reshape(expected.shape), expected, **EXACT)


def test_every_case_is_covered_or_listed() -> None:
    cases = json.loads((Path(__file__).parent / "golden" / "seed_cases.json").read_text())["cases"]
    # What a test below asks for by name.
    asked = {
        node.args[0].value
        for node in ast.walk(ast.parse(Path(__file__).read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "golden_case"
        if isinstance(node.args[0], ast.Constant)
    }
    assert {case["id"] for case in cases} == asked


def test_every_entry_of_trl_is_covered_or_listed() -> None:
    golden = golden_trl()
    assert set(golden["dpo"]["loss"]) == set(DPO_LOSSES)
    entries = set(golden) - {"dpo", "grpo"} | {f"grpo.{key}" for key in golden["grpo"]}
    assert entries - {"grpo.inputs"} == {*COVERED_TRL, *(entry for entry, _ in LATER)}
    assert not set(COVERED_TRL) & {entry for entry, _ in LATER}


def test_gae_padded() -> None:
    case = golden_case("gae_padded")
    i = case["inputs"]
    advantages, returns = credit.generalized_advantages(
        rows_of(i["rewards"]), rows_of(i["values"]), bools_of(i["mask"]), i["gamma"], i["gae_lambda"]
    )
    same(advantages, case["right"]["advantages"])
    same(returns, case["right"]["returns"])


def test_gae_limits() -> None:
    case = golden_case("gae_limits")
    i, right = case["inputs"], case["right"]
    rewards, values, mask = rows_of(i["rewards"]), rows_of(i["values"]), bools_of(i["mask"])
    advantages, returns = credit.generalized_advantages(rewards, values, mask, i["td_gamma"], 0.0)
    same(advantages, right["td_advantages"])
    same(returns, right["td_returns"])
    advantages, returns = credit.generalized_advantages(rewards, torch.zeros_like(values), mask, 1.0, 1.0)
    same(advantages, right["mc_advantages"])
    same(returns, right["mc_returns"])
    advantages, returns = credit.generalized_advantages(
        rows_of(i["empty_rewards"]), values, bools_of(i["empty_mask"]), 1.0, 1.0
    )
    same(advantages, right["empty_advantages"])
    same(returns, right["empty_returns"])


def test_ppo_kl_shaping() -> None:
    case = golden_case("ppo_kl_shaping")
    i, right = case["inputs"], case["right"]
    mask = bools_of(i["mask"])
    rewards = f64(i["rewards"]).flatten()
    same(credit.shaped_rewards(rewards, None, mask, 0.0)[:2], right["token_rewards_before_kl"][0][:2])
    kl = f.kl_divergence(rows_of(i["logprobs_old"]), rows_of(i["logprobs_ref"]), mask, "k1")
    shaped = credit.shaped_rewards(rewards, kl, mask, i["kl_coef"])
    same(shaped, right["token_rewards"])
    advantages, returns = credit.generalized_advantages(
        shaped, rows_of(i["values"]), mask, i["gamma"], i["gae_lambda"]
    )
    same(advantages, right["advantages"])
    same(returns, right["returns"])


def test_ppo_loss_with_gradients() -> None:
    case = golden_case("ppo_loss")
    i, right = case["inputs"], case["right"]
    mask = bools_of(i["mask"])
    logprobs, values = rows_of(i["logprobs"]).requires_grad_(), rows_of(i["values"]).requires_grad_()
    batch = batch_of(
        mask,
        torch.zeros(2, dtype=torch.long),
        old_logprobs=rows_of(i["logprobs_old"]),
        advantages=rows_of(i["advantages"]),
        returns=rows_of(i["returns"]),
    )
    strategy = make_strategy("online_ppo", epsilon=i["clip_eps"], vf_coef=i["vf_coef"])
    items = strategy.count_items(batch)
    loss, metrics = strategy.loss(PolicyOutput(logprobs=logprobs, values=values), batch, items)
    loss.backward()
    same(loss.detach(), right["loss"])
    for name in ("policy_loss", "value_loss"):
        same(metrics[name].total / metrics[name].count, right[name])  # type: ignore[union-attr]
    same(logprobs.grad, right["grad_logprobs"])  # type: ignore[arg-type]
    same(values.grad, right["grad_values"])  # type: ignore[arg-type]
    explained = credit.explained_variance(rows_of(i["values"]), rows_of(i["returns"]), mask)
    same(explained, right["explained_variance"])
    low, high = metrics["clip_ratio/low_mean"], metrics["clip_ratio/high_mean"]
    clipped = (low.total + high.total) / low.count  # type: ignore[union-attr]
    same(clipped, right["extra_metrics_not_in_seed"]["clip_fraction"])
    # approx_kl compares p_old with p: k3 with d = logp - logp_old.
    kl = f.kl_divergence(rows_of(i["logprobs_old"]), rows_of(i["logprobs"]), mask, "k3")
    same(f.masked_mean(kl, mask), right["extra_metrics_not_in_seed"]["approx_kl_k3"])


def grpo_inputs() -> tuple[dict, torch.Tensor, torch.Tensor, torch.Tensor]:
    i = golden_case("grpo_loss")["inputs"]
    return i, bools_of(i["mask"]), f64(i["rewards"]).flatten(), torch.tensor([0, 0, 0, 1, 1, 1])


def test_grpo_loss_with_gradients() -> None:
    """The origin's advantages: biased std, eps 1e-8."""
    i, mask, rewards, group = grpo_inputs()
    right = golden_case("grpo_loss")["right"]
    advantages = credit.group_advantages(rewards, group, unbiased=False, eps=i["log_eps"])
    same(advantages, right["advantages"])
    logprobs = rows_of(i["logprobs"]).requires_grad_()
    batch = batch_of(
        mask,
        group,
        old_logprobs=rows_of(i["logprobs_old"]),
        ref_logprobs=rows_of(i["logprobs_ref"]),
        advantages=advantages.unsqueeze(1).expand(mask.shape),
    )
    strategy = make_strategy("grpo", epsilon=i["clip_eps"], beta=i["kl_coef"])
    loss, metrics = strategy.loss(PolicyOutput(logprobs=logprobs), batch, strategy.count_items(batch))
    loss.backward()
    same(loss.detach(), right["loss"])
    same(metrics["policy_loss"].total / metrics["policy_loss"].count, right["policy_loss"])  # type: ignore[union-attr]
    kl = metrics["kl"].total / metrics["kl"].count  # type: ignore[union-attr]
    same(kl * i["kl_coef"], right["kl_loss"])
    same(logprobs.grad, right["grad_logprobs"])  # type: ignore[arg-type]


def test_grpo_variants() -> None:
    i, mask, rewards, group = grpo_inputs()
    right = golden_case("grpo_variants")["right"]
    same(credit.group_advantages(rewards, group), right["advantages_trl_unbiased_std_eps1e-4"])
    same(credit.group_advantages(rewards, group, "none"), right["advantages_no_scaling"])
    advantages = f64(right["advantages"]).flatten().unsqueeze(1).expand(mask.shape)
    batch = batch_of(
        mask,
        group,
        old_logprobs=rows_of(i["logprobs_old"]),
        ref_logprobs=rows_of(i["logprobs_ref"]),
        advantages=advantages,
    )
    strategy = make_strategy("grpo", epsilon=i["clip_eps"], beta=i["kl_coef"], loss_type="grpo")
    items = strategy.count_items(batch)
    assert items == 5  # the empty completion is no row
    loss, metrics = strategy.loss(PolicyOutput(logprobs=rows_of(i["logprobs"])), batch, items)
    # The golden value is the policy part and the KL part of the mean over rows.
    same(loss, right["sequence_mean_loss"])
    assert metrics["policy_loss"].count == 5  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_grpo_degenerate_groups(dtype: torch.dtype) -> None:
    """Equal rewards give exactly 0: float32 arithmetic would give 0.749 for six times 0.3."""
    i = golden_case("grpo_degenerate_groups")["inputs"]
    for rewards in (i["rewards_identical"], i["rewards_single"], [[0.1] * 7], [[1 / 3] * 5]):
        flat = torch.tensor(rewards, dtype=dtype).flatten()
        for scale in credit.REWARD_SCALES:
            advantages = credit.group_advantages(flat, torch.zeros(flat.numel(), dtype=torch.long), scale)
            assert torch.equal(advantages, torch.zeros(flat.numel(), dtype=torch.float64))
    mask = bools_of(i["zero_mask_loss_mask"])
    logprobs = torch.zeros(1, 2, requires_grad=True)
    batch = batch_of(mask, torch.zeros(1, dtype=torch.long), advantages=torch.ones(1, 2))
    loss, _ = make_strategy("grpo").loss(PolicyOutput(logprobs=logprobs), batch, torch.tensor(1.0))
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(logprobs.grad, torch.zeros(1, 2))


def test_accumulation_normalisation() -> None:
    case = golden_case("accumulation_normalisation")
    micro = case["inputs"]["microbatches"]
    total = torch.tensor(float(sum(m["n"] for m in micro)))
    shares = []
    for m in micro:
        loss = torch.full((1, m["n"]), m["sum"] / m["n"], dtype=torch.float64)
        shares.append(f.aggregate(loss, torch.ones(1, m["n"], dtype=torch.bool), total, "dapo"))
    same(torch.stack(shares).sum(), case["right"]["effective_loss"])


def dpo_batch() -> tuple[dict, Batch, torch.Tensor]:
    """The golden pairs as rows, chosen before rejected."""
    case = golden_case("dpo_loss_sum")
    i = case["inputs"]

    def woven(chosen: str, rejected: str) -> torch.Tensor:
        return torch.stack([f64(i[chosen]), f64(i[rejected])], dim=1).reshape(4, -1)

    mask = woven("mask_chosen", "mask_rejected").bool()
    batch = batch_of(mask, torch.tensor([0, 0, 1, 1]), ref_logprobs=woven("ref_chosen", "ref_rejected"))
    return case, batch, woven("logprobs_chosen", "logprobs_rejected")


def test_dpo_loss_sum() -> None:
    case, batch, logprobs = dpo_batch()
    right = case["right"]
    logprobs.requires_grad_()
    strategy = make_strategy("dpo", beta=case["inputs"]["beta"])
    loss, metrics = strategy.loss(PolicyOutput(logprobs=logprobs), batch, strategy.count_items(batch))
    loss.backward()
    same(loss.detach(), right["loss"])
    gradient = logprobs.grad
    # d loss / d (sum of log-probs) reaches every trained token alike, and no padding.
    for row, name, pair in ((0, "chosen", 0), (2, "chosen", 1), (1, "rejected", 0), (3, "rejected", 1)):
        expected = [right[f"grad_logps_{name}"][pair] if m else 0.0 for m in batch.loss_mask[row].tolist()]
        same(gradient[row], expected)  # type: ignore[index]
    for name, key in (("logps/chosen", "logps_chosen"), ("logps/rejected", "logps_rejected")):
        same(metrics[name].total, sum(right[key]))  # type: ignore[union-attr]
    same(metrics["rewards/margins"].total, 0.1 * sum(right["margin"]))  # type: ignore[union-attr]
    extra = right["extra_metrics_not_in_seed"]
    same(metrics["rewards/chosen"].total, sum(extra["rewards_chosen"]))  # type: ignore[union-attr]
    same(metrics["rewards/accuracies"].total / 2, extra["accuracy"])  # type: ignore[union-attr]


def test_dpo_reduction_none_trap() -> None:
    case = golden_case("dpo_reduction_none_trap")
    assert case["right"]["error"] == "ValueError"
    with pytest.raises(ValueError, match=r"reduction='none': allowed are 'sum', 'mean'"):
        make_strategy("dpo", reduction=case["inputs"]["reduction"])


def test_online_dpo_sequences() -> None:
    """Best and worst of a group with their prompt in view; id 0 is padding in one row and text in another."""
    case = golden_case("online_dpo_sequences")
    i, right = case["inputs"], case["right"]
    rows = []
    for g in range(2):
        prompt = [t for t, m in zip(i["prompts"][g], i["prompt_mask"][g], strict=True) if m]
        for ids, mask, reward in zip(i["responses"][g], i["response_mask"][g], i["rewards"][g], strict=True):
            rows.append(Row(prompt, [t for t, m in zip(ids, mask, strict=True) if m], group=g, reward=reward))
    pairs, metrics = make_strategy("online_dpo").select(Batch.from_rows(rows))
    assert pairs.num_rows == 4
    assert metrics["frac_pairs_tied"].total == 0  # type: ignore[union-attr]
    for side, first in (("chosen", 0), ("rejected", 1)):
        attention = pairs.attention_mask[first::2]
        assert attention.long().tolist() == right[f"{side}_attention_mask"]
        assert torch.where(attention, pairs.input_ids[first::2], 0).tolist() == right[side]
        prompt = torch.zeros(2, 4, dtype=torch.bool)
        assert torch.cat([prompt, pairs.loss_mask[first::2]], dim=1).long().tolist() == right[f"{side}_mask"]


class Bigram(torch.nn.Module):
    """Logits depend on the previous token only."""

    class Config:
        def get_text_config(self) -> Bigram.Config:
            return self

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.table, self.config = table, Bigram.Config()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, use_cache: bool) -> object:
        return {"logits": self.table[input_ids]}


def test_rollout_logprob_alignment() -> None:
    """The first completion token is scored by the last prompt token, not by padding."""
    from hf_strategies.modeling.forward import Forward

    case = golden_case("rollout_logprob_alignment")
    i, right = case["inputs"], case["right"]
    model = Bigram(f64(i["bigram_logits"]))
    prompt = [t for t, m in zip(i["prompts"][0], i["prompt_mask"][0], strict=True) if m]
    rows = [
        Row(prompt, [t for t, m in zip(ids, mask, strict=True) if m])
        for ids, mask in zip(i["responses"][0], i["response_mask"][0], strict=True)
    ]
    batch = Batch.from_rows(rows)
    logprobs = Forward(model)(model, batch).policy.logprobs
    same(f.reduce_tokens(logprobs, batch.loss_mask, "none"), right["logprobs"])
    for reduction in ("sum", "mean"):
        same(f.reduce_tokens(logprobs, batch.loss_mask, reduction), right[reduction])
    same(logprobs[:, 0], right["right_padded_prompt_first_token_logprob"])
    # Values use the same positions: with S = P + C columns, the C that end one before the last.
    values = f64(i["critic_values_full_sequence"])
    same(values[:, -4:-1], right["critic_values"])


def test_moe_diagnostics() -> None:
    case = golden_case("moe_diagnostics")
    layers = case["inputs"]["layers"]

    def values(given: list[dict]) -> dict[str, float]:
        load = RouterLoad.from_probs([f64(x["probs"]) for x in given], [torch.tensor(x["topk"]) for x in given])
        return {name.removeprefix("moe/"): value for name, value in load.values().items()}

    right = case["right"]
    for key, given in (("two_layers", layers), ("layer1", layers[:1]), ("layer2", layers[1:])):
        assert values(given) == pytest.approx(right[key], abs=1e-12)
    assert values([case["inputs"]["tiny_layer"]]) == pytest.approx(right["tiny"], abs=1e-12)
    nothing = RouterLoad.from_probs([torch.zeros(0, 4)], [torch.zeros(0, 2, dtype=torch.long)])
    assert nothing.values() == right["empty_list"]


def test_doc_boundary_mask() -> None:
    case = golden_case("doc_boundary_mask")
    positions = torch.tensor(case["inputs"]["position_ids"])
    assert document_ids(positions).tolist() == case["right"]["doc_ids"]
    mask = doc_boundary_mask(positions)
    assert list(mask.shape) == case["right"]["mask_shape"]
    assert mask.squeeze(1).long().tolist() == case["right"]["mask"]


@pytest.mark.parametrize("name", ["sft", "seq"])
def test_label_smoothing(name: str) -> None:
    """sft trains masked-in tokens, seq all of them."""
    case = golden_case("sft_label_smoothing")
    i, right = case["inputs"], case["right"]
    targets = torch.tensor(i["target_ids"])
    mask = torch.tensor(i["loss_mask"]).bool() if name == "sft" else torch.ones(1, 4, dtype=torch.bool)
    batch = batch_of(mask, torch.zeros(1, dtype=torch.long))
    for smoothing in i["label_smoothing"]:
        logits = f64(i["logits"]).requires_grad_()
        strategy = make_strategy(name, label_smoothing=smoothing)
        policy = PolicyOutput(logprobs=f.token_logprobs(logits, targets), vocab_mean=logits.log_softmax(-1).mean(-1))
        loss, _ = strategy.loss(policy, batch, strategy.count_items(batch))
        loss.backward()
        same(loss.detach(), right[f"{name}_loss_{smoothing or 0}"])
        if name == "sft" and smoothing:
            same(logits.grad, right["grad_logits_0.1"])  # type: ignore[arg-type]
    nothing = batch_of(torch.zeros(1, 4, dtype=torch.bool), torch.zeros(1, dtype=torch.long))
    loss, _ = strategy.loss(policy, nothing, torch.tensor(1.0))
    assert loss.item() == right["all_masked"]


def test_bfd_packing_plan() -> None:
    case = golden_case("bfd_packing_plan")
    capacity = case["inputs"]["max_packed_len"]
    bins = best_fit_decreasing(case["inputs"]["lengths"], capacity)
    assert bins == case["right"]["bins"]
    lengths = [[min(case["inputs"]["lengths"][i], capacity) for i in chosen] for chosen in bins]
    assert [sum(x) for x in lengths] == case["right"]["fill"]
    positions = [[p for length in x for p in range(length)] for x in lengths]
    assert positions == case["right"]["position_ids"]


def test_rollout_runner_trace(tmp_path: Path) -> None:
    """Versions and lag as in the trace. The buffer is keyed by step, so evaluation and other prompts do not disturb it
    (the origin's one-slot cache, keyed by prompts, never reuses under a shuffled loader)."""
    case = golden_case("rollout_runner_trace")
    version, fresh_at, served = PolicyVersion(), [], []
    buffer = RolloutBuffer(steps_per_generation=2, num_iterations=1)
    batch = Batch.from_rows([Row([1], [2])])
    for op in case["inputs"]["interval_2_ops"]:
        if op[0] == "call":
            if buffer.needs_rollout:
                version.check_rollout_may_start()
                buffer.fill([batch, batch])
                fresh_at.append(version.current)
            buffer.next()
            served.append(version.current)
        elif op[0] == "optimizer_step":
            version.begin_step()
            version.publish()
        elif op[0] == "failed_optimizer_step":
            version.begin_step()
            with pytest.raises(PolicyVersionError, match="between a weight change"):
                version.check_rollout_may_start()
            version.skip_step()
    published = [
        r["policy_version"] for r in case["right"]["interval_2"] if "policy_version" in r and "error" not in r
    ]
    assert version.current == published[-1] == 2
    assert fresh_at == [0, 1, 2, 2]  # every second of the eight calls, at the version of its moment
    assert served == [0, 0, 1, 1, 2, 2, 2, 2]
    lag = case["inputs"]["lag_max_policy_lag"]
    with pytest.raises(
        PolicyVersionError, match=r"rollout policy lag 2 exceeds max_policy_lag=1 \(rollout=0, live=2\)"
    ):
        version.check_lag(0, lag)
    config = GRPOConfig(
        output_dir=str(tmp_path), steps_per_generation=case["inputs"]["lag_interval"], gradient_accumulation_steps=1
    )
    assert config.resolved_max_policy_lag == case["right"]["default_max_policy_lag_for_interval_4"]


def test_lr_schedules() -> None:
    """The scheduler users reach with lr_scheduler_type=cosine_with_min_lr."""
    case = golden_case("lr_schedules")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = get_cosine_with_min_lr_schedule_with_warmup(
        optimizer, num_warmup_steps=10, num_training_steps=100, min_lr_rate=case["inputs"]["min_rate"]
    )
    rates = [scheduler.lr_lambdas[0](step) for step in case["inputs"]["steps"]]
    expected = case["right"]["hf_cosine_with_min_lr"]
    # Past the end the golden file holds the floor; the scheduler's cosine is asked up to the last step only.
    assert rates[:-1] == pytest.approx(expected[:-1], abs=1e-12)


def test_trl_group_advantages() -> None:
    for case in golden_trl()["group_adv"]:
        rewards = f64(case["r"])
        same(credit.group_advantages(rewards, torch.zeros(4, dtype=torch.long)), case["adv"])


def test_trl_grpo_aggregations() -> None:
    case = golden_trl()["grpo"]
    ratio, adv = case["inputs"]["ratio"], case["inputs"]["adv"]
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]).bool()
    padded = torch.ones(2, 4, dtype=torch.float64)
    padded[0, :2], padded[1] = f64(ratio[0]), f64(ratio[1])
    token_loss = f.clipped_surrogate(padded, f64(adv).unsqueeze(1), 0.2, 0.2)
    same(token_loss[0, :2], case["token_loss"][0])
    same(token_loss[1], case["token_loss"][1])
    for key, how in (("grpo", "grpo"), ("bnpo=dapo", "dapo"), ("bnpo=dapo", "bnpo"), ("dr_grpo", "dr_grpo")):
        items = f.count_items(mask, how, case["inputs"]["max_completion_length"])
        same(f.aggregate(token_loss, mask, items, how), case[key])


def test_trl_k3_and_gae() -> None:
    golden = golden_trl()
    ones = torch.ones(1, 1, dtype=torch.bool)
    for sign, key in ((1, "ref-pi=ln2"), (-1, "ref-pi=-ln2")):
        d = sign * torch.tensor(2.0, dtype=torch.float64).log().view(1, 1)
        same(f.kl_divergence(torch.zeros(1, 1, dtype=torch.float64), d, ones, "k3"), [[golden["k3"][key]]])
    case = golden["gae"]
    advantages, returns = credit.generalized_advantages(
        f64([case["rewards"]]), f64([case["values"]]), torch.ones(1, 3, dtype=torch.bool), case["gamma"], case["lam"]
    )
    same(advantages[0], case["adv"])
    same(returns[0], case["returns"])


@pytest.mark.parametrize("golden_loss", DPO_LOSSES)
def test_trl_dpo(golden_loss: str) -> None:
    case = golden_trl()["dpo"]
    i = case["inputs"]
    mask = torch.zeros(2, 8, dtype=torch.bool)
    mask[0, : i["n_chosen"]] = True
    mask[1, : i["n_rejected"]] = True
    logprobs = torch.zeros(2, 8, dtype=torch.float64)
    logprobs[0, 0], logprobs[1, 0] = i["logratio_chosen"], i["logratio_rejected"]
    batch = batch_of(mask, torch.tensor([0, 0]), ref_logprobs=torch.zeros(2, 8, dtype=torch.float64))
    options = [DPO_LOSSES[golden_loss]]
    if golden_loss == "sigmoid_norm":
        options.append({"reduction": "mean"})
    for each in options:
        strategy = make_strategy("dpo", beta=i["beta"], **each)
        loss, _ = strategy.loss(PolicyOutput(logprobs=logprobs), batch, torch.tensor(1.0))
        same(loss, case["loss"][golden_loss])
