"""Who is served when: turns of prompts, places in the queue, time, and steps that fail."""

import time
from collections.abc import Iterator

import pytest
import torch

from maglev.inference.engine import LanguageModel
from maglev.serve.engine import Engine, Outbox
from maglev.serve.faults import Fault
from maglev.serve.limits import Limits
from maglev.serve.metrics import Metrics
from maglev.serve.planning import make_plan
from maglev.serve.rows import Job, Piece, PromptRead
from maglev.serve.schema import CompletionRequest
from maglev.serve.slots import Slots
from tests.processes import until
from tests.serve.running import NAME

LIMITS = Limits(slots=2, queue=6, cache_bytes=1 << 20)
LONG = "a prompt of many chunks " * 20


class ByHand(Engine):
    """Advanced by the test, in its own thread; `log` has what happened."""

    def __init__(self, lm: LanguageModel, limits: Limits = LIMITS) -> None:
        self.log: list[tuple[Job, object]] = []
        super().__init__(lm, limits, Metrics(), self.log.extend)
        self.slots = Slots(lm, limits.slots)

    @property
    def alive(self) -> bool:
        return True

    def turn(self, count: int = 1) -> None:
        for _ in range(count):
            self.take_submitted()
            self.advance()
            self.flush()

    def events(self, job: Job) -> list[object]:
        return [event for own, event in self.log if own is job]

    def text(self, job: Job) -> str:
        return "".join(event.text for event in self.events(job) if isinstance(event, Piece))


def job(lm: LanguageModel, prompt: str = "a", limits: Limits = LIMITS, **fields: object) -> Job:
    body = CompletionRequest.model_validate({"model": NAME, "prompt": prompt, "seed": 1} | fields)
    (found,) = make_plan(body, lm, limits, None).jobs
    return found


@pytest.fixture
def engine(lm: LanguageModel) -> ByHand:
    return ByHand(lm)


def test_a_request_enters_at_the_next_step(engine: ByHand, lm: LanguageModel) -> None:
    first, second = job(lm, max_tokens=500), job(lm, "b", max_tokens=3)
    engine.submit([first])
    engine.turn(5)
    engine.submit([second])
    engine.turn(3)
    assert second.rows[0].finished == "length" and not first.rows[0].finished
    assert len(first.rows[0].tokens) == 8


