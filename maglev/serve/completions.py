"""One completion request from its plan to its last byte, as one document or as a stream of events."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import ExitStack
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from maglev.data.tokenizer import Tokenizer
from maglev.serve.engine import Engine
from maglev.serve.faults import Fault, json_text
from maglev.serve.metrics import Metrics
from maglev.serve.planning import Plan
from maglev.serve.rows import MEMORY_FACTS, Piece, PromptRead, TokenScore
from maglev.serve.schema import CompletionRequest
from maglev.serve.sessions import Session, Sessions
from maglev.serve.wire import Envelope, Usage, choice_object, logprobs_object, session_object

log = logging.getLogger("maglev.serve")

T = TypeVar("T")


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves first."""

    async def left() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(left())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


class Exchange:
    """A request that the engine has taken, and what goes out for it."""

    def __init__(
        self,
        body: CompletionRequest,
        plan: Plan,
        tokenizer: Tokenizer,
        engine: Engine,
        sessions: Sessions,
        metrics: Metrics,
    ) -> None:
        self.body, self.plan, self.tokenizer = body, plan, tokenizer
        self.engine, self.sessions, self.metrics = engine, sessions, metrics
        self.envelope = Envelope(body.model)
        self.usage = Usage(plan.prompt_tokens)
        self.began = time.monotonic()
        self.begun_texts = False
        # what has to be undone at the end, whichever way it comes
        self.held = ExitStack()

    def begin(self) -> None:
        """Refused where the queue or the sessions are full. Whoever begins it ends it."""
        if self.body.save_as is not None:
            self.held.enter_context(self.sessions.promise(self.body.save_as))
        try:
            self.engine.submit(self.plan.jobs)
        except BaseException:
            self.held.close()
            raise
        self.held.callback(self.engine.cancel, self.plan.jobs)

    def end(self) -> None:
        """Finished or not."""
        self.held.close()

    async def choices(self) -> AsyncIterator[tuple[dict[str, Any], Session | None]]:
        """Parts of choices as they come, each with the session that was saved with it."""
        unfinished, events = len(self.plan.prompts), self.plan.jobs[0].events
        while unfinished:
            event = await events.get()
            if isinstance(event, Fault):
                raise event
            if isinstance(event, PromptRead):
                # BOS, with which all that is cached begins, is no token of the prompt
                self.usage.cached += max(0, event.cached - 1)
                for part in self.echoes(event):
                    yield part, None
                continue
            self.usage.written[event.choice] = event.tokens
            self.note_first_text()
            unfinished -= bool(event.finished)
            session = None
            if event.state is not None and self.body.save_as is not None:
                session = await asyncio.to_thread(self.sessions.save, self.body.save_as, event.state)
            yield self.part_of(event), session

    def note_first_text(self) -> None:
        if not self.begun_texts:
            self.begun_texts = True
            self.metrics.first_token_seconds.observe(time.monotonic() - self.began)

    def echoes(self, event: PromptRead) -> list[dict[str, Any]]:
        if not self.body.echo:
            return []
        return [
            choice_object(choice, self.plan.prompts[choice].text, self.logprobs(event.scores, 0), "")
            for choice in event.choices
        ]

    def part_of(self, piece: Piece) -> dict[str, Any]:
        offset = len(self.plan.prompts[piece.choice].text) if self.body.echo else 0
        found = choice_object(piece.choice, piece.text, self.logprobs(piece.scores, offset), piece.finished)
        return {**found, **piece.watched}

    def logprobs(self, scores: list[TokenScore], offset: int) -> dict[str, Any] | None:
        return None if self.body.logprobs is None else logprobs_object(self.tokenizer, scores, offset)

    async def document(self) -> dict[str, Any]:
        """The whole answer at once."""
        whole: dict[int, dict[str, Any]] = {}
        more: dict[str, Any] = {}
        async for part, session in self.choices():
            found = whole.setdefault(part["index"], part)
            if found is not part:
                extend(found, part)
            if session is not None:
                more["session"] = session_object(session)
        return self.envelope.around([whole[index] for index in sorted(whole)], usage=self.usage.object(), **more)

    async def lines(self) -> AsyncIterator[str]:
        """Server-sent events."""
        with_usage = self.body.stream_options is not None and self.body.stream_options.include_usage
        # OpenAI's streams have the field in every part then, and a number in the last one
        empty: dict[str, Any] = {"usage": None} if with_usage else {}
        try:
            async for part, session in self.choices():
                more = empty if session is None else {**empty, "session": session_object(session)}
                yield event_line(self.envelope.around([part], **more))
            if with_usage:
                yield event_line(self.envelope.around([], usage=self.usage.object()))
        except Fault as fault:
            yield event_line(fault.content)
        yield "data: [DONE]\n\n"


def extend(whole: dict[str, Any], part: dict[str, Any]) -> None:
    """Join a later part of a choice to what came before."""
    whole["text"] += part["text"]
    whole["finish_reason"] = part["finish_reason"]
    for name in set(MEMORY_FACTS) & set(part):
        whole[name] = whole.get(name, []) + part[name]
    if part["logprobs"] is not None:
        for name, values in part["logprobs"].items():
            whole["logprobs"][name] += values


def event_line(value: dict[str, Any]) -> str:
    return f"data: {json_text(value)}\n\n"


class EventStream(Response):
    """The lines of an exchange while its client listens; it ends the exchange."""

    media_type = "text/event-stream"

    def __init__(self, exchange: Exchange, seconds: float) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.exchange, self.seconds = exchange, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            # a client that does not take what it asked for is given up in the end
            async with asyncio.timeout(self.seconds):
                await while_connected(receive, self.send_all(send))
        except (ClientGone, TimeoutError):
            pass
        finally:
            self.exchange.end()

    async def send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for line in self.exchange.lines():
            await send({"type": "http.response.body", "body": line.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
