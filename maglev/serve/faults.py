"""What is answered where a request cannot be served: OpenAI's error objects."""

import json
from typing import Any

from starlette.responses import Response

REALM = 'Basic realm="maglev", charset="UTF-8"'


class Fault(Exception):
    """An HTTP status with the error object that OpenAI's clients turn into exceptions."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}

    @property
    def content(self) -> dict[str, Any]:
        error = {"message": self.message, "type": kind_of(self.status), "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> Response:
        return json_response(self.content, self.status, self.headers)


def kind_of(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def json_text(value: Any) -> str:
    """ASCII alone: what a client sent may hold characters that UTF-8 cannot carry."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json_text(value), status, headers, media_type="application/json")


def unauthorised() -> Fault:
    return Fault(
        401,
        "wrong or missing API key; send 'Authorization: Bearer KEY'",
        code="invalid_api_key",
        # a browser asks for a password then: the page at / works with a key as well
        headers={"WWW-Authenticate": REALM},
    )


def too_busy(seconds: int) -> Fault:
    return Fault(
        429,
        f"all slots are busy and the queue is full; try again in {seconds} s",
        code="queue_full",
        headers={"Retry-After": str(seconds)},
    )


def too_late() -> Fault:
    return Fault(408, "the request took longer than this server allows; ask for less", code="timeout")


def broken() -> Fault:
    return Fault(500, "the server failed at this request; its log says why", code="internal_error")
