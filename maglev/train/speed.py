"""The machine's own limit, measured, so that a step's FLOPs can be set beside it; and a start without delay."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def matrix_rate(device: torch.device, dtype: torch.dtype, seconds: float = 0.2) -> float:
    """FLOP/s of a large square matrix product here: the best of what fits in about `seconds`."""
    size = 8192 if device.type == "cuda" else 768
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))

    def once() -> float:
        start = clock(device)
        left @ right
        return clock(device) - start

    once()
    times = [once()]
    while sum(times) < seconds:
        times.append(once())
    return 2 * size**3 / min(times)


def clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@contextmanager
def no_collections() -> Iterator[None]:
    """Compiling makes objects by the million and little garbage: to look for it again and again takes an eighth of the
    time. What is asked for (`gc.collect`) is still done."""
    active = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if active:
            gc.enable()
