"""From a batch to numbers per completion token: the only place in the package where training logits exist.

A batch is laid out for the model in one of two ways, padded or as a token stream, and its tokens are scored by the
head in one of two ways, from logits or without keeping any. The results are the same; `CheckedForward` makes sure.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from hf_strategies import functional as f
from hf_strategies.batch import TOKEN_FIELDS, Batch
from hf_strategies.modeling.attention import enable_stream, streaming, why_no_stream
from hf_strategies.modeling.critic import critic_of
from hf_strategies.modeling.generation import generating
from hf_strategies.modeling.head import LogitShape, TokenScores, fusible, score_hidden, score_logits, scoring
from hf_strategies.modeling.layout import trained_tokens
from hf_strategies.modeling.moe import RouterLoad, balance_loss, is_mixture_of_experts
from hf_strategies.modeling.noise import noisy_embeddings
from hf_strategies.modeling.predictions import LogitReader
from hf_strategies.modeling.stream import Stream
from hf_strategies.modeling.two_phase import Prefix, Suffix
from hf_strategies.modeling.unwrap import causal_lm_of, unwrapped_lm
from hf_strategies.policy_output import PolicyOutput

logger = logging.getLogger(__name__)

ATTENTION_PATHS = ("auto", "stream", "padded")

# Logits of this many positions are turned into log-probabilities at a time, so that the float32 copies a softmax needs
# stay small beside the logits themselves.
POSITIONS_PER_CHUNK = 1024


@dataclass
class ForwardResult:
    """Numbers for the strategy, and what a mixture of experts adds.

    Attributes:
        policy: per-token numbers; 0 where a token does not train.
        aux_loss: scalar load-balancing loss of this batch, unscaled, attached; None for dense models.
        router_load: which experts the batch's real tokens went to; None for dense models.
        padded_tokens: tokens of the padded rectangle [N, S].
        computed_tokens: tokens that were computed.
    """

    policy: PolicyOutput
    aux_loss: Tensor | None = None
    router_load: RouterLoad | None = None
    padded_tokens: int = 0
    computed_tokens: int = 0


class Padded:
    """A batch as the padded rectangle [N, S].

    Args:
        batch: N rows.
    """

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.shape = batch.completion_ids.shape
        self.slots = trained_tokens(batch).flatten().nonzero().squeeze(-1)
        self.targets = batch.completion_ids.flatten()[self.slots]
        self.weights = (batch.attention_mask & batch.in_group.unsqueeze(-1)).flatten()
        self.row_lengths = batch.attention_mask.sum(dim=1, keepdim=True).expand(batch.input_ids.shape)
        self.padded_tokens = self.num_tokens = batch.input_ids.numel()

    def inputs(self, takes_positions: bool, keeps_logits: bool) -> dict[str, Any]:
        """Keyword arguments of the model."""
        inputs: dict[str, Any] = {
            "input_ids": self.batch.input_ids,
            "attention_mask": self.batch.attention_mask.long(),
        }
        if takes_positions:
            inputs["position_ids"] = self.batch.position_ids
        if keeps_logits:
            # Completion token j is scored one position before it, the first one by the last prompt token.
            inputs["logits_to_keep"] = self.shape[1] + 1
        return inputs

    def pick(self, states: Tensor) -> Tensor:
        """[N, kept positions, ...] -> [M, ...], those that score a token that trains."""
        return states[:, -self.shape[1] - 1 : -1].flatten(0, 1).index_select(0, self.slots)

    def scatter(self, values: Tensor) -> Tensor:
        """[M] -> [N, C], 0 elsewhere."""
        return values.new_zeros(self.shape.numel()).index_put((self.slots,), values).view(self.shape)


class Forward:
    """Scores the completions of a batch with a causal LM.

    Args:
        causal_lm: unwrapped model, PEFT or plain; read for its signature and configuration. What is called is the
            (possibly wrapped) model given to `__call__`: calling a module inside DDP or ZeRO would lose gradients.
        temperature: log-probabilities are those of logits / temperature.
        stream: lay batches out as token streams.
        fused_head: score without keeping logits, where the model's head allows it.
    """

    def __init__(
        self, causal_lm: nn.Module, temperature: float = 1.0, *, stream: bool = False, fused_head: bool = False
    ) -> None:
        lm = causal_lm_of(causal_lm)
        parameters = inspect.signature(lm.forward).parameters
        self.temperature = temperature
        self.keeps_logits = "logits_to_keep" in parameters
        self.takes_positions = "position_ids" in parameters
        self.is_moe = is_mixture_of_experts(lm)
        self.config = lm.config
        self.stream = stream
        self.fused_head = fused_head
        self.prefix: Prefix | None = None
        # Of `noisy_embeddings`, while the model trains; None: no noise.
        self.noise_alpha: float | None = None

    def run_prefix(self, model: nn.Module, batch: Batch) -> Prefix | None:
        """The first of two phases: the prompts of a batch, as a pass that stays attached.

        Args:
            model: the model to call, wrapped or not.
            batch: N rows.

        Returns:
            What `going_on_from` takes; None where there is nothing to share.
        """
        prefix = Prefix.of_batch(batch) if self.stream else None
        if prefix is not None:
            enable_stream(unwrapped_lm(model))
            with streaming():
                model(**prefix.inputs(self.takes_positions, self.keeps_logits), use_cache=False)
            prefix.check_used()
            prefix.detach()
        return prefix

    @contextmanager
    def going_on_from(self, prefix: Prefix | None) -> Iterator[None]:
        """Batches scored inside this context find their prompts in the prefix."""
        self.prefix = prefix
        try:
            yield
        finally:
            self.prefix = None

    def __call__(
        self,
        model: nn.Module,
        batch: Batch,
        *,
        wanted: Collection[str] = (),
        values: bool = False,
        router: bool = False,
        read_logits: LogitReader | None = None,
    ) -> ForwardResult:
        """Run the model once.

        Args:
            model: the model to call, wrapped or not.
            batch: N rows.
            wanted: fields of `PolicyOutput` to fill in beside log-probabilities, of `modeling.head.EXTRAS`.
            values: also return the critic's values; the model must carry a critic.
            read_logits: is offered the logits of the tokens that train, see `LogitReader`.
            router: also return the aux loss and the router's load, if the model is a mixture of experts.

        Returns:
            Numbers of shape [N, C].
        """
        layout: Stream | Padded
        if self.prefix is not None:
            layout = Suffix.of_batch(batch, self.prefix)
        else:
            # A router counts every token, whether it trains or not.
            layout = Stream.of(batch, untrained=self.is_moe) if self.stream else Padded(batch)
        inputs = layout.inputs(self.takes_positions, self.keeps_logits)
        inputs["use_cache"] = False
        if router and self.is_moe:
            inputs["output_router_logits"] = True
        critic = critic_of(model) if values else None
        if values and critic is None:
            raise ValueError("values=True, but the model carries no critic (see modeling.critic.attach_critic)")
        lm = unwrapped_lm(model)
        head: Any = lm.get_output_embeddings() if self.fused_head else None
        with ExitStack() as contexts:
            if self.stream:
                enable_stream(lm)
                contexts.enter_context(streaming())
            if self.noise_alpha is not None and model.training:
                contexts.enter_context(noisy_embeddings(lm, self.noise_alpha, layout.row_lengths))
            if critic is not None:
                contexts.enter_context(critic.collecting())
            if fusible(head):
                shape = LogitShape.of(self.config, self.temperature)

                def score(hidden: Tensor) -> TokenScores:
                    states = layout.pick(hidden)
                    if read_logits is not None:
                        read_logits(layout.slots, lambda i: shape.apply(linear(states[i], head.weight, head.bias)))
                    return score_hidden(head, states, layout.targets, shape, wanted)

                contexts.enter_context(scoring(lm, score))
            outputs = model(**inputs)
        if isinstance(layout, Stream):
            layout.check_used()
        if fusible(head):
            scores = TokenScores(outputs["logprobs"], **{name: outputs[name] for name in wanted})
        else:
            logits = layout.pick(outputs["logits"])
            if read_logits is not None:
                read_logits(layout.slots, lambda i: f.at_least_float32(logits[i]) / self.temperature)
            scores = self._score(logits, layout.targets, wanted)
        found = {name: layout.scatter(values) for name, values in vars(scores).items() if values is not None}
        result = ForwardResult(
            PolicyOutput(**found),
            padded_tokens=layout.padded_tokens,
            computed_tokens=layout.num_tokens,
        )
        if critic is not None:
            result.policy.values = layout.scatter(layout.pick(outputs["critic_values"]))
        if router and self.is_moe:
            result.router_load = RouterLoad.of(outputs["router_logits"], layout.weights, self.config)
            # The model's own loss knows padding, but not that a prompt of the stream stands for several rows.
            result.aux_loss = (
                balance_loss(outputs["router_logits"], layout.weights, self.config)
                if self.stream
                else outputs["aux_loss"]
            )
        return result

    def _score(self, logits: Tensor, targets: Tensor, wanted: Collection[str]) -> TokenScores:
        parts = []
        for chunk, ids in zip(logits.split(POSITIONS_PER_CHUNK), targets.split(POSITIONS_PER_CHUNK), strict=True):
            chunk = f.at_least_float32(chunk)
            if self.temperature != 1.0:
                chunk = chunk / self.temperature
            parts.append(score_logits(chunk, ids, wanted))
        return TokenScores.cat(parts)


class CheckedForward(Forward):
    """The fastest way that gives this model's numbers: compared with the plain one on the first batch of a run.

    Args:
        causal_lm: see `Forward`.
        temperature: see `Forward`.
        path: ``auto``, ``stream`` (an error where it is not right for the model), or ``padded`` (the plain way).

    Raises:
        ValueError: ``stream`` for a model that is known to need the padded path.
    """

    def __init__(self, causal_lm: nn.Module, temperature: float = 1.0, path: str = "auto") -> None:
        reason = None if path == "padded" else why_no_stream(causal_lm_of(causal_lm))
        if reason is not None:
            name = type(causal_lm_of(causal_lm)).__name__
            if path == "stream":
                raise ValueError(f"attention_path='stream': {name} needs the padded path, {reason}")
            logger.warning("%s trains on the padded path: %s", name, reason)
        stream = path != "padded" and reason is None
        super().__init__(causal_lm, temperature, stream=stream, fused_head=path != "padded")
        self.path = path
        self.checked = path == "padded"

    def check(self, model: nn.Module, batch: Batch, largest: Callable[[float], float]) -> None:
        """Compare with the plain way, once, and fall back to what agrees with it.

        Every process must call this at the same time.

        Args:
            model: the model as it is called, wrapped or not.
            batch: rows to try; a few tokens of a few of them are used.
            largest: maximum of a number over all processes.

        Raises:
            RuntimeError: no fast way agrees and ``path`` demands one.
        """
        if self.checked:
            return
        self.checked = True
        sample = _sample(batch)
        plain = self._sibling(stream=False, fused_head=False)
        tolerance = tolerance_of(unwrapped_lm(model).dtype)
        with generating(model), torch.autocast(batch.device.type, enabled=False):
            expected = plain(model, sample).policy.logprobs
            for stream, fused in ((self.stream, True), (self.stream, False)):
                got = self._sibling(stream=stream, fused_head=fused)(model, sample).policy.logprobs
                # Rows without completions have nothing to compare; another process may.
                apart = torch.where(sample.loss_mask, (got - expected).abs(), 0.0)
                difference = largest(float(apart.max()))
                if difference <= tolerance:
                    self.stream, self.fused_head = stream, fused
                    return
        message = (
            f"{type(unwrapped_lm(model)).__name__}: the token stream's log-probabilities differ from the padded "
            f"path's by {difference:.2g} nats"
        )
        if self.path == "stream":
            raise RuntimeError(f"{message}; use attention_path='auto' or 'padded'")
        logger.warning("%s: training on the padded path", message)
        self.stream = self.fused_head = False

    def _sibling(self, *, stream: bool, fused_head: bool) -> Forward:
        other = copy.copy(self)
        other.stream, other.fused_head = stream, fused_head
        return other


def tolerance_of(dtype: torch.dtype) -> float:
    """How far log-probabilities that should be equal may differ, in nats, for weights of a precision."""
    # Noise of float32 is 1e-5 and grows with depth; half precision rounds.
    return 2e-3 if dtype.itemsize >= 4 else 0.5


def _sample(batch: Batch, rows: int = 2, tokens: int = 64) -> Batch:
    """The first rows of a batch with the last tokens of their prompts and the first of their completions.

    All of these count, whether they train or not: what trains may begin later.
    """
    few = batch.select(range(min(rows, batch.num_rows)))
    cut = {name: getattr(few, name)[:, -tokens:] for name in ("prompt_ids", "prompt_mask")}
    cut |= {name: getattr(few, name)[:, :tokens] for name in ("completion_ids", "completion_mask")}
    without: dict[str, Tensor | None] = dict.fromkeys(TOKEN_FIELDS)
    return few.replace(**(without | cut | {"loss_mask": cut["completion_mask"]}))
