"""How long work takes on a device, warmed up and waited for."""

import contextlib
import platform
import statistics
import time
from collections.abc import Callable, Iterator

import torch

WARM_UPS = 3

Work = Callable[[], object]


def seconds(work: Work, device: torch.device, calls: int, repeats: int, warm_ups: int = WARM_UPS) -> float:
    """Per call: the median of several rounds of `calls`, after a warm-up."""
    for _ in range(warm_ups):
        work()
    rounds = []
    for _ in range(repeats):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(calls):
                work()
            end.record()
            end.synchronize()
            rounds.append(start.elapsed_time(end) / 1e3 / calls)
        else:
            begun = time.perf_counter()
            for _ in range(calls):
                work()
            rounds.append((time.perf_counter() - begun) / calls)
    return statistics.median(rounds)


def graphed(work: Work, device: torch.device) -> Work:
    """`work` as one replay of a CUDA graph; as it is where there are none."""
    if device.type != "cuda":
        return work
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = work()

    def replay() -> object:
        graph.replay()
        return kept

    return replay


@contextlib.contextmanager
def measuring_on(device: torch.device) -> Iterator[None]:
    """Events and graphs belong to the current device; the same random numbers each time."""
    torch.manual_seed(0)
    with torch.inference_mode(), torch.cuda.device(device if device.type == "cuda" else -1):
        yield


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int | None:
    """The most that was allocated since `reset_peak`; PyTorch does not count it on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def machine_facts(device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "dtype": str(dtype).removeprefix("torch."),
        "torch": torch.__version__,
    }
