"""`maglev serve` in a process of its own, and what tests ask of it."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import openai

from tests.processes import Process, Processes, until

NAME = "small"


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """An OpenAI error object, whole."""
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"]
        return error


@dataclass
class Running:
    process: Process
    port: int
    key: str | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(**self.options(options))

    def async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**self.options(options))

    def options(self, more: dict[str, Any]) -> dict[str, Any]:
        return {"base_url": f"{self.url}/v1", "api_key": self.key or "none", "max_retries": 0, "timeout": 60} | more

    def ask(
        self, method: str, path: str, body: Any = None, *, headers: dict[str, str] | None = None, seconds: float = 30
    ) -> Answer:
        """Plain HTTP; a body that is no bytes goes as JSON."""
        sent = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
            sent["Content-Type"] = "application/json"
        connection = HTTPConnection("127.0.0.1", self.port, timeout=seconds)
        try:
            connection.request(method, path, body, sent | (headers or {}))
            found = connection.getresponse()
            return Answer(found.status, {name.lower(): value for name, value in found.getheaders()}, found.read())
        finally:
            connection.close()

    def complete(self, **fields: Any) -> dict[str, Any]:
        answer = self.ask("POST", "/v1/completions", {"model": NAME, **fields})
        assert answer.status == 200, answer.body
        return answer.json

    def text(self, **fields: Any) -> str:
        (choice,) = self.complete(**fields)["choices"]
        return choice["text"]

    def refused(self, status: int, **fields: Any) -> dict[str, Any]:
        answer = self.ask("POST", "/v1/completions", {"model": NAME, **fields})
        assert answer.status == status, answer.body
        return answer.error

    def metric(self, name: str) -> float:
        lines = self.ask("GET", "/metrics").body.decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if re.match(rf"{name}[ {{]", line))

    def idle(self) -> bool:
        return self.metric("maglev_slots_busy") == 0 and self.metric("maglev_queued") == 0

    @property
    def resident(self) -> int:
        """Bytes of memory in use."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(re.search(r"VmRSS:\s+(\d+)", status).group(1))  # type: ignore[union-attr]


def start(processes: Processes, run: Path, sessions: Path, *options: str, key: str | None = None) -> Running:
    arguments = ["serve", str(run), "--port", "0", "--sessions", str(sessions), "--name", NAME, *options]
    if key is not None:
        file = processes.folder / "key"
        file.write_text(key + "\n")
        arguments += ["--api-key-file", str(file)]
    process = processes.start(arguments)

    def serving() -> bool:
        return "serving" in process.stderr and process.stderr.endswith("\n")

    until(serving)
    found = re.search(r"on http://127\.0\.0\.1:(\d+)$", process.stderr, re.MULTILINE)
    assert found, process.stderr
    return Running(process, int(found.group(1)), key)


@contextmanager
def serving(
    processes: Processes, run: Path, sessions: Path, *options: str, key: str | None = None
) -> Iterator[Running]:
    running = start(processes, run, sessions, *options, key=key)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.wait()
        # nothing a client does is worth a line: what is there is a fault of the server
        assert "Traceback" not in running.process.stderr, running.process.stderr
