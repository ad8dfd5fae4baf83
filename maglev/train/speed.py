"""The machine's own limit, measured, so that a step's FLOPs can be set beside it."""

import time

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
