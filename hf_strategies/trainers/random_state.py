"""Random numbers of training and of everything else are kept apart."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def preserved_random_state(device: torch.device) -> Iterator[None]:
    """Leave the random states of torch, NumPy and Python as they were found.

    Loaders draw a seed each time they are iterated, and rewards may draw what they like: dropout of the next training
    step must not depend on whether there was an evaluation before it.

    Args:
        device: device of the model; its state is kept beside the CPU's.
    """
    python, numpy = random.getstate(), np.random.get_state()
    forked = {} if device.type == "cpu" else {"device_type": device.type}
    devices = [torch.get_device_module(device).current_device()] if device.type in ("cuda", "xpu", "npu") else []
    try:
        with torch.random.fork_rng(devices, **forked) if devices else torch.random.fork_rng([]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
