"""Ranks of a data-parallel run: started by torchrun, or one process without a process group."""

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from maglev.errors import RequestError, WorkError
from maglev.train.meeting import LastWords, fresh_store, gather_by_store

try:
    from torch.distributed import all_gather_single
except ImportError:
    # its name before torch 2.13, where it warns
    from torch.distributed import all_gather_into_tensor as all_gather_single

# what Gloo's and NCCL's own errors have in common
TRANSPORT = re.compile("gloo|nccl|ProcessGroup", re.IGNORECASE)
TIMED_OUT = re.compile("timed?[ -]?out", re.IGNORECASE)
# and those of a GPU, also where NCCL passes them on
GPU_TROUBLE = re.compile("(CUDA|Triton|cuDNN|Frontend) (error|failure)", re.IGNORECASE)

Result = TypeVar("Result")

# of the group that this process is in
words: LastWords | None = None


class SaidElsewhere(WorkError):
    """This rank stops because another one does, and rank 0 says why. `status` is the exit status of all."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class LostRank(WorkError):
    """Another rank is gone: this one has nothing to say of its own."""


@dataclass(frozen=True)
class Ranks:
    rank: int
    world: int
    local_rank: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def start(device: str, timeout: timedelta) -> Ranks:
    """Take the place that torchrun gave this process; without torchrun it is the only rank.

    A message that takes longer than `timeout` is lost, and ends this rank.
    """
    global words
    rank, world, local_rank = read_place(os.environ)
    if world == 1:
        return Ranks(rank, world, local_rank, take_device(device, world, local_rank))
    with joining(rank, world):
        store = fresh_store(rank, world, timeout)

        def share(key: str, text: str) -> list[str]:
            return gather_by_store(store, rank, world, key, text)

        # ahead of the group, whose kind follows from the device: a rank that has none would leave the others waiting
        chosen = all_or_none(
            lambda: take_device(device, world, local_rank),
            rank,
            lambda status: [int(text) for text in share("status", str(status))],
            lambda said: share("said", said),
        )
        refuse_mixture(gather_by_store(store, rank, world, "device", chosen.type), rank)
        dist.init_process_group(
            "nccl" if chosen.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=world,
            timeout=timeout,
            device_id=chosen if chosen.type == "cuda" else None,
        )
        words = LastWords(store, rank, world)
    return Ranks(rank, world, local_rank, chosen)


@contextmanager
def joining(rank: int, world: int) -> Iterator[None]:
    try:
        yield
    except (RequestError, WorkError):
        raise
    except ValueError as error:
        raise RequestError(f"rank {rank} cannot join the others: {error}; start all of them with torchrun") from None
    except RuntimeError as error:
        raise WorkError(f"rank {rank} did not meet the other {world - 1}: {first_line(error)}") from error


def refuse_mixture(kinds: Sequence[str], rank: int) -> None:
    """Devices of one kind alone have a way to send to each other. `kinds` are those of all ranks."""
    others = [str(other) for other, kind in enumerate(kinds) if kind != kinds[0]]
    if others:
        message = (
            f"rank 0 found the device {kinds[0]}, and rank {', '.join(others)} another kind; set train.device to cpu, "
            "or see that PyTorch finds a GPU for every rank"
        )
        raise RequestError(message) if rank == 0 else SaidElsewhere(message, 2)


def stop() -> None:
    global words
    words = None
    if dist.is_initialized():
        dist.destroy_process_group()


def leave(kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
    """The end of a run, good or bad. NCCL's good end waits for the other ranks, which a failed one must not.

    A rank that fails alone says why before it goes: rank 0 learns else only that it is gone.
    """
    if words is not None and isinstance(error, Exception) and not isinstance(error, LostRank | SaidElsewhere):
        ours = isinstance(error, RequestError | WorkError)
        words.leave(str(error) if ours else f"{type(error).__name__}: {first_line(error)}")
    if kind is not None and dist.is_initialized() and dist.get_backend() == "nccl" and dist.group.WORLD is not None:
        dist.group.WORLD.abort()
    stop()


def read_place(environment: Mapping[str, str]) -> tuple[int, int, int]:
    """(rank, world, local rank) from torchrun's variables."""
    if "WORLD_SIZE" not in environment:
        return 0, 1, 0
    values = []
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        text = environment.get(name, "")
        if not text.isdigit():
            raise RequestError(
                f"WORLD_SIZE is set and {name} is {text!r}, which must be a whole number; "
                "start several processes with torchrun, or unset WORLD_SIZE for one"
            )
        values.append(int(text))
    rank, world, local_rank = values
    if rank >= world:
        raise RequestError(f"RANK is {rank}; it must be below WORLD_SIZE = {world}: start with torchrun")
    return rank, world, local_rank


