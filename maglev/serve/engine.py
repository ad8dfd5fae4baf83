"""The one thread that computes: it reads prompts chunk by chunk between the steps of the texts that are being written.

A request enters at the next step, prompts take turns chunk by chunk, and who leaves frees its slot.
"""

import logging
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable
from operator import attrgetter

import torch

from maglev.inference.engine import LanguageModel
from maglev.inference.reading import read_
from maglev.inference.state import State
from maglev.serve.faults import Fault, broken, too_busy, too_late
from maglev.serve.limits import Limits
from maglev.serve.metrics import Metrics
from maglev.serve.prefixes import Prefixes
from maglev.serve.rows import Event, Job, PromptRead, score_prompt
from maglev.serve.slots import Slots

log = logging.getLogger("maglev.serve")

Outbox = list[tuple[Job, Event]]
LONGEST_RETRY = 60
# how fast the mean duration of a text follows the last ones
FOLLOWING = 0.1


class Engine:
    """`submit` from any thread; `post` gets what came of it, called in the engine's thread, once per step."""

    def __init__(self, lm: LanguageModel, limits: Limits, metrics: Metrics, post: Callable[[Outbox], None]) -> None:
        self.lm, self.limits, self.metrics, self.post = lm, limits, metrics, post
        self.prefixes = Prefixes(limits.cache_bytes)
        # guards what follows up to `thread`
        self.changed = threading.Condition()
        self.submitted: deque[Job] = deque()
        self.queued = 0
        self.closing = False
        self.mean_seconds = 1.0
        self.thread = threading.Thread(target=self.run, name="maglev-engine", daemon=True)
        self.ready = threading.Event()
        self.failure: BaseException | None = None
        # of the engine's thread alone; `live` are the jobs whose last event is not sent
        self.live: set[Job] = set()
        self.waiting: deque[Job] = deque()
        self.reading: deque[Job] = deque()
        self.placing: deque[Job] = deque()
        self.outbox: Outbox = []
        self.step_seconds = 0.0

    def start(self) -> None:
        """Until the slots are there and their graphs captured."""
        self.thread.start()
        self.ready.wait()
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        with self.changed:
            self.closing = True
            self.changed.notify()
        self.thread.join()

    @property
    def alive(self) -> bool:
        return self.thread.is_alive() and not self.closing

    def submit(self, jobs: list[Job]) -> None:
        """All jobs of a request, or none where the queue cannot hold them."""
        rows = sum(len(job.rows) for job in jobs)
        with self.changed:
            if not self.alive:
                raise Fault(503, "the server is shutting down", code="shutting_down")
            # those that find a free slot do not wait for long
            if self.queued + rows > self.limits.queue + self.slots.free:
                raise too_busy(self.retry_after())
            self.queued += rows
            self.submitted += jobs
            self.changed.notify()

    def cancel(self, jobs: Iterable[Job]) -> None:
        """Their client is gone: the next step is without them."""
        with self.changed:
            for job in jobs:
                job.cancelled = True
            self.changed.notify()

    def retry_after(self) -> int:
        """Seconds until the queue has moved on by a round of the slots, by how long texts took lately."""
        rounds = self.queued / self.limits.slots
        return max(1, min(LONGEST_RETRY, round(self.mean_seconds * rounds)))

    def run(self) -> None:
        try:
            self.slots = Slots(self.lm, self.limits.slots)
            self.metrics.slots.set(len(self.slots))
        except BaseException as error:
            self.failure = error
            return
        finally:
            self.ready.set()
        while self.next_jobs():
            try:
                self.advance()
            except Exception:
                log.exception("a step failed; the requests it was for are answered with an error")
                self.start_over()
            self.flush()
        self.fail_all(Fault(503, "the server is shutting down", code="shutting_down"))
        self.flush()
        self.slots.close()

    def next_jobs(self) -> bool:
        """Wait until there is work. -> False at the end"""
        with self.changed:
            while not (self.closing or self.submitted or self.at_work):
                self.changed.wait()
            self.take_submitted()
            return not self.closing

    def take_submitted(self) -> None:
        self.live.update(self.submitted)
        self.waiting += self.submitted
        self.submitted.clear()

    @property
    def at_work(self) -> bool:
        return bool(self.waiting or self.reading or self.placing or self.slots.busy)

    def advance(self) -> None:
        """A turn of reading, then one step of all texts."""
        self.drop_lost()
        self.read_some()
        if self.slots.busy:
            began = time.monotonic()
            self.metrics.written_tokens.inc(self.slots.busy)
            for job, piece in self.slots.step():
                self.send(job, piece)
                if piece.finished:
                    self.finish(job)
            self.step_seconds = time.monotonic() - began
            self.metrics.step_seconds.observe(self.step_seconds)
        self.metrics.busy.set(self.slots.busy)
        self.metrics.queued.set(self.queued)

    def read_some(self) -> None:
        """A chunk, and more of them as long as that takes no longer than a step of the texts that wait meanwhile."""
        until = time.monotonic() + self.step_seconds
        self.begin_reading()
        while self.reading:
            self.read_chunk()
            self.place()
            if time.monotonic() >= until:
                break
            self.begin_reading()
        self.place()

    def drop_lost(self) -> None:
        """Jobs whose client left, and those that are out of time."""
        now = time.monotonic()
        for job, row in self.slots.writing():
            if now > job.deadline and not job.cancelled:
                # what there is so far is an answer: it ends at the next token
                row.max_tokens = min(row.max_tokens, len(row.tokens) + 1)
        for jobs in (self.waiting, self.reading, self.placing):
            for job in [job for job in jobs if job.cancelled or now > job.deadline]:
                jobs.remove(job)
                self.leave_queue(len(job.waiting) or len(job.rows))
                if not job.cancelled:
                    self.send(job, too_late())
                    job.cancelled = True
        for job in [job for job in self.live if job.cancelled]:
            self.slots.drop(job)
            self.live.remove(job)

    def begin_reading(self) -> None:
        """As many prompts as slots will be free for."""
        while self.waiting and len(self.reading) + len(self.placing) < self.slots.free:
            job = self.waiting.popleft()
            job.waiting.extend(job.rows)
            job.began = time.monotonic()
            if job.start is not None:
                job.state = job.start.clone()
            elif job.prompt_top is None:
                job.read, job.state = self.prefixes.longest(job.boundaries)
                job.cached = job.read
                self.metrics.cached_tokens.inc(job.cached)
            if job.state is None:
                job.state = State(self.lm.decoder.initial_state(1), self.lm.fingerprint)
            self.reading.append(job)

    def read_chunk(self) -> None:
        """The next chunk of the prompt whose turn it is."""
        job = self.reading.popleft()
        assert job.state is not None
        if job.read < len(job.tokens):
            end, key = job.boundaries[bisect_right(job.boundaries, job.read, key=attrgetter("end"))]
            self.read_tokens(job, job.state, end)
            if job.start is None:
                self.prefixes.keep(key, job.state)
        if job.read < len(job.tokens):
            self.reading.append(job)
            return
        self.send(job, PromptRead(job.choices, job.prompt_scores, job.cached))
        self.placing.append(job)

    def read_tokens(self, job: Job, state: State, end: int) -> None:
        part = job.tokens[job.read : end]
        before = [state.memory[:, None]] if state.position else []
        memories: list[torch.Tensor] | None = None if job.prompt_top is None else []
        ids = torch.tensor([part], device=self.lm.decoder.device)
        state.reading = read_(self.lm.reader, ids, state.inner, memories=memories)
        self.metrics.read_tokens.inc(len(part))
        if memories is not None and job.prompt_top is not None:
            # what stands before the first token of a document is nothing: BOS itself has no logprob
            scored = part if before else part[1:]
            memory = torch.cat([*before, *memories], dim=1)[0, : len(scored)]
            with torch.inference_mode():
                logits = self.lm.decoder.readout(memory).cpu()
            first = len(job.prompt_scores)
            offsets = job.prompt_offsets[first : first + len(scored)]
            job.prompt_scores += score_prompt(logits, scored, job.prompt_top, offsets)
        job.read = end

    def place(self) -> None:
        """Rows whose prompt is read into free slots; those that shall write nothing are done."""
        while self.placing and self.slots.free:
            job = self.placing[0]
            assert job.state is not None
            row = job.waiting.popleft()
            self.leave_queue(1)
            if row.max_tokens:
                self.slots.put(job, row, job.state)
            else:
                row.finished = "length"
                piece = row.piece(job.state.clone() if job.wants_state else None)
                assert piece is not None
                self.send(job, piece)
                self.finish(job)
            if not job.waiting:
                self.placing.popleft()

    def finish(self, job: Job) -> None:
        """One of its texts is done."""
        seconds = time.monotonic() - job.began
        with self.changed:
            self.mean_seconds += FOLLOWING * (seconds - self.mean_seconds)
        if not job.waiting and all(row.finished for row in job.rows):
            self.live.discard(job)

    def leave_queue(self, rows: int) -> None:
        with self.changed:
            self.queued -= rows

    def send(self, job: Job, event: Event) -> None:
        self.outbox.append((job, event))

    def flush(self) -> None:
        if self.outbox:
            found, self.outbox = self.outbox, []
            self.post(found)

    def fail_all(self, fault: Fault) -> None:
        with self.changed:
            self.take_submitted()
            self.queued = 0
        for job in self.live:
            self.send(job, fault)
            self.slots.drop(job)
        for jobs in (self.live, self.waiting, self.reading, self.placing):
            jobs.clear()

    def start_over(self) -> None:
        """What a step left half-done is thrown away, and every row with it."""
        self.fail_all(broken())
        self.flush()
        self.prefixes = Prefixes(self.limits.cache_bytes)
        self.slots.close()
        self.slots = Slots(self.lm, self.limits.slots)
