"""What the machine itself can do, measured in the same run as what is set beside it."""

import torch

from maglev.bench.clock import seconds

CALLS = 5


def machine_rates(device: torch.device, dtype: torch.dtype, quick: bool, repeats: int) -> dict[str, float]:
    """Bytes per second that a copy reads and writes, and operations per second of a large square matrix product."""
    size, side = (1 << 22, 256) if quick else (1 << 30, 8192) if device.type == "cuda" else (1 << 28, 1024)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = seconds(lambda: target.copy_(source), device, CALLS, repeats)
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    product = seconds(lambda: left @ right, device, CALLS, repeats)
    return {"copy_bytes_per_s": 2 * size / copy, "matrix_flops": 2 * side**3 / product}
