"""Rows that go on token by token: as they stand on a CPU, from CUDA graphs on a GPU, and a pool to take them from."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Protocol

import torch
from torch import Tensor

from maglev.inference.fast_step import FastDecoder, GraphStepper, bucket_for
from maglev.inference.gates import mean_gate, recorded_gates
from maglev.model.decoder import Decoder
from maglev.model.state import DecoderState

# Steppers that wait for the next text, and what their buffers may hold: those of a large batch are as large as its
# states.
KEPT = 4
KEPT_BYTES = 4 << 30
# Fewer tokens are read before a state is copied into a graph's buffers and back.
LEAST_REPLAYED = 16


class Stepper(Protocol):
    """`begin` copies a state in, `step` goes on from there; what is given out is either a copy or logits (B, V)."""

    def begin(self, state: DecoderState, *, watched: bool = False) -> None:
        """With `watched`, steps may be watched."""

    def logits(self) -> Tensor:
        """Of the tokens after the last ones read."""

    def step(self, tokens: Tensor, *, watched: bool = False) -> Tensor:
        """tokens (B,) from anywhere -> the logits after them, valid until the next step."""

    def gates(self) -> Tensor | None:
        """How far the memory gates stood open in the last step, (B,), valid until the next one. None where that was not
        watched, or where no gates let memory into keys and values."""

    def memory(self) -> Tensor:
        """Of the last tokens read, (B, D); a copy."""

    def row(self, index: int) -> DecoderState: ...

    def put(self, index: int, state: DecoderState) -> None:
        """One row of its own begins anew from a state of one row; the others go on."""

    def state(self) -> DecoderState: ...

    def end(self) -> None:
        """Nothing goes on from here: let go of what only these rows needed."""

    @property
    def nbytes(self) -> int:
        """What is still held after `end`."""


class EagerStepper:
    """Any device and precision, one operation after another."""

    running: DecoderState

    def __init__(self, steps: Decoder | FastDecoder) -> None:
        self.steps = steps
        self.open: Tensor | None = None

    def begin(self, state: DecoderState, *, watched: bool = False) -> None:
        self.running, self.open = state.clone(), None

    @torch.inference_mode()
    def logits(self) -> Tensor:
        return self.steps.readout(self.running.memory)

    @torch.inference_mode()
    def step(self, tokens: Tensor, *, watched: bool = False) -> Tensor:
        tokens = tokens.to(self.steps.device)
        self.open = self.watched_step(tokens) if watched else None
        if not watched:
            self.steps.step_(tokens, self.running)
        return self.steps.readout(self.running.memory)

    def watched_step(self, tokens: Tensor) -> Tensor | None:
        """-> the gates"""
        if isinstance(self.steps, FastDecoder):
            found: list[Tensor] = []
            self.steps.step_(tokens, self.running, found)
            return mean_gate(found)
        with recorded_gates(self.steps) as gates:
            self.steps.step_(tokens, self.running)
        return mean_gate(gates)

    def gates(self) -> Tensor | None:
        return self.open

    def memory(self) -> Tensor:
        return self.running.memory.clone()

    def row(self, index: int) -> DecoderState:
        return self.running.row(index)

    @torch.inference_mode()
    def put(self, index: int, state: DecoderState) -> None:
        self.running.put_rows_(torch.tensor([index], device=self.steps.device), state)

    def state(self) -> DecoderState:
        return self.running.clone()

    def end(self) -> None:
        vars(self).pop("running", None)
        self.open = None

    @property
    def nbytes(self) -> int:
        return 0


class Steppers:
    """The steppers of one model. Those lent at one time share weights alone; one that comes back is lent again."""

    def __init__(self, steps: Decoder | FastDecoder) -> None:
        self.steps = steps
        self.graphed = steps if isinstance(steps, FastDecoder) and steps.device.type == "cuda" else None
        # (rows it has room for, stepper), longest idle first
        self.idle: list[tuple[int, Stepper]] = []
        # a text that the garbage collector closes gives its stepper back wherever this thread is
        self.lock = RLock()

    @contextmanager
    def lend(self, rows: int) -> Iterator[Stepper]:
        room = bucket_for(rows)
        stepper = self.take(room)
        try:
            yield stepper
        finally:
            self.put_back(room, stepper)

    def put_back(self, room: int, stepper: Stepper) -> None:
        stepper.end()
        if stepper.nbytes > KEPT_BYTES:
            return
        with self.lock:
            self.idle.append((room, stepper))
            while len(self.idle) > KEPT or sum(kept.nbytes for _, kept in self.idle) > KEPT_BYTES:
                del self.idle[0]

    def release(self) -> None:
        """Let go of what waits for the next text or the next prompt."""
        with self.lock:
            self.idle.clear()
        if isinstance(self.steps, FastDecoder):
            self.steps.release()

    def take(self, room: int) -> Stepper:
        with self.lock:
            for index, (found, _) in enumerate(self.idle):
                if found == room:
                    return self.idle.pop(index)[1]
        return EagerStepper(self.steps) if self.graphed is None else GraphStepper(self.graphed, room)

    def read(self, tokens: Tensor, state: DecoderState) -> DecoderState:
        """One row through tokens (T,). -> the state after them; `state` may be rewritten."""
        if self.graphed is None or len(tokens) < LEAST_REPLAYED:
            with torch.inference_mode():
                for token in tokens:
                    self.steps.step_(token[None], state)
            return state
        with self.lend(1) as stepper:
            stepper.begin(state)
            for token in tokens:
                stepper.step(token[None])
            return stepper.state()