def resolve_device(device: str, world: int = 1, local_rank: int = 0, setting: str = "train.device") -> torch.device:
    """`auto`, `cpu`, `cuda` (one GPU per local rank) or `cuda:N` to the device of this process.

    `setting` is what the user wrote it as.
    """
    kind, _, index = device.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (index and not (kind == "cuda" and index.isdigit())):
        raise RequestError(f"{setting} is {device!r}; it must be auto, cpu, cuda or cuda:N")
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RequestError(f"{setting} is {device!r} and PyTorch sees no CUDA GPU; set {setting} to cpu or auto")
    if index and world > 1:
        raise RequestError(
            f"{setting} is {device!r}, one GPU for {world} processes; set it to cuda, which gives each its own"
        )
    wanted, present = int(index or local_rank), torch.cuda.device_count()
    if wanted >= present:
        raise RequestError(
            f"GPU {wanted} is asked for and this machine has {present}; "
            f"use at most {present} processes per machine and GPUs 0 to {present - 1}"
        )
    return torch.device("cuda", wanted)


def take_device(device: str, world: int, local_rank: int) -> torch.device:
    chosen = resolve_device(device, world, local_rank)
    if chosen.type == "cuda":
        try:
            torch.cuda.set_device(chosen)
        except RuntimeError as error:
            raise WorkError(
                f"{chosen} cannot be used: {first_line(error)}; see with nvidia-smi whether others use it"
            ) from error
    return chosen


def rank_and_world() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


