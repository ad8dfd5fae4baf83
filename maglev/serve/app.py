"""The routes."""

import asyncio
import logging
from collections.abc import AsyncIterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi import Path as InPath
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp

from maglev import __version__
from maglev.inference.engine import LanguageModel
from maglev.model.accounting import full_attention_nbytes, state_nbytes
from maglev.serve.completions import ClientGone, EventStream, Exchange, while_connected
from maglev.serve.engine import Engine, Outbox
from maglev.serve.faults import Fault, json_response, too_late
from maglev.serve.guard import Guard
from maglev.serve.limits import Limits
from maglev.serve.metrics import Metrics
from maglev.serve.page import page_response
from maglev.serve.planning import check_request, make_plan
from maglev.serve.rows import memory_facts
from maglev.serve.schema import ERRORS, GIVE, CompletionRequest, ForkRequest
from maglev.serve.sessions import SESSION_NAME, Sessions
from maglev.serve.wire import session_object

log = logging.getLogger("maglev.serve")

CLIENT_GONE = 499
PLANNERS = 2
SessionName = Annotated[str, InPath(pattern=SESSION_NAME)]


@dataclass
class Server:
    """What the routes share."""

    lm: LanguageModel
    name: str
    created: int
    limits: Limits
    sessions: Sessions
    metrics: Metrics
    engine: Engine
    # a long prompt takes many times its size to tokenise, so not many at a time
    planning: Executor

    def model(self) -> dict[str, Any]:
        """OpenAI's fields, and what the page shows."""
        config, size = self.lm.decoder.config, self.lm.decoder.compute_dtype.itemsize
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "maglev",
            "max_tokens": self.limits.max_tokens,
            "state_bytes": state_nbytes(config, size),
            "full_attention_bytes_per_token": full_attention_nbytes(config, 1, size),
            "memory": memory_facts(config),
        }

    def check_model(self, name: str) -> None:
        if name != self.name:
            raise Fault(404, f"this server has the model '{self.name}' alone", param="model", code="model_not_found")

    async def complete(self, body: CompletionRequest, request: Request) -> Response:
        self.check_model(body.model)
        check_request(body, self.limits)
        start = None if body.session is None else await asyncio.to_thread(self.sessions.load, body.session)
        loop = asyncio.get_running_loop()
        plan = await loop.run_in_executor(self.planning, make_plan, body, self.lm, self.limits, start)
        exchange = Exchange(body, plan, self.lm.tokenizer, self.engine, self.sessions, self.metrics)
        exchange.begin()
        # the engine keeps the time of a request; this is for when it cannot
        longest = self.limits.seconds + self.limits.transfer_seconds
        if body.stream:
            return EventStream(exchange, longest)
        try:
            async with asyncio.timeout(longest):
                return json_response(await while_connected(request.receive, exchange.document()))
        except TimeoutError:
            raise too_late() from None
        except ClientGone:
            return Response(status_code=CLIENT_GONE)
        finally:
            exchange.end()


def create_app(
    lm: LanguageModel,
    name: str,
    folder: Path,
    limits: Limits,
    *,
    key: str | None = None,
    only_local: bool = True,
    created: int = 0,
) -> ASGIApp:
    """`folder` keeps the sessions. The engine starts and ends with the app."""
    metrics = Metrics()
    sessions = Sessions(folder, lm, limits.session_count, limits.session_days)

    @asynccontextmanager
    async def running(app: FastAPI) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()

        def post(outbox: Outbox) -> None:
            loop.call_soon_threadsafe(distribute, outbox)

        engine = Engine(lm, limits, metrics, post)
        await asyncio.to_thread(engine.start)
        with ThreadPoolExecutor(PLANNERS) as planning:
            app.state.server = Server(lm, name, created, limits, sessions, metrics, engine, planning)
            yield
        await asyncio.to_thread(engine.close)

    # the pages that FastAPI would show load scripts from elsewhere
    app = FastAPI(title="Maglev", version=__version__, lifespan=running, docs_url=None, redoc_url=None)
    app.add_exception_handler(Fault, on_fault)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http)
    add_routes(app)
    return Guard(app, limits, metrics, key, only_local)


