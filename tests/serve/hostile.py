"""Requests that nobody means well: made from a seed, sent over bare sockets, broken off at random moments."""

import json
import random
import socket
from collections.abc import Callable
from typing import Any

from tests.serve.running import NAME

PATHS = [
    "/v1/sessions/..%2f..%2f..%2fetc%2fpasswd",
    "/v1/sessions/../../../etc/passwd",
    "/v1/sessions/%00",
    "/v1/sessions/" + "a" * 5000,
    "/v1/models/..%2f..%2fconfig.json",
    "//v1//completions",
    "/static/../config.json",
    "/v1/completions?prompt=a&max_tokens=-1",
    "/%ff%fe",
    "/" + "x" * 60_000,
    "*",
    "http://evil.example/",
]
VALUES: list[Any] = [
    None, True, 0, -1, 1, 17, 2**31, 2**63, -(2**63) - 1, 10**400, 1.5, -0.0, 5e-324, 1e308, "", "a", "\ud800", "\x00",
    "../../etc/passwd", "a" * 70, "${jndi:x}", "{{7*7}}", "__import__('os')", [], [[]], [None], ["a", 1], [1, "a"],
    [-1], [2**40], [[1], "a"], {}, {"a": 1}, [""] * 50, [[1]] * 50, "🧪" * 500, [True], [1.5],
]  # fmt: skip
FIELDS = [
    "model", "prompt", "max_tokens", "temperature", "top_p", "n", "stream", "stream_options", "logprobs", "echo",
    "stop", "seed", "user", "best_of", "suffix", "logit_bias", "presence_penalty", "frequency_penalty", "top_k",
    "min_p", "repetition_penalty", "session", "save_as", "__class__", "constructor", "",
]  # fmt: skip
RAW_BODIES: list[bytes] = [
    b"",
    b"{",
    b"null",
    b"[]",
    b'"text"',
    b"[" * 100_000,
    b'{"a":' * 20_000,
    b'{"model": NaN}',
    b'{"model": "small", "temperature": NaN}',
    b'{"model": "small", "temperature": 1e999}',
    b'{"model": "small", "seed": ' + b"9" * 5000 + b"}",
    b'{"model": "small", "prompt": "\\ud800"}',
    b'{"model": "small", "prompt": "\xff\xfe"}',
    b'{"model": "small", "model": "small", "prompt": "a", "prompt": "b", "max_tokens": 1}',
    b"\x00" * 1000,
    b"\xef\xbb\xbf{}",
    json.dumps({"model": NAME, "prompt": "a" * 900_000, "max_tokens": 1}).encode(),
    json.dumps({"model": NAME, "prompt": "a", "max_tokens": 1}).encode("utf-16"),
]
HEADERS = [
    "Content-Length: 5\r\nContent-Length: 6",
    "Content-Length: -5",
    "Content-Length: 99999999999999",
    "Transfer-Encoding: chunked\r\nContent-Length: 5",
    "Transfer-Encoding: gzip",
    "Content-Encoding: gzip",
    "Expect: 100-continue",
    "Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13",
    "Authorization: Basic \xff",
    "Host: a\r\nHost: b",
    "X: " + "y" * 100_000,
    "\r\n".join(f"X-{index}: y" for index in range(500)),
    "Bad Header Name: x",
    "Content-Type: application/json; charset=\xff",
    "Range: bytes=0-99999999999",
    "Cookie: " + "a=b; " * 1000,
]
METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "CONNECT", "get", "X" * 100, "GE\x00T"]
ROUTES = ["/", "/health", "/metrics", "/openapi.json", "/v1/models", "/v1/completions", "/v1/sessions/a/fork"]
BEGINNINGS = [b"", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"]


def request(method: str, path: str, body: bytes = b"", headers: str = "") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n"
    if "Content-Length" not in headers and "Transfer-Encoding" not in headers:
        head += f"Content-Length: {len(body)}\r\n"
    if "Content-Type" not in headers:
        head += "Content-Type: application/json\r\n"
    return (head + (headers + "\r\n" if headers else "") + "\r\n").encode("latin-1", "replace") + body


def mutated(chance: random.Random) -> bytes:
    """A good request with some fields that are not."""
    body: dict[str, Any] = {"model": NAME, "prompt": "a", "max_tokens": 3}
    for _ in range(chance.randint(1, 3)):
        body[chance.choice(FIELDS)] = chance.choice(VALUES)
    path = chance.choice(["/v1/completions"] * 4 + ["/v1/sessions/a/fork"])
    return request("POST", path, json.dumps(body).encode("utf-8", "surrogatepass"))


def raw_body(chance: random.Random) -> bytes:
    return request("POST", "/v1/completions", chance.choice(RAW_BODIES))


def odd_path(chance: random.Random) -> bytes:
    return request(chance.choice(METHODS), chance.choice(PATHS + ROUTES))


def odd_headers(chance: random.Random) -> bytes:
    body = json.dumps({"model": NAME, "prompt": "a", "max_tokens": 1}).encode()
    return request("POST", chance.choice(ROUTES), body, chance.choice(HEADERS))


def noise(chance: random.Random) -> bytes:
    return chance.choice(BEGINNINGS) + chance.randbytes(chance.randint(0, 300))


def flipped(chance: random.Random) -> bytes:
    """A good request with a few bytes changed."""
    sent = bytearray(mutated(chance))
    for _ in range(chance.randint(1, 8)):
        sent[chance.randrange(len(sent))] = chance.randrange(256)
    return bytes(sent)


def long_stream(chance: random.Random) -> bytes:
    """Good in itself: its client will leave in the middle."""
    body = {"model": NAME, "prompt": "a " * chance.randint(1, 200), "max_tokens": 2000, "stream": chance.random() < 0.7}
    body["n"] = chance.randint(1, 4)
    return request("POST", "/v1/completions", json.dumps(body).encode())


KINDS: list[Callable[[random.Random], bytes]] = [mutated, mutated, raw_body, odd_path, odd_headers, noise, flipped]


def attack(port: int, seed: int) -> int | None:
    """Send one. -> the status that came back, None where there was none"""
    chance = random.Random(seed)
    leaves = chance.random() < 0.25
    sent = long_stream(chance) if leaves and chance.random() < 0.5 else chance.choice(KINDS)(chance)
    if leaves and chance.random() < 0.5:
        sent = sent[: chance.randrange(len(sent) + 1)]
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        try:
            connection.sendall(sent)
            if leaves:
                connection.settimeout(chance.uniform(0.001, 0.1))
            else:
                # what is not whole is over now
                connection.shutdown(socket.SHUT_WR)
            found = connection.recv(256)
        except TimeoutError:
            assert leaves, f"no answer to attack {seed}"
            return None
        except OSError:
            return None
    parts = found.split(b" ", 2)
    return int(parts[1]) if found.startswith(b"HTTP/1.1 ") else None