@contextmanager
def exchange() -> Iterator[None]:
    """A message that does not get through means that another rank is gone. What else fails is this rank's own trouble:
    work between messages, or a GPU, whose errors come up wherever it is waited for."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, WorkError | torch.OutOfMemoryError) or of_gpu(error) or not of_transport(error):
            raise
        late = "did not answer within train.timeout" if TIMED_OUT.search(str(error)) else "is gone"
        rank, _ = rank_and_world()
        if rank == 0 and words is not None and (said := words.found()):
            raise LostRank(said) from error
        raise LostRank(
            f"rank {rank} lost another rank, which {late}: its own last message, or torchrun's, says "
            "why; start all of them again with --resume"
        ) from error


def of_transport(error: Exception) -> bool:
    return isinstance(error, dist.DistError) or bool(TRANSPORT.search(str(error)))


def of_gpu(error: Exception) -> bool:
    return isinstance(error, torch.AcceleratorError) or bool(GPU_TROUBLE.search(str(error)))


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def together(work: Callable[[], Result]) -> Result:
    """The result of `work`, which every rank calls; where it fails on one, all stop, and rank 0 says why.

    A rank that failed alone would leave the others waiting for its next message. `work` itself sends none.
    """
    if not dist.is_initialized():
        return work()
    rank, world = rank_and_world()

    def share(status: int) -> list[float]:
        return sum_over_ranks([status * (rank == other) for other in range(world)])

    return all_or_none(work, rank, share, gather_texts)


def all_or_none(
    work: Callable[[], Result],
    rank: int,
    share: Callable[[int], Sequence[float]],
    share_text: Callable[[str], Sequence[str]],
) -> Result:
    """`share` gives this rank's exit status to the others, 0 for none yet, and returns those of all; `share_text`, in
    trouble, what this rank has to say about it."""
    results: list[Result] = []
    failure: Exception | None = None
    try:
        results.append(work())
    except Exception as error:
        failure = error
    status = 0 if failure is None else 2 if isinstance(failure, RequestError) else 1
    try:
        statuses = share(status)
    except Exception:
        # a GPU that failed sends nothing any more: why it did is what counts
        if failure is None:
            raise
        raise failure from failure.__cause__
    failed = [number for number, status in enumerate(statuses) if status]
    if not failed:
        return results[0]
    first, status = failed[0], int(statuses[failed[0]])
    try:
        said = share_text(str(failure or ""))[first]
    except Exception:
        # it stays with the rank that has it
        if failure is not None:
            raise failure from failure.__cause__
        said = "failed, and could not say why any more"
    ours = isinstance(failure, RequestError | WorkError)
    if failure is not None and rank == first and (rank == 0 or not ours):
        # a mistake of ours has a trace, which nobody else can tell
        raise failure
    if rank == 0:
        raise (RequestError if status == 2 else WorkError)(f"rank {first}: {said}") from failure
    raise SaidElsewhere(f"rank {first} failed, so rank {rank} stops too", status) from failure


def message_device() -> torch.device:
    """Where a tensor must live to be sent: NCCL moves only GPU memory."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def sum_over_ranks(values: Sequence[float]) -> list[float]:
    """Element-wise sums in float64, the same on every rank."""
    if not dist.is_initialized():
        return [float(value) for value in values]
    total = torch.tensor(values, dtype=torch.float64, device=message_device())
    with exchange():
        dist.all_reduce(total)
        return [float(value) for value in total.tolist()]


def largest_over_ranks(value: int) -> int:
    if not dist.is_initialized():
        return value
    largest = torch.tensor(value, device=message_device())
    with exchange():
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return int(largest)


def all_agree(
    fingerprint: str, what: str = "configuration", tell: Callable[[str, str], str] = lambda ours, theirs: ""
) -> None:
    """Stop every rank with a WorkError where one of them holds another `what` than rank 0; `tell` adds how two of
    them differ."""
    if not dist.is_initialized():
        return
    digest = list(hashlib.sha256(fingerprint.encode()).digest())
    mine = torch.tensor([digest], dtype=torch.uint8, device=message_device())  # (1, 32)
    rows = gather_stack(mine).tolist()
    others = [str(rank) for rank, row in enumerate(rows) if row != rows[0]]
    if others:
        texts = gather_texts(fingerprint)
        message = (
            f"ranks do not agree on the {what}: rank {', '.join(others)} differs from rank 0"
            f"{tell(texts[int(others[0])], texts[0])}; start all of them with the same command, code and data"
        )
        raise WorkError(message) if dist.get_rank() == 0 else SaidElsewhere(message, 1)


def gather_stack(share: Tensor) -> Tensor:
    """Shares of equal size, one per rank, joined in rank order along the first dimension."""
    _, world = rank_and_world()
    if world == 1:
        return share
    joined = share.new_empty(world * share.size(0), *share.shape[1:])
    with exchange():
        all_gather_single(joined, share.contiguous())
    return joined


def gather_texts(text: str) -> list[str]:
    """Of every rank, in rank order. As bytes: torch's own gathering of objects pickles them."""
    if not dist.is_initialized():
        return [text]
    content = text.encode()
    longest = largest_over_ranks(len(content))
    # the length ahead of the text: 8 bytes
    row = len(content).to_bytes(8, "big") + content.ljust(longest, b" ")
    rows = gather_stack(torch.frombuffer(bytearray(row), dtype=torch.uint8).to(message_device())[None])  # (world, 8+L)
    contents = [bytes(row.tolist()) for row in rows.cpu()]
    return [content[8 : 8 + int.from_bytes(content[:8], "big")].decode() for content in contents]