def distribute(outbox: Outbox) -> None:
    for job, event in outbox:
        job.events.put_nowait(event)


def server_of(request: Request) -> Server:
    return request.app.state.server


def add_routes(app: FastAPI) -> None:
    page = page_response()

    @app.get("/", responses=ERRORS, response_model=None)
    async def try_it() -> Response:
        """The page to try it."""
        return page

    @app.post("/v1/completions", responses=ERRORS, response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Text that goes on from a prompt, or from a session."""
        return await server_of(request).complete(body, request)

    @app.get("/v1/models", responses=ERRORS, response_model=None)
    async def models(request: Request) -> Response:
        return json_response({"object": "list", "data": [server_of(request).model()]})

    @app.get("/v1/models/{model:path}", responses=ERRORS, response_model=None)
    async def model(model: str, request: Request) -> Response:
        server = server_of(request)
        server.check_model(model)
        return json_response(server.model())

    @app.get("/health", responses=ERRORS, response_model=None)
    async def health(request: Request) -> Response:
        alive = server_of(request).engine.alive
        return json_response({"status": "ok" if alive else "failed"}, 200 if alive else 503)

    @app.get("/metrics", responses=ERRORS, response_model=None)
    async def metrics(request: Request) -> Response:
        server = server_of(request)
        server.metrics.sessions.set(len(await asyncio.to_thread(server.sessions.all)))
        return Response(server.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    add_session_routes(app)


def add_session_routes(app: FastAPI) -> None:
    @app.get("/v1/sessions", responses=ERRORS, response_model=None)
    async def sessions(request: Request) -> Response:
        found = await asyncio.to_thread(server_of(request).sessions.all)
        return json_response({"object": "list", "data": [session_object(session) for session in found]})

    @app.get("/v1/sessions/{name}", responses=ERRORS, response_model=None)
    async def session(name: SessionName, request: Request) -> Response:
        """One of them, and how many tokens it has read and written."""
        kept = server_of(request).sessions
        found = await asyncio.to_thread(kept.find, name)
        return json_response({**session_object(found), "tokens": await asyncio.to_thread(kept.tokens, name)})

    @app.delete("/v1/sessions/{name}", responses=ERRORS, response_model=None)
    async def remove(name: SessionName, request: Request) -> Response:
        await asyncio.to_thread(server_of(request).sessions.remove, name)
        return json_response({"object": "session", "name": name, "deleted": True})

    @app.post("/v1/sessions/{name}/fork", responses=ERRORS, response_model=None)
    async def fork(name: SessionName, body: ForkRequest, request: Request) -> Response:
        """The same state under another name; the two go on independently."""
        made = await asyncio.to_thread(server_of(request).sessions.fork, name, body.to)
        return json_response(session_object(made))


async def on_fault(request: Request, error: Exception) -> Response:
    assert isinstance(error, Fault)
    return error.response()


async def on_invalid(request: Request, error: Exception) -> Response:
    """The first thing that is wrong, by its name; what was sent is not repeated."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    places = [str(place) for place in first["loc"] if place not in ("body", "path")]
    if first["type"] in ("json_invalid", "model_attributes_type", "missing") and not places:
        return Fault(400, "the body must be one JSON object, sent as application/json").response()
    param = places[0] if places and places[0].isidentifier() else None
    if param in GIVE:
        return Fault(400, f"{param}: {GIVE[param]}", param=param).response()
    where = f"{'.'.join(place for place in places if place.isidentifier() or place.isdecimal())}: " if param else ""
    return Fault(400, where + first["msg"], param=param).response()


async def on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    unknown = {404: "there is no such route; /openapi.json lists them", 405: "the route has no such method"}
    message = unknown.get(error.status_code, error.detail)
    return Fault(error.status_code, message, headers=dict(error.headers or {})).response()
