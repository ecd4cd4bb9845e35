"""What a pass of a model gives the strategies. Shapes are those of `hf_strategies.batch`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class PolicyOutput:
    """What one pass of a model over a batch gives the strategies: numbers per completion token.

    Attributes:
        logprobs: [N, C] log-probability of each completion token given all before it, in nats, under logits / T.
        entropy: [N, C] entropy of the distribution each completion token was drawn from, in nats; detached.
        vocab_mean: [N, C] mean of the log-probabilities of all V tokens (label smoothing needs it).
        mean_logit: [N, C] mean of the logits of all V tokens; detached.
        log_collision: [N, C] logarithm of the sum of all V squared probabilities; detached.
        correct: [N, C] 1.0 where no token is likelier than the completion's, else 0.0.
        greedy: [N, C] long, the likeliest token.
        values: [N, C] critic's value of the state before each completion token, in reward units.
        computed: [N] bool, False for rows that were skipped because no gradient can come from them; None: none was.
    """

    logprobs: Tensor
    entropy: Tensor | None = None
    vocab_mean: Tensor | None = None
    mean_logit: Tensor | None = None
    log_collision: Tensor | None = None
    correct: Tensor | None = None
    greedy: Tensor | None = None
    values: Tensor | None = None
    computed: Tensor | None = None

    def computed_of(self, mask: Tensor) -> Tensor:
        """Tokens of a mask [N, C] whose rows were computed."""
        return mask if self.computed is None else mask & self.computed.unsqueeze(-1)
