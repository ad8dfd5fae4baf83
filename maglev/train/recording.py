"""Passes as CUDA graphs: a GPU is through with the kernels of a small model before Python has asked for the next one.

A pass is asked for once more while the GPU only notes it down, then replayed from one call. Inputs and gradients keep
their places in memory; nothing else changes, results least of all.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from maglev.errors import RequestError
from maglev.objectives import Objective
from maglev.objectives.losses import Documents
from maglev.ops.graphs import capture
from maglev.train.distributed import first_line
from maglev.train.fitting import release
from maglev.train.speed import clock

# a pass before: it compiles; then so many are timed
TIMED = 2
# of a pass's time, which Python takes to ask for it: what is less, the GPU hides. Asking for LRT's at d12 takes more
# than half of their time, and the GPU is idle for 2% of it
LEAST_SHARE = 0.8
# times the size of the parameters: what has to be left beside a recorded pass, which keeps its memory to itself. The
# optimizer's stacks want some of it, which they had of the pass's
ROOM = 4


class Inputs(NamedTuple):
    """tokens and targets (B, T); `share` () float64 is the part of the step's targets that these are."""

    tokens: Tensor
    targets: Tensor
    documents: Documents
    share: Tensor

    def tensors(self) -> list[Tensor]:
        own = (self.tokens, self.targets, self.documents.attention_starts, self.documents.memory_keep, self.share)
        return [tensor for tensor in own if tensor is not None]

    def copy(self) -> "Inputs":
        starts, keep = self.documents.attention_starts, self.documents.memory_keep
        documents = Documents(*(None if each is None else each.clone() for each in (starts, keep)))
        return Inputs(self.tokens.clone(), self.targets.clone(), documents, self.share.clone())


# forward and backward; -> losses (3,) float64, by their share
Pass = Callable[[Inputs], Tensor]


@dataclass(frozen=True)
class Recording:
    inputs: Inputs
    losses: Tensor
    replay: Callable[[], None]

    def run(self, inputs: Inputs) -> Tensor:
        for own, given in zip(self.inputs.tensors(), inputs.tensors(), strict=True):
            own.copy_(given)
        self.replay()
        return self.losses


class Recorder:
    """`wanted` as in the configuration; `possible` where one process has a CUDA GPU and all of the parameters."""

    def __init__(self, objective: Objective, wanted: str, possible: bool, say: Callable[[str], None]) -> None:
        if wanted == "on" and not possible:
            raise RequestError(
                "train.graphs is on, which takes a CUDA GPU, one process and whole parameters; set it to auto"
            )
        self.objective, self.say = objective, say
        self.always, self.active = wanted == "on", possible and wanted != "off"
        # who begins a run waits for its first step; recording comes after it
        self.first_step = True
        self.forget()

    def forget(self) -> None:
        """Of passes of another shape or stage, or where gradients are no longer in their places."""
        self.recording: Recording | None = None
        self.key: tuple[object, ...] = ()
        self.passes, self.share = 0, 1.0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Passes one by one, for who wants to look into them."""
        was, self.active = self.active, False
        try:
            yield
        finally:
            self.active = was

    @property
    def holds(self) -> bool:
        """Whether gradients have to stay where they are."""
        return self.recording is not None

    @property
    def settled(self) -> bool:
        """Whether the passes to come are like the last one."""
        return not self.active or self.holds or (self.passes > TIMED and not self.pays)

    @property
    def pays(self) -> bool:
        return self.always or self.share >= LEAST_SHARE

    def run(self, inputs: Inputs, work: Pass) -> Tensor:
        if not self.active:
            return work(inputs)
        key = (inputs.tokens.shape, self.objective.stage)
        if key != self.key:
            self.forget()
            self.key = key
        if self.recording is None and self.passes > TIMED and self.pays and not self.first_step:
            self.record(inputs, work)
        if self.recording is not None:
            return self.recording.run(inputs)
        self.passes += 1
        return self.timed(inputs, work) if 1 < self.passes <= 1 + TIMED else work(inputs)

    def timed(self, inputs: Inputs, work: Pass) -> Tensor:
        """The smallest share counts: compilation too is time that Python takes."""
        device = inputs.tokens.device
        began = clock(device)
        losses = work(inputs)
        asked = time.perf_counter()
        self.share = min(self.share, (asked - began) / (clock(device) - began))
        return losses

    def record(self, inputs: Inputs, work: Pass) -> None:
        """Where it fails, training goes on without."""
        own, device = inputs.copy(), inputs.tokens.device
        needed = 0
        for parameter in self.objective.parameters():
            needed += ROOM * parameter.nbytes
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        # the graph of a pass that was compiled is in a cycle, and with it the nodes that add up gradients: met again,
        # they would run on the stream of that pass, which is not recorded
        release(device)
        why = ""
        try:
            losses, replay = capture(lambda: work(own), device)
        except Exception as error:
            why = f"{type(error).__name__}: {first_line(error)[:160]}"
        if not why and free_memory(device) < needed:
            del losses, replay
            why = "one would leave too little memory for the rest of a step"
        if why:
            self.active = False
            self.say(f"passes are not recorded: {why}")
            release(device)
            return
        self.recording = Recording(own, losses, replay)
        self.say(f"passes are recorded as CUDA graphs: asking for one took {self.share:.0%} of its time")


def free_memory(device: torch.device) -> float:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else math.inf
