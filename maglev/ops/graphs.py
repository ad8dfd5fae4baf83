"""CUDA graphs: what is asked for once, while the GPU only notes it down, is replayed from one call."""

from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


def capture(work: Callable[[], Result], device: torch.device) -> tuple[Result, Callable[[], None]]:
    """What `work` returns, to be filled by each replay. Nothing of it is computed now; run it before, for what is
    compiled or set up when it is first met. Where it fails, what failed first is raised, and all is as before.

    A graph has addresses and keeps nothing alive: what `work` holds lives as long as what replays it."""
    graph, pool, before = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle(), torch.cuda.current_stream(device)
    first: Exception | None = None
    # of another GPU than the current one nothing would be noted down: it would run, once
    with torch.cuda.device(device):
        try:
            # what other threads ask of the GPU meanwhile is no part of this and no error
            with torch.cuda.graph(graph, pool, own_stream(device), capture_error_mode="thread_local"):
                try:
                    result = work()
                except Exception as error:
                    first = error
                    raise
        except Exception as error:
            give_up(pool, before)
            raise first or error from None
    return result, partial(play, graph, work)


def play(graph: torch.cuda.CUDAGraph, kept: Callable[[], object]) -> None:
    graph.replay()


@cache
def own_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all captures: cuBLAS keeps a workspace for every stream that it meets."""
    return torch.cuda.Stream(device)


def give_up(pool: Any, before: torch.cuda.Stream) -> None:
    """After a capture that could not even be ended PyTorch stays on its stream, and the allocator takes it as still
    under way: it would give no memory back any more."""
    torch.cuda.set_stream(before)
    with suppress(RuntimeError):
        # raises where it was ended
        torch._C._cuda_endAllocateToPool(before.device.index, pool)
        torch._C._cuda_releasePool(before.device.index, pool)
