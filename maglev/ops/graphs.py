"""CUDA graphs: what is asked for once, while the GPU only notes it down, is replayed from one call."""

from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")


def capture(work: Callable[[], Result]) -> tuple[Result, Callable[[], None]]:
    """What `work` returns, to be filled by each replay. Nothing of it is computed now; run it before, for what is
    compiled or set up when it is first met."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()
    return result, graph.replay
