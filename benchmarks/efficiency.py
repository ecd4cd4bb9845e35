"""Share of the machine's own matrix-product rate that the train phase of a GRPO case reaches.

    python -m benchmarks.efficiency grpo-512-64-8      # from its results; measures the machine's rate now

Necessary operations: two per weight and token forward, two more for the gradient of the inputs (the weights are frozen
under LoRA), the adapters forward and backward, attention, and the head at completion tokens, forward and for the kept
direction.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import torch
from transformers import AutoConfig

from benchmarks.cases import GRPO, Case
from benchmarks.run import read
from benchmarks.worker import THREADS
from hf_strategies.modeling.embedded import embedded_model_path

LORA_RANK = 16


def gemm_rate(rows: int, width: int, inner: int) -> float:
    """Measured operations per second of [rows, inner] x [inner, width] in float32."""
    a, b = torch.randn(rows, inner), torch.randn(inner, width)
    times = []
    for _ in range(30):
        started = time.perf_counter()
        torch.mm(a, b)
        times.append(time.perf_counter() - started)
    return 2 * rows * width * inner / median(times)


def necessary_operations(case: Case, config: Any) -> float:
    """Floating-point operations of forward and backward pass of one optimizer step."""
    hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    kv = hidden * config.num_key_value_heads // config.num_attention_heads
    shapes = [(hidden, hidden), (hidden, kv), (hidden, kv), (hidden, hidden)] + [(hidden, inner)] * 3
    weights = sum(a * b for a, b in shapes)
    adapters = sum(LORA_RANK * (a + b) for a, b in shapes)
    completion = case.group * case.completion
    tokens = case.prompt + completion
    # Keys that a token sees: half of its own text on average, and all of the prompt before a completion.
    seen = case.prompt * case.prompt / 2 + completion * (case.prompt + case.completion / 2)
    per_layer = tokens * (weights * 4 + adapters * 6) + seen * hidden * 2 * 2 * 3
    head = completion * hidden * config.vocab_size * 4
    return case.prompts * (layers * per_layer + head)


def main() -> None:
    """Print the share."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=[case.name for case in GRPO])
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    case = next(case for case in GRPO if case.name == options.case)
    config = AutoConfig.from_pretrained(str(embedded_model_path()))
    seconds = median(result["train"] for result in read(case)["ours"])
    tokens = case.prompt + case.group * case.completion
    rate = gemm_rate(tokens, config.intermediate_size, config.hidden_size)
    needed = necessary_operations(case, config)
    print(
        f"{case.name}: {needed / 1e9:.0f} G operations in {seconds:.2f} s are {needed / seconds / 1e9:.0f} G/s, "
        f"{needed / seconds / rate:.0%} of the {rate / 1e9:.0f} G/s of this machine's matrix products"
    )


if __name__ == "__main__":
    main()
