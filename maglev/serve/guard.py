"""What stands before every route: the host's name, the API key, the size of the body and the time it takes."""

import asyncio
import base64
import hashlib
import hmac
import ipaddress
import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from maglev.serve.faults import Fault, broken, unauthorised
from maglev.serve.limits import Limits
from maglev.serve.metrics import Metrics

log = logging.getLogger("maglev.serve")


def is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_name(header: str) -> str:
    """Without the port and the brackets of an IPv6 address."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0]


def key_sent(authorization: str) -> str:
    """Of "Bearer KEY", or the password of what a browser sends for its user; empty if there is none."""
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value.strip(), validate=True).decode().partition(":")[2]
        except ValueError:
            return ""
    return ""


def same_key(sent: str, expected: str) -> bool:
    """In a time that says nothing about the key: digests have one length, whatever was sent."""
    digests = (hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest() for key in (sent, expected))
    return hmac.compare_digest(*digests)


class Guard:
    """An ASGI app around another. `only_local` refuses names that a stranger's page could have pointed at this
    machine; a key makes that needless."""

    def __init__(self, app: ASGIApp, limits: Limits, metrics: Metrics, key: str | None, only_local: bool) -> None:
        self.app, self.limits, self.metrics = app, limits, metrics
        self.key, self.only_local = key, only_local and key is None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        status = 0

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.serve(scope, receive, noted)
        except Exception:
            # no client's doing: whatever it is, the server goes on
            log.exception("%s failed", scope["method"])
            if not status:
                await broken().response()(scope, receive, noted)
        finally:
            self.metrics.requests.labels(route_of(scope), str(status or 499)).inc()

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
            self.check(headers)
            body = await self.read_body(headers, receive)
        except Fault as fault:
            response = fault.response()
            # what is left of the body is not read, so the connection cannot be used again
            response.headers["Connection"] = "close"
            await response(scope, receive, send)
            return
        if body is None:
            return
        await self.app(scope, replay(body, receive), send)

    def check(self, headers: dict[str, str]) -> None:
        if self.only_local and not is_loopback(host_name(headers.get("host", ""))):
            raise Fault(
                403, "this server answers to names of this machine alone; set an API key to serve others", code="host"
            )
        if self.key is not None and not same_key(key_sent(headers.get("authorization", "")), self.key):
            raise unauthorised()

    async def read_body(self, headers: dict[str, str], receive: Receive) -> bytes | None:
        """All of it, or None where the client left."""
        most = self.limits.body_bytes
        too_large = Fault(413, f"the body is larger than {most:,} bytes, which is this server's limit", code="body")
        announced = headers.get("content-length", "0")
        if not announced.isdecimal() or int(announced[:20]) > most:
            raise too_large
        parts, size, more = [], 0, True
        try:
            async with asyncio.timeout(self.limits.transfer_seconds):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    part, more = message.get("body", b""), message.get("more_body", False)
                    size += len(part)
                    if size > most:
                        raise too_large
                    parts.append(part)
        except TimeoutError:
            raise Fault(408, "the body did not arrive in time", code="timeout") from None
        return b"".join(parts)


def replay(body: bytes, receive: Receive) -> Receive:
    """The body that was read already, then what else comes: that the client left."""
    sent = False

    async def again() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def route_of(scope: Scope) -> str:
    """The route's own path and not the client's: there are only so many of them."""
    route = scope.get("route")
    return getattr(route, "path", "other")
