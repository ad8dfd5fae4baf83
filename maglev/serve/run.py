"""The app under uvicorn."""

import asyncio
import logging
import socket as sockets
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from maglev.errors import RequestError, WorkError
from maglev.inference.engine import LanguageModel
from maglev.runs import CONFIG
from maglev.serve.app import create_app
from maglev.serve.guard import is_loopback
from maglev.serve.limits import Limits

# connections, far above what is served at a time: each costs little, and there must be an end
CONNECTIONS = 4096
SHUTDOWN_SECONDS = 10
# longer than clients and proxies keep an idle connection: whoever closes first must not be the one that is asked
IDLE_SECONDS = 75


def listen(host: str, port: int) -> sockets.socket:
    try:
        family, _, _, _, address = sockets.getaddrinfo(host, port, type=sockets.SOCK_STREAM)[0]
        socket = sockets.socket(family, sockets.SOCK_STREAM)
    except OSError as error:
        raise RequestError(f"--host {host} is no address of this machine ({error.strerror})") from None
    socket.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)
    try:
        socket.bind(address)
        socket.listen()
    except OSError as error:
        socket.close()
        raise RequestError(f"cannot listen on {host} port {port} ({error.strerror}); choose another --port") from None
    return socket


def made(run: Path) -> int:
    """When this run was begun, in seconds."""
    return int((run / CONFIG).stat().st_mtime)


def run_server(
    lm: LanguageModel,
    run: Path,
    socket: sockets.socket,
    host: str,
    limits: Limits,
    *,
    key: str | None,
    sessions: Path,
    name: str,
    say: Callable[[str], None],
) -> None:
    """Until it is interrupted or terminated."""
    local = is_loopback(host)
    app = create_app(lm, name, sessions, limits, key=key, only_local=local, created=made(run))
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    # what strangers send that is no HTTP is answered and not worth a line each
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        # whatever else is installed: these are tested
        http=partial(Connection, seconds=limits.transfer_seconds),  # type: ignore[arg-type]
        loop="asyncio",
        server_header=False,
        limit_concurrency=CONNECTIONS,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        ws="none",
    )
    if key is None and not local:
        say(f"anyone who reaches {host} can use this server; --api-key-file FILE sets a key")
    port = socket.getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    server = Announcing(config, lambda: say(f"serving {name} on http://{shown}:{port}"))
    # to be interrupted is how it ends: uvicorn hands the signal on when everything is closed
    with suppress(KeyboardInterrupt):
        server.run(sockets=[socket])
    if not server.started:
        raise WorkError("the server could not start; what stopped it stands above")


class Connection(H11Protocol):
    """A client has `seconds` for the head of a request, however slowly it comes; uvicorn itself waits without end."""

    def __init__(self, *args: Any, seconds: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seconds = seconds
        self.head: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.forget()

    def watch(self) -> None:
        """Before a head is whole, the time runs from its first byte, and from the beginning of the connection."""
        if self.conn.their_state is not h11.IDLE:
            self.forget()
        elif self.head is None:
            self.head = self.loop.call_later(self.seconds, self.timeout_keep_alive_handler)

    def forget(self) -> None:
        if self.head is not None:
            self.head.cancel()
            self.head = None


class Announcing(uvicorn.Server):
    """Says so when it answers, and not before."""

    def __init__(self, config: uvicorn.Config, announce: Callable[[], None]) -> None:
        super().__init__(config)
        self.announce = announce

    async def startup(self, sockets: list[sockets.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.announce()