def test_a_long_prompt_lets_streams_go_on(engine: ByHand, lm: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a chunk takes longer than a step there is one chunk between two steps."""
    stream, long = job(lm, max_tokens=500), job(lm, LONG, max_tokens=1)
    engine.submit([stream])
    engine.turn()
    engine.step_seconds = 0.0
    chunks = []
    read = engine.read_chunk
    monkeypatch.setattr(engine, "read_chunk", lambda: (chunks.append(1), read()))
    engine.submit([long])
    while not long.rows[0].finished:
        before, written = len(chunks), len(stream.rows[0].tokens)
        engine.turn()
        engine.step_seconds = 0.0
        assert len(chunks) - before == 1 and len(stream.rows[0].tokens) == written + 1
    assert len(chunks) == len(long.boundaries) > 10


def test_prompts_take_turns(engine: ByHand, lm: LanguageModel) -> None:
    """A short one is not kept waiting by a long one that came before."""
    long, short = job(lm, LONG, max_tokens=1), job(lm, max_tokens=1)
    engine.submit([long, short])
    for _ in range(3):
        engine.turn()
        engine.step_seconds = 0.0
    assert short.rows[0].finished and long.read < len(long.tokens)


def test_chunks_are_read_for_as_long_as_a_step_takes(engine: ByHand, lm: LanguageModel) -> None:
    engine.step_seconds = 60.0
    jobs = [job(lm, LONG, max_tokens=1), job(lm, LONG + "b", max_tokens=1)]
    engine.submit(jobs)
    engine.turn()
    assert all(each.rows[0].finished for each in jobs)


def test_a_known_beginning_is_not_read_again(lm: LanguageModel) -> None:
    engine = ByHand(lm)
    first = job(lm, LONG, max_tokens=5)
    engine.submit([first])
    engine.turn(60)
    again, longer = job(lm, LONG, max_tokens=5), job(lm, LONG + "and more", max_tokens=5)
    other = job(lm, "x" + LONG, max_tokens=5)
    for each in (again, longer, other):
        engine.submit([each])
        engine.turn(60)
    assert again.cached == len(again.tokens)
    assert 0 < longer.cached < len(first.tokens) and longer.cached % longer.boundaries[0].end == 0
    assert other.cached == 0
    assert engine.text(again) == engine.text(first)
    fresh = ByHand(lm, Limits(slots=2, cache_bytes=0))
    unknown = job(lm, LONG + "and more", max_tokens=5)
    fresh.submit([unknown])
    fresh.turn(60)
    assert unknown.cached == 0 and fresh.prefixes.nbytes == 0
    # the state after the prompt is the same to the bit, whether its beginning was known or not
    assert unknown.state is not None and longer.state is not None
    assert torch.equal(unknown.state.memory, longer.state.memory)
    assert fresh.text(unknown) == engine.text(longer)


def test_the_cache_keeps_to_its_bytes(lm: LanguageModel) -> None:
    size = lm.read("a").nbytes
    engine = ByHand(lm, Limits(slots=2, cache_bytes=3 * size))
    for prompt in (LONG, "a", "b"):
        engine.submit([job(lm, prompt, max_tokens=0)])
        engine.turn(60)
        assert engine.prefixes.nbytes <= 3 * size
    assert len(engine.prefixes.held) == 3


def test_a_full_queue_refuses_whole_requests(engine: ByHand, lm: LanguageModel) -> None:
    """Six may wait, and two find a free slot."""
    engine.submit([job(lm, n=5)])
    with pytest.raises(Fault) as caught:
        engine.submit([job(lm, n=2), job(lm, n=2)])
    assert caught.value.status == 429 and int(caught.value.headers["Retry-After"]) >= 1
    engine.submit([job(lm, n=3)])
    engine.turn(100)
    assert engine.queued == 0 and not engine.at_work


def test_who_leaves_is_gone_at_the_next_step(engine: ByHand, lm: LanguageModel) -> None:
    jobs = [job(lm, max_tokens=500), job(lm, LONG), job(lm, n=4, max_tokens=500)]
    engine.submit(jobs)
    engine.turn()
    engine.step_seconds = 0.0
    engine.cancel(jobs)
    engine.turn()
    assert engine.queued == 0 and not engine.at_work and engine.slots.busy == 0 and not engine.live
    seen = len(engine.log)
    engine.turn()
    assert len(engine.log) == seen


def test_time_runs_out(lm: LanguageModel) -> None:
    engine = ByHand(lm)
    writing, waiting = job(lm, n=2, max_tokens=500), job(lm, "b")
    engine.submit([writing, waiting])
    engine.turn(3)
    for each in (writing, waiting):
        each.deadline = time.monotonic() - 1
    engine.turn(2)
    # what was written so far is an answer, nothing at all is an error
    assert [row.finished for row in writing.rows] == ["length", "length"]
    fault = engine.events(waiting)[-1]
    assert isinstance(fault, Fault) and fault.status == 408
    assert engine.queued == 0 and not engine.at_work


@pytest.fixture
def started(lm: LanguageModel) -> Iterator[tuple[Engine, Outbox]]:
    log: Outbox = []
    engine = Engine(lm, LIMITS, Metrics(), log.extend)
    engine.start()
    yield engine, log
    if engine.alive:
        engine.close()


def test_a_step_that_fails_fails_its_requests_and_no_others(
    started: tuple[Engine, Outbox], lm: LanguageModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, log = started

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the machine is on fire")

    with monkeypatch.context() as patch:
        patch.setattr("maglev.serve.engine.read_", fail)
        engine.submit([job(lm)])
        until(lambda: bool(log))
    ((_, fault),) = log
    assert isinstance(fault, Fault) and fault.status == 500 and "fire" not in fault.message
    assert "on fire" in caplog.text
    assert finished(engine, log, job(lm, max_tokens=4)).tokens == 4


def test_texts_that_ended_in_a_step_that_failed_are_answered_too(
    lm: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("maglev.serve.slots.alike", lambda lm, count: False)
    engine = ByHand(lm)
    short, long = job(lm, max_tokens=1), job(lm, max_tokens=50)
    engine.submit([short, long])
    engine.step_seconds = 60.0

    def fail() -> None:
        raise RuntimeError

    monkeypatch.setattr(engine.slots.groups[1], "step", fail)
    with pytest.raises(RuntimeError):
        engine.turn()
    assert short.rows[0].finished and not any(isinstance(event, Piece) for event in engine.events(short))
    engine.start_over()
    for each in (short, long):
        fault = engine.events(each)[-1]
        assert isinstance(fault, Fault) and fault.status == 500
    assert not engine.live and not engine.at_work


def finished(engine: Engine, log: Outbox, wanted: Job) -> Piece:
    engine.submit([wanted])

    def last() -> Piece | None:
        own = [event for job, event in log if job is wanted and isinstance(event, Piece)]
        return own[-1] if own and own[-1].finished else None

    until(lambda: last() is not None)
    found = last()
    assert found is not None
    return found


def test_closing_answers_everyone(started: tuple[Engine, Outbox], lm: LanguageModel) -> None:
    engine, log = started
    jobs = [job(lm, max_tokens=100_000), job(lm, LONG)]
    engine.submit(jobs)
    until(lambda: bool(log))
    engine.close()
    faults = [event for _, event in log if isinstance(event, Fault)]
    assert {fault.status for fault in faults} == {503} and not engine.alive
    with pytest.raises(Fault):
        engine.submit([job(lm)])


def test_a_prompt_is_announced_once_it_is_read(engine: ByHand, lm: LanguageModel) -> None:
    mine = job(lm, n=2, max_tokens=1)
    engine.submit([mine])
    engine.turn(3)
    first, *rest = engine.events(mine)
    assert isinstance(first, PromptRead) and first.choices == range(2)
    assert all(isinstance(event, Piece) for event in rest) and len(rest) == 2
