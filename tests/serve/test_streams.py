"""Clients that leave, clients that do not read, too many of them, and streams beside long prompts."""

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import openai
import pytest

from tests.processes import Processes, Server, until
from tests.serve.running import NAME, Running, serving

LONG = {"model": NAME, "prompt": "a", "max_tokens": 4000, "temperature": 0}


@pytest.fixture(scope="module")
def narrow(fork_server: Server, run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One text at a time, and one more may wait."""
    folder = tmp_path_factory.mktemp("narrow")
    options = ("--slots", "1", "--queue", "1", "--transfer-seconds", "1")
    with serving(Processes(fork_server, folder), run, folder / "sessions", *options) as running:
        yield running


@contextmanager
def asking(server: Running, **fields: object) -> Iterator[socket.socket]:
    """A request on a connection of its own, which is broken off at the end."""
    body = json.dumps(LONG | fields).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        yield connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot(narrow: Running, stream: bool) -> None:
    with asking(narrow, stream=stream) as connection:
        until(lambda: narrow.metric("maglev_slots_busy") == 1)
        if stream:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
    until(narrow.idle, 5)
    written = narrow.metric("maglev_written_tokens_total")
    assert written < 4000
    time.sleep(0.05)
    assert narrow.metric("maglev_written_tokens_total") == written
    assert narrow.text(prompt="a", max_tokens=2, temperature=0) is not None


def test_a_client_that_leaves_the_queue_is_forgotten(narrow: Running) -> None:
    with asking(narrow, stream=True):
        until(lambda: narrow.metric("maglev_slots_busy") == 1)
        with asking(narrow):
            until(lambda: narrow.metric("maglev_queued") == 1)
        until(lambda: narrow.metric("maglev_queued") == 0, 5)
        assert narrow.metric("maglev_slots_busy") == 1
    until(narrow.idle, 5)


def test_a_full_queue_is_429_with_a_time_to_come_back(narrow: Running) -> None:
    with asking(narrow, stream=True), asking(narrow, stream=True):
        until(lambda: narrow.metric("maglev_slots_busy") == narrow.metric("maglev_queued") == 1)
        answer = narrow.ask("POST", "/v1/completions", LONG)
        assert answer.status == 429 and 1 <= int(answer.headers["retry-after"]) <= 60
        assert answer.error["type"] == "rate_limit_error"
        with pytest.raises(openai.RateLimitError):
            narrow.client().completions.create(model=NAME, prompt="a")
        # what is not served by the engine is not kept waiting
        assert narrow.ask("GET", "/health").status == 200
    until(narrow.idle, 5)


def test_the_clients_own_retries_get_through(narrow: Running) -> None:
    client = narrow.client(max_retries=8)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda seed: client.completions.create(model=NAME, prompt="a", seed=seed), range(4)))
    assert len(found) == 4


def test_a_client_that_does_not_read_is_given_up(processes: Processes, run: Path, tmp_path: Path) -> None:
    """Its slot is free as soon as the text is written, its connection when its time is over."""
    options = ("--seconds", "1", "--transfer-seconds", "0.5")
    with serving(processes, run, tmp_path, *options) as server:
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            deaf.connect(("127.0.0.1", server.port))
            body = json.dumps(LONG | {"stream": True, "logprobs": 20, "n": 8}).encode()
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            deaf.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            until(lambda: server.metric("maglev_slots_busy") > 0)
            until(server.idle, 10)
            until(lambda: 'route="/v1/completions"' in server.ask("GET", "/metrics").body.decode(), 10)
        assert server.text(prompt="a", max_tokens=2) is not None


def test_time_ends_a_text(processes: Processes, run: Path, tmp_path: Path) -> None:
    with serving(processes, run, tmp_path, "--seconds", "0.5") as server:
        began = time.monotonic()
        (choice,) = server.complete(prompt="a", max_tokens=4096, temperature=0)["choices"]
        assert choice["finish_reason"] == "length" and time.monotonic() - began < 5


def test_a_short_text_does_not_wait_for_a_long_one(server: Running) -> None:
    with asking(server, stream=True) as connection:
        assert connection.recv(100)
        for _ in range(3):
            server.text(prompt="a", max_tokens=5)
        assert server.metric("maglev_slots_busy") == 1
    until(server.idle, 5)


def test_a_stream_goes_on_while_a_long_prompt_is_read(server: Running) -> None:
    """In pieces, so that the longest silence is far shorter than reading all of it."""
    client = server.client()
    prompt = " and ".join(f"thing number {index}" for index in range(300))
    server.text(prompt="a", max_tokens=1)
    with ThreadPoolExecutor(1) as pool:
        stream = client.completions.create(model=NAME, prompt="a", max_tokens=4000, temperature=0, stream=True)
        next(iter(stream))
        began = time.monotonic()
        reading = pool.submit(server.text, prompt=prompt, max_tokens=1)
        times = [began]
        for _ in stream:
            times.append(time.monotonic())
            if reading.done():
                break
        took = time.monotonic() - began
        stream.close()
    longest = max(later - earlier for earlier, later in pairwise(times))
    assert len(times) > 20 and longest < took / 3, (len(times), longest, took)
    until(server.idle, 5)


def test_a_stream_is_not_to_be_buffered(server: Running) -> None:
    answer = server.ask("POST", "/v1/completions", LONG | {"stream": True, "max_tokens": 2})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-store" and "content-length" not in answer.headers
    assert answer.body.endswith(b"\n\ndata: [DONE]\n\n")
