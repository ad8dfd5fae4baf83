"""Rows that write, each in a slot of its own, in batches that never change their size.

A sum of floats depends on the order it is added up in, and that on the size of a batch and, in some kernels, on the
place of a row in it. A text shall not depend on who else is writing, so every step has the same rows, whether they are
in use or not, and as many as this machine was seen to compute alike.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from maglev.inference.batch import draw
from maglev.inference.engine import LanguageModel
from maglev.inference.fast_step import BUCKETS
from maglev.inference.reading import relative_changes
from maglev.inference.state import State
from maglev.inference.stepper import Stepper
from maglev.serve.rows import Job, Piece, ServedRow

# rows that are computed differently have shown it in every second to every sixth step
PROBE_STEPS = 64


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """On a CPU, threads divide a step's rows among them, and each adds up in an order of its own."""
    before = torch.get_num_threads()
    if device.type != "cpu" or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def alike(lm: LanguageModel, count: int) -> bool:
    """Whether a step of so many rows that hold the same computes the same in all of them, to the bit."""
    vocabulary = lm.decoder.config.vocab_size
    tokens = torch.randint(vocabulary, (PROBE_STEPS,), generator=torch.Generator().manual_seed(0))
    with lm.steppers.lend(count) as stepper, one_thread(lm.decoder.device):
        stepper.begin(lm.decoder.initial_state(count))
        for token in tokens:
            logits = stepper.step(token.repeat(count))
            if not all(same_rows(found) for found in (logits, stepper.memory())):
                return False
        return same_rows(stepper.logits())


def same_rows(rows: Tensor) -> bool:
    return torch.equal(rows, rows[:1].expand_as(rows))


def rows_alike(lm: LanguageModel, most: int) -> int:
    """The largest bucket, at most the one that holds `most`, whose rows are computed alike."""
    largest = min(bucket for bucket in BUCKETS if bucket >= most)
    return next(count for count in reversed(BUCKETS) if count <= largest and (count == 1 or alike(lm, count)))


class Group:
    """Slots that are stepped together."""

    def __init__(self, lm: LanguageModel, stepper: Stepper, size: int) -> None:
        self.lm, self.stepper = lm, stepper
        self.jobs: list[Job | None] = [None] * size
        self.rows: list[ServedRow | None] = [None] * size
        # rows that have read nothing here yet: their first token comes from the state they brought
        self.fresh: list[int] = []
        stepper.begin(lm.decoder.initial_state(size), watched=lm.decoder.config.tells_gates)
        self.logits = stepper.logits()

    @property
    def busy(self) -> int:
        return sum(row is not None for row in self.rows)

    def put(self, slot: int, job: Job, row: ServedRow, state: State) -> None:
        self.jobs[slot], self.rows[slot] = job, row
        self.stepper.put(slot, state.inner)
        self.fresh.append(slot)

    def free(self, slot: int) -> None:
        self.jobs[slot] = self.rows[slot] = None
        if slot in self.fresh:
            self.fresh.remove(slot)

    @torch.inference_mode()
    def current_logits(self) -> Tensor:
        """(slots, V), for the next draw."""
        if self.fresh:
            self.logits = self.logits.clone()
            self.logits[self.fresh] = self.stepper.logits()[self.fresh]
            self.fresh.clear()
        return self.logits

    def step(self) -> list[tuple[Job, Piece]]:
        """One token for every row. Rows that end leave their slots."""
        tokens = draw(self.lm, self.rows, self.current_logits())
        # the end of a document is drawn and not read
        states = self.states_of("end")
        watched = {slot: row for slot, row in enumerate(self.rows) if row and row.watched and row.finished != "end"}
        before = self.stepper.memory() if watched else None
        self.logits = self.stepper.step(torch.tensor(tokens), watched=bool(watched))
        if before is not None:
            self.note(watched, before)
        states |= self.states_of("stop", "length")
        found = []
        for slot, (job, row) in enumerate(zip(self.jobs, self.rows)):
            if job is None or row is None:
                continue
            piece = row.piece(states.get(slot))
            if piece is not None:
                found.append((job, piece))
            if row.finished:
                self.free(slot)
        return found

    def note(self, watched: dict[int, ServedRow], before: Tensor) -> None:
        """||m_t - m_{t-1}|| / ||m_t|| and the mean gate, for those that asked. before (B, D)"""
        found = {"memory_change": relative_changes(before[:, None], self.stepper.memory()[:, None]).tolist()}
        gates = self.stepper.gates()
        if gates is not None:
            found["memory_gate"] = gates.tolist()
        for slot, row in watched.items():
            for name, values in row.watched.items():
                values.append(found[name][slot])

    def states_of(self, *endings: str) -> dict[int, State]:
        return {
            slot: State(self.stepper.row(slot), self.lm.fingerprint)
            for slot, (job, row) in enumerate(zip(self.jobs, self.rows))
            if job is not None and row is not None and job.wants_state and row.finished in endings
        }


class Slots:
    """At least `count` of them, in groups of rows that are computed alike."""

    def __init__(self, lm: LanguageModel, count: int) -> None:
        self.device = lm.decoder.device
        self.lending = ExitStack()
        size = rows_alike(lm, count)
        with one_thread(self.device):
            self.groups = [
                Group(lm, self.lending.enter_context(lm.steppers.lend(size)), size) for _ in range(-(-count // size))
            ]

    def __len__(self) -> int:
        return sum(len(group.rows) for group in self.groups)

    @property
    def busy(self) -> int:
        return sum(group.busy for group in self.groups)

    @property
    def free(self) -> int:
        return len(self) - self.busy

    def put(self, job: Job, row: ServedRow, state: State) -> None:
        """Into a slot that is free, in the fullest group that has one: an idle group costs nothing."""
        group = max((group for group in self.groups if group.busy < len(group.rows)), key=lambda group: group.busy)
        group.put(group.rows.index(None), job, row, state)

    def step(self) -> list[tuple[Job, Piece]]:
        with one_thread(self.device):
            return [found for group in self.groups if group.busy for found in group.step()]

    def writing(self) -> list[tuple[Job, ServedRow]]:
        return [
            (job, row)
            for group in self.groups
            for job, row in zip(group.jobs, group.rows)
            if job is not None and row is not None
        ]

    def drop(self, job: Job) -> None:
        """Free what this job holds."""
        for group in self.groups:
            for slot, own in enumerate(group.jobs):
                if own is job:
                    group.free(slot)

    def close(self) -> None:
        self.lending.close()
