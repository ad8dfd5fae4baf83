"""Parameters divided over the ranks by PyTorch's FSDP2; which rows of a tensor this rank holds, and how they travel.

Every tensor is divided along its first dimension, so what a rank holds of one is a range of rows.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from maglev.config import RunConfig
from maglev.model.attention import Block
from maglev.objectives import Objective
from maglev.train.distributed import Ranks, exchange, rank_and_world


def make_mesh(config: RunConfig, ranks: Ranks) -> DeviceMesh | None:
    """The ranks that parameters are divided over; None where each holds all of them. All ranks call it together."""
    if config.train.sharding == "none" or ranks.world == 1:
        return None
    with exchange():
        return init_device_mesh(ranks.device.type, (ranks.world,))


def shard(objective: Objective, mesh: DeviceMesh, compute: torch.dtype) -> None:
    """Divide the blocks one by one, then what is left: embedding, readout, scales and memory projections.

    A block's rows are gathered for each of its passes and freed after it, forward and backward. They travel in the
    precision of the computation, which is what the block's matrices would be cast to anyway; gradients are
    reduced in float32 after every pass, so that no rank ever holds them whole.
    """
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in objective.modules():
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
    # scales are used in float32, and the loss reads the readout's weight from outside: whole for the step
    whole = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    fully_shard(objective, mesh=mesh, reshard_after_forward=False, mp_policy=whole)


def is_sharded(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor)


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, not a copy of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def split_rows(rows: int, world: int) -> list[range]:
    """The rows of each rank: as equal as ranges of one size can be, the last ones shorter or empty."""
    share = -(-rows // world)
    return [range(min(rank * share, rows), min((rank + 1) * share, rows)) for rank in range(world)]


def own_rows(tensor: Tensor) -> slice:
    """Which rows of a whole tensor `local` gives."""
    if not is_sharded(tensor):
        return slice(0, tensor.shape[0] if tensor.ndim else None)
    rank, world = rank_and_world()
    rows = split_rows(tensor.shape[0], world)[rank]
    assert len(rows) == local(tensor).shape[0]
    return slice(rows.start, rows.stop)


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """The whole of a divided tensor, on every rank; all ranks call it together."""
    if not isinstance(tensor, DTensor):
        return tensor
    with exchange():
        return tensor.full_tensor()


class RowExchange:
    """Matrices of one shape (R, C), divided by rows over the ranks, to the ranks that own them, and back.

    `owned` says which of them each rank owns: neighbours, in rank order.
    """

    def __init__(self, rows: int, columns: int, owned: Sequence[range]) -> None:
        self.rank, world = rank_and_world()
        self.columns, self.owned = columns, [len(own) for own in owned]
        self.heights = [len(own) for own in split_rows(rows, world)]

    def to_owners(self, shares: Sequence[Tensor]) -> Tensor:
        """This rank's rows of all matrices -> its own matrices (owned, R, C)."""
        received = self.send(torch.cat([share.reshape(-1) for share in shares]), self.out, self.back)
        parts = received.split(self.back)
        own = self.owned[self.rank]
        return torch.cat([part.view(own, height, self.columns) for part, height in zip(parts, self.heights)], dim=1)

    def from_owners(self, matrices: Tensor) -> Tensor:
        """This rank's own matrices (owned, R, C) -> its rows of all of them (N, rows, C)."""
        parts = [part.reshape(-1) for part in matrices.split(self.heights, dim=1)]
        received = self.send(torch.cat(parts), self.back, self.out)
        return received.view(sum(self.owned), self.heights[self.rank], self.columns)

    @property
    def out(self) -> list[int]:
        """Numbers of this rank's rows that each owner gets."""
        return [own * self.heights[self.rank] * self.columns for own in self.owned]

    @property
    def back(self) -> list[int]:
        """Numbers of this rank's matrices that each rank holds."""
        return [self.owned[self.rank] * height * self.columns for height in self.heights]

    def send(self, flat: Tensor, sent: list[int], received: list[int]) -> Tensor:
        into = flat.new_empty(sum(received))
        with exchange():
            dist.all_to_all_single(into, flat, received, sent)
        return into
