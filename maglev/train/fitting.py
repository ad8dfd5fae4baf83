"""The micro-batch that fits, found by trying: a pass is run, its peak is measured, and the rest is proportion."""

import gc
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import torch

from maglev.errors import RequestError, WorkError
from maglev.ops import attention
from maglev.train.distributed import GPU_TROUBLE, first_line, largest_over_ranks, of_gpu, together

# of what is free: allocators leave holes, and libraries take workspaces of their own
USABLE = 0.92
NO_ROW = (
    "out of memory on {device}: not even a micro-batch of one row fits; set train.recompute to full, divide "
    "the model over more ranks with train.sharding=full, or take a smaller depth or model.context"
)
# allocators, libraries and compilers each tell it in their own way, a CPU's without an error of its own
NO_MEMORY = re.compile("out of memory|OutOfMemoryError|can't allocate memory|STATUS_ALLOC_FAILED")


class Memory(Protocol):
    """What a device has, and how much of it some work needs."""

    def usable(self) -> int:
        """Bytes that this process may come to hold, those that it holds among them."""

    def held(self) -> int: ...

    def peak_of(self, work: Callable[[], None]) -> int | None:
        """The most bytes held while `work` ran; None where they did not suffice."""


class CudaMemory:
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def usable(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.device)
        return int(USABLE * (free + torch.cuda.memory_reserved(self.device)))

    def held(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def peak_of(self, work: Callable[[], None]) -> int | None:
        torch.cuda.reset_peak_memory_stats(self.device)
        if not sufficed(work):
            return None
        return torch.cuda.max_memory_allocated(self.device)


def memory_of(device: torch.device) -> Memory | None:
    """None where memory is not measured: there the rows follow from the tokens of a pass."""
    return CudaMemory(device) if device.type == "cuda" else None


def sufficed(work: Callable[[], None]) -> bool:
    """Whether `work` ended without running out of memory."""
    try:
        work()
    except Exception as error:
        if lacks_memory(error):
            return False
        raise
    return True


def lacks_memory(error: Exception) -> bool:
    if isinstance(error, RequestError | WorkError):
        return False
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or bool(NO_MEMORY.search(str(error)))


@contextmanager
def building_kernels(device: torch.device) -> Iterator[None]:
    """Kernels are built for their shape when it is first met, and run later; what fails is told in one line.

    Memory that is lacking then is lacking memory: building and trying kernels takes some.
    """
    try:
        yield
    except (RequestError, WorkError):
        raise
    except Exception as error:
        # by name: importing the compilers to know their errors takes seconds
        built = type(error).__module__.startswith(("torch._dynamo", "torch._inductor", "triton"))
        if lacks_memory(error) or not (built or of_gpu(error)):
            raise
        lines = str(error).strip().splitlines() or [""]
        line = next(filter(GPU_TROUBLE.search, lines), lines[0])
        remedy = (
            "install a PyTorch that is built for this GPU"
            if "no kernel image" in line
            else f"set train.compile to off or train.attention to another ({attention.describe(device.type)})"
        )
        raise WorkError(f"a kernel failed on {device}: {type(error).__name__}: {line[:160]}; {remedy}") from error


@contextmanager
def trouble_in_one_line(device: torch.device) -> Iterator[None]:
    """Around a whole run: of kernels anywhere in it, and of memory where no smaller pass helps."""
    try:
        with building_kernels(device):
            yield
    except Exception as error:
        if not lacks_memory(error):
            raise
        # what follows are lists of what is allocated
        line = ". ".join(first_line(error).split(". ")[:2])
        raise WorkError(
            f"out of memory on {device} outside of a pass ({line}); end what else runs on it, then resume, if need be "
            "with train.sharding=full on more ranks or without validation (train.validate_every=0)"
        ) from error


def release(device: torch.device) -> None:
    """Give back what a failed pass leaves: only when its frames are gone are its tensors free."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def divisors(rows: int) -> list[int]:
    return [divisor for divisor in range(1, rows + 1) if rows % divisor == 0]


def largest_divisor(rows: int, most: int) -> int:
    """Every pass of a step is to have one shape, so the rows of a pass divide those of the step."""
    return max(divisor for divisor in divisors(rows) if divisor <= max(1, most))


def smaller(rows: int, rows_per_pass: int) -> int:
    """At most half of the rows that did not fit; 0 where there was one."""
    return 0 if rows_per_pass == 1 else largest_divisor(rows, rows_per_pass // 2)


def find_rows(
    rows: int, guess: int, most: int, memory: Memory, try_pass: Callable[[int], None], after: Callable[[], None]
) -> int:
    """The largest divisor of `rows`, up to `most`, whose pass fits; the same on every rank, the smallest of theirs.
    0 where not even one row does.

    Each try compiles for its shape, so the first is at the guess: where that is right, nothing is compiled in vain.
    `after` follows every try and clears what it left.
    """
    fits, too_many = 0, most + 1
    tried = largest_divisor(rows, min(guess, most))
    while True:
        able = together(partial(capacity, tried, memory, try_pass, after))
        # all ranks try the same sizes, and go on from the smallest
        able = -largest_over_ranks(-able)
        if able >= tried:
            fits = max(fits, tried)
        else:
            too_many = min(too_many, tried)
        if too_many == 1:
            return 0
        tried = largest_divisor(rows, min(able, too_many - 1))
        if tried <= fits:
            return fits


def capacity(tried: int, memory: Memory, try_pass: Callable[[int], None], after: Callable[[], None]) -> int:
    """How many rows would fit on this rank, by what `tried` rows took; half of them where they did not fit at all."""
    before = memory.held()
    peak = memory.peak_of(lambda: try_pass(tried))
    after()
    if peak is None:
        return tried // 2
    # what does not grow with the rows counts as if it did: the error is on the safe side
    per_row = max(1.0, (peak - before) / tried)
    # one row that ran has shown that it fits, margin or not
    return max(1, int((memory.usable() - before) / per_row))
