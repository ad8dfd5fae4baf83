"""The gradients of a step, a micro-batch at a time, and the micro-batch that fits."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import NoReturn

import torch
from torch import Tensor

from maglev.config import RunConfig
from maglev.data.loader import Batch
from maglev.errors import WorkError
from maglev.evaluate.bpb import documents_of, upload
from maglev.objectives import Objective
from maglev.train import distributed
from maglev.train.distributed import Ranks, SaidElsewhere
from maglev.train.fitting import NO_ROW, building_kernels, find_rows, memory_of, release, smaller, sufficed
from maglev.train.optimizer import Optimizer
from maglev.train.setup import most_rows, rows_per_pass
from maglev.train.sharding import local


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

    def gradients(self, batch: Batch) -> tuple[StepLosses, int]:
        """Those of the mean over the global batch; whole ones are summed by the optimizer. -> also its targets

        Where memory runs out on a rank, all begin the step anew with smaller passes: nothing of it was applied yet.
        """
        everyone = distributed.sum_over_ranks([float((batch.targets >= 0).sum())])[0]
        asked = self.rows_per_pass
        while (sums := self.add_passes(batch, everyone)) is None:
            self.take_smaller()
        if self.rows_per_pass != asked and self.config.train.rows_per_pass:
            self.optimizer.zero_grad()
            self.fail(
                f"train.rows_per_pass is {self.config.train.rows_per_pass} and passes of {asked} rows do not fit into "
                f"the memory of {self.device}; {self.rows_per_pass} fit: set it to that, or leave it away"
            )
        return StepLosses(*sums), int(everyone)

    def add_passes(self, batch: Batch, everyone: float) -> list[float] | None:
        """The three losses and the sum of the ranks' gradient norms; None where a rank's memory did not suffice."""
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        own = [0.0] * 4

        def work() -> None:
            for first in range(0, self.rows, self.rows_per_pass):
                self.add_pass(Batch(*(array[first : first + self.rows_per_pass] for array in batch)), everyone, sums)
            # waits for the GPU: a kernel that fails late fails here, where the other ranks hear of it
            own[:] = [*sums.tolist(), self.own_gradient_norm()]

        if self.divided:
            # in the middle of a pass they wait for each other, so none may begin anew
            with distributed.exchange():
                enough = sufficed(work)
                if not enough:
                    raise WorkError(self.too_many())
        else:
            enough = distributed.together(lambda: sufficed(work))
        *found, shortages = distributed.sum_over_ranks([*own, float(not enough)])
        return None if shortages else found

    def add_pass(self, part: Batch, everyone: float, sums: Tensor) -> None:
        tokens, targets = upload(part.tokens, self.device), upload(part.targets, self.device)
        share = float((part.targets >= 0).sum()) / max(everyone, 1.0)
        # the gradients of divided parameters are averaged over the ranks: here they shall add up
        ranks = self.ranks.world if self.divided else 1
        with building_kernels(self.device):
            losses = self.objective(tokens, targets, documents_of(part, self.config.data, self.device))
            (losses.total * (share * ranks)).backward()
        means = torch.stack([losses.total, losses.next_token, losses.consistency])
        sums += means.detach().double() * share

    def too_many(self) -> str:
        fits = smaller(self.rows, self.rows_per_pass)
        if not fits:
            return NO_ROW.format(device=self.device)
        return (
            f"out of memory on {self.device} with {self.rows_per_pass} rows of {self.config.model.context} tokens per "
            f"pass; resume with --set train.rows_per_pass={fits}"
        )

    def take_smaller(self) -> None:
        self.clear()
        was, self.rows_per_pass = self.rows_per_pass, smaller(self.rows, self.rows_per_pass)
        if not self.rows_per_pass:
            self.fail(NO_ROW.format(device=self.device))
        self.say(f"out of memory with {was} rows per pass; the step begins anew with {self.rows_per_pass}")

    def fail(self, message: str) -> NoReturn:
        """All ranks come here; the first one says why."""
        raise WorkError(message) if self.ranks.is_main else SaidElsewhere(message, 1)

    def clear(self) -> None:
        self.optimizer.zero_grad()
        release(self.device)

    def fit(self, batch_of_step: Callable[[], Batch]) -> None:
        """Where the user left it open and memory can be measured: the largest micro-batch that fits."""
        memory = memory_of(self.device)
        # ranks that divide the parameters wait for each other in the middle of a pass, so none may try alone
        if memory is None or self.config.train.rows_per_pass or self.divided:
            return
        batch = distributed.together(batch_of_step)
        self.objective.progress = 1.0

        def try_pass(rows: int) -> None:
            part = Batch(*(array[:rows] for array in batch))
            self.add_pass(part, 1.0, torch.zeros(3, dtype=torch.float64, device=self.device))

        found = find_rows(self.rows, self.rows_per_pass, most_rows(self.config), memory, try_pass, self.clear)
        self.rows_per_pass = found or self.fail(NO_ROW.format(device=self.device))

    def own_gradient_norm(self) -> float:
        gradients = [local(p.grad) for p in self.objective.parameters() if p.grad is not None]
        return float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)).double()))

    def gradient_norm(self) -> float:
        """Of the sums over the ranks, which whole gradients hold only after the optimizer's step."""
        own = self.own_gradient_norm()
        return math.sqrt(distributed.sum_over_ranks([own**2])[0]) if self.divided else own
