"""The gradients of a step, a micro-batch at a time, and the micro-batch that fits."""

import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import NoReturn

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from maglev.config import RunConfig
from maglev.data.loader import Batch
from maglev.errors import WorkError
from maglev.evaluate.bpb import documents_of, upload
from maglev.objectives import Objective
from maglev.train import distributed
from maglev.train.distributed import Ranks, SaidElsewhere
from maglev.train.fitting import (
    NO_ROW,
    building_kernels,
    capacity,
    find_rows,
    largest_divisor,
    memory_of,
    release,
    smaller,
    sufficed,
)
from maglev.train.optimizer import Optimizer
from maglev.train.recording import Inputs, Recorder
from maglev.train.setup import most_rows, rows_per_pass
from maglev.train.sharding import local
from maglev.train.speed import no_collections

# divided parameters: passes of so many times fewer rows than the guess show what fits
FEWER = 4


@dataclass(frozen=True)
class StepLosses:
    """Means over the targets of the global batch, the same on every rank."""

    total: float
    next_token: float
    consistency: float
    gradient_norm: float

    @property
    def finite(self) -> bool:
        return all(map(math.isfinite, asdict(self).values()))


class Passes:
    """`rows` of a step on each rank, `rows_per_pass` at a time. `divided`: over the ranks, as the parameters are."""

    def __init__(
        self,
        config: RunConfig,
        objective: Objective,
        optimizer: Optimizer,
        ranks: Ranks,
        rows: int,
        divided: bool,
        say: Callable[[str], None],
    ) -> None:
        self.config, self.objective, self.optimizer, self.ranks = config, objective, optimizer, ranks
        self.rows, self.divided, self.say = rows, divided, say
        self.device = ranks.device
        self.rows_per_pass = rows_per_pass(config, rows, self.device)
        self.replicas: DistributedDataParallel | None = None
        possible = self.device.type == "cuda" and ranks.world == 1 and not divided
        self.recorder = Recorder(objective, config.train.graphs, possible, say)
        # the next pass compiles
        self.compiles = True

    def join(self) -> None:
        """Before the first step, on all ranks together."""
        # a guess from the memory that is free, which differs; the passes of a step are to meet
        self.rows_per_pass = -distributed.largest_over_ranks(-self.rows_per_pass)
        if self.ranks.world > 1 and not self.divided:
            self.replicas = replicate(self.objective)

    def gradients(self, batch: Batch) -> tuple[StepLosses, int]:
        """Those of the mean over the global batch, summed over the ranks. -> also its targets

        Where memory runs out on a rank before the ranks meet, all begin the step anew with smaller passes: nothing of
        it was applied yet.
        """
        everyone = distributed.sum_over_ranks([float((batch.targets >= 0).sum())])[0]
        asked = self.rows_per_pass
        while (sums := self.add_passes(batch, everyone)) is None:
            self.take_smaller()
        if self.rows_per_pass != asked and self.config.train.rows_per_pass:
            self.clear()
            self.refuse(asked, self.rows_per_pass)
        self.recorder.first_step = False
        return StepLosses(*sums), int(everyone)

    def add_passes(self, batch: Batch, everyone: float) -> list[float] | None:
        """The three losses and the gradient's norm; None where a rank's memory did not suffice.

        Ranks meet in the last backward, which sums gradients while it runs; those that divide the parameters meet in
        every block. From there on none may begin anew by itself.
        """
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        firsts = range(0, self.rows, self.rows_per_pass)
        parts = [Batch(*(array[first : first + self.rows_per_pass] for array in batch)) for first in firsts]
        last = parts.pop() if self.replicas is not None else None
        backwards: list[Callable[[], Tensor]] = []
        own = [0.0] * 4

        def read_sums() -> None:
            # waits for the GPU: a kernel that fails late fails here, where it is told
            own[:] = [*sums.tolist(), self.squared_norm()]

        def work() -> None:
            for part in parts:
                sums.add_(self.recorder.run(self.inputs(part, everyone), self.add_pass))
            if last is None:
                read_sums()
            else:
                backwards.append(self.forward(self.inputs(last, everyone)))

        def meeting() -> None:
            sums.add_(backwards.pop()())
            read_sums()

        if self.divided:
            self.meet(work)
            enough = True
        else:
            with distributed.exchange():
                enough = distributed.together(lambda: sufficed(work))
        if last is not None:
            if distributed.largest_over_ranks(not enough):
                return None
            self.meet(meeting)
        *found, squared, shortages = distributed.sum_over_ranks([*own, float(not enough)])
        return None if shortages else [*found, math.sqrt(squared)]

    def meet(self, work: Callable[[], None]) -> None:
        """Work in which ranks wait for each other."""
        with distributed.exchange():
            if not sufficed(work):
                raise WorkError(self.too_many())

    def inputs(self, part: Batch, everyone: float) -> Inputs:
        tokens, targets = upload(part.tokens, self.device), upload(part.targets, self.device)
        share = float((part.targets >= 0).sum()) / max(everyone, 1.0)
        documents = documents_of(part, self.config.data, self.device)
        return Inputs(tokens, targets, documents, torch.full((), share, dtype=torch.float64, device=self.device))

    def add_pass(self, inputs: Inputs) -> Tensor:
        """Gradients of a part, added to this rank's own. -> its three losses, by its share"""
        with nullcontext() if self.replicas is None else self.replicas.no_sync():
            with no_collections() if self.compiles else nullcontext():
                losses = self.forward(inputs)()
        self.compiles = False
        return losses

    def forward(self, inputs: Inputs) -> Callable[[], Tensor]:
        """-> its backward, which returns the losses"""
        model = self.replicas or self.objective
        with building_kernels(self.device):
            losses = model(inputs.tokens, inputs.targets, inputs.documents)

        def backward() -> Tensor:
            # gradients are averaged over the ranks: here they shall add up
            with building_kernels(self.device):
                (losses.total * (inputs.share * self.ranks.world)).backward()
            means = torch.stack([losses.total, losses.next_token, losses.consistency])
            return means.detach().double() * inputs.share

        return backward

    def too_many(self) -> str:
        fits = smaller(self.rows, self.rows_per_pass)
        if not fits:
            return NO_ROW.format(device=self.device)
        return (
            f"out of memory on {self.device} with {self.rows_per_pass} rows of {self.config.model.context} tokens per "
            f"pass; resume with --set train.rows_per_pass={fits}"
        )

    def take_smaller(self) -> None:
        # where the last forward was through, DDP waits for its backward: on some ranks, and that does not come
        joined, self.replicas = self.replicas is not None, None
        self.clear()
        if joined:
            self.replicas = replicate(self.objective)
        was, self.rows_per_pass = self.rows_per_pass, smaller(self.rows, self.rows_per_pass)
        if not self.rows_per_pass:
            self.fail(NO_ROW.format(device=self.device))
        self.say(f"out of memory with {was} rows per pass; the step begins anew with {self.rows_per_pass}")

    def refuse(self, asked: int, fits: int) -> NoReturn:
        """What the user fixed does not fit."""
        self.fail(
            f"train.rows_per_pass is {self.config.train.rows_per_pass} and passes of {asked} rows do not fit into the "
            f"memory of {self.device}; {fits} fit: set it to that, or leave it away"
        )

    def fail(self, message: str) -> NoReturn:
        """All ranks come here; the first one says why."""
        raise WorkError(message) if self.ranks.is_main else SaidElsewhere(message, 1)

    def zero_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=not self.recorder.holds)

    def clear(self) -> None:
        self.recorder.forget()
        self.optimizer.zero_grad()
        release(self.device)

    def fit(self, batch_of_step: Callable[[], Batch], kept: int = 0) -> None:
        """The largest micro-batch that fits, where memory can be measured and the user left it open. One that is fixed,
        or `kept` from before, is only tried, and that where ranks meet in a step, which could not begin anew."""
        memory, fixed = memory_of(self.device), self.config.train.rows_per_pass
        self.rows_per_pass = asked = kept or self.rows_per_pass
        if memory is None or ((fixed or kept) and self.replicas is None):
            return
        batch = distributed.together(batch_of_step)
        self.objective.progress = 1.0

        def try_pass(rows: int) -> None:
            part = Batch(*(array[:rows] for array in batch))
            self.add_pass(self.inputs(part, 1.0))

        if fixed or kept:
            enough = distributed.together(lambda: memory.peak_of(lambda: try_pass(asked)) is not None)
            self.clear()
            if not distributed.largest_over_ranks(not enough):
                return
        most = asked - 1 if fixed else most_rows(self.config)
        if self.divided:
            # one that ran out of memory in a pass would leave the others waiting: what fits follows from fewer rows
            self.rows_per_pass = few = largest_divisor(self.rows, max(1, asked // FEWER))
            able = capacity(few, memory, lambda rows: self.meet(lambda: try_pass(rows)), self.clear)
            found = largest_divisor(self.rows, min(-distributed.largest_over_ranks(-able), most))
        else:
            found = find_rows(self.rows, asked, most, memory, try_pass, self.clear) if most else 0
        if not found:
            self.fail(NO_ROW.format(device=self.device))
        if fixed:
            self.refuse(asked, found)
        self.rows_per_pass = found

    def squared_norm(self) -> float:
        """Of the gradient; the sum over the ranks is that of all of it."""
        gradients = [local(p.grad) for p in self.objective.parameters() if p.grad is not None]
        own = float(torch.stack(torch._foreach_norm(gradients)).double().square().sum())
        return own / (1 if self.divided else self.ranks.world)


def replicate(objective: Objective) -> DistributedDataParallel:
    """Every rank with all of the parameters; gradients are summed, bucket by bucket, while backward still runs."""
    with distributed.exchange(), warnings.catch_warnings():
        # what takes its place in torch 2.13 is not there before it
        warnings.simplefilter("ignore", FutureWarning)
        return DistributedDataParallel(objective, broadcast_buffers=False, gradient_as_bucket_view=True)
