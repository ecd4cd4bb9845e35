"""The progress bar of a run: one line with the figures that matter."""

from __future__ import annotations

from typing import Any

from transformers.trainer_callback import ProgressCallback

# Metric name -> how the bar abbreviates it, in this order.
SHOWN = {
    "reward": "reward",
    "loss": "loss",
    "kl": "kl",
    "entropy": "entropy",
    "rewards/accuracies": "acc",
    "completions/mean_length": "len",
    "train/tokens_per_second": "tok/s",
}


class StrategyProgress(ProgressCallback):
    """`ProgressCallback` whose bar carries the latest metrics instead of printing every log as a dict.

    Figures of a rollout stay while it is used again: only the log after sampling has them.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start a bar without figures."""
        super().on_train_begin(args, state, control, **kwargs)
        self.figures: dict[str, str] = {}

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Put the logged figures beside the bar; tqdm adds the time left."""
        if not state.is_world_process_zero or self.training_bar is None or not logs:
            return
        new = {short: f"{logs[name]:.4g}" for name, short in SHOWN.items() if isinstance(logs.get(name), int | float)}
        if new:
            self.figures |= new
            self.training_bar.set_postfix(
                {short: self.figures[short] for short in SHOWN.values() if short in self.figures}
            )
