"""What one server allows. Imports nothing heavy: the command line shows the defaults."""

from dataclasses import dataclass, fields

from maglev.errors import RequestError


@dataclass(frozen=True)
class Limits:
    """`slots` texts are written at a time, `queue` more may wait; the rest says how much one request may ask for."""

    slots: int = 8
    queue: int = 64
    body_bytes: int = 1 << 20
    prompt_tokens: int = 1 << 16
    max_tokens: int = 4096
    # prompts times n of one request
    choices: int = 16
    # from the end of the request's body to the last token
    seconds: float = 300.0
    # for the head to arrive, for the body after it, and for a client that reads slowly to take the rest
    transfer_seconds: float = 30.0
    session_count: int = 256
    session_days: float = 30.0
    # positions read between two steps of the texts that are being written
    chunk: int = 256
    # states of prompts that later prompts may extend
    cache_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = vars(self)[field.name], 0 if field.name in ("cache_bytes", "session_count") else 1
            if field.type is float and not 0 < value < float("inf"):
                raise RequestError(f"{option(field.name)} is {value}; it must be above 0")
            if field.type is int and value < least:
                raise RequestError(f"{option(field.name)} is {value}; it must be at least {least}")
        if self.slots > 256:
            raise RequestError(f"{option('slots')} is {self.slots}; it must be at most 256")


def option(name: str) -> str:
    return "--" + name.replace("_", "-")
