"""`maglev` in processes of its own, at the price of a fork: importing torch takes seconds, and once is enough."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Leaves out what measures the machine at every start.
WITHOUT_SPEED = "import maglev.train.loop as loop; loop.matrix_rate = lambda device, dtype: 1e12\n"
# Below those that a system gives to connections by itself: such a port would be somebody else's by the time it is used.
PORTS = range(12_000, 32_000)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    found: list[int] = []
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        if len(found) == count:
            return found
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
    raise AssertionError(f"no {count} free ports")


class Server:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "fork_server.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        self.process.communicate()


@dataclass
class Process:
    server: Server
    pid: int
    folder: Path

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def wait(self, seconds: float = 60) -> int:
        """Exit status, negative for a signal."""
        status = self.server.ask({"wait": self.pid, "seconds": seconds})["status"]
        assert status is not None, f"still running after {seconds} s: {self.stderr}"
        return status

    @property
    def stdout(self) -> str:
        return (self.folder / "stdout").read_text()

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr").read_text()

    @property
    def error(self) -> str:
        """The one line that says how it failed; remarks and progress may stand before it."""
        assert "Traceback" not in self.stderr and "Exception ignored" not in self.stderr, self.stderr
        lines = [line for line in self.stderr.splitlines() if line.startswith("maglev: ")]
        assert len(lines) == 1 and self.stderr.endswith(lines[0] + "\n"), self.stderr
        return lines[0]


@dataclass
class Processes:
    server: Server
    folder: Path
    count: int = field(default=0)

    def start(
        self,
        arguments: list[str],
        *,
        before: str = "",
        stdin: str = os.devnull,
        file_limit: int | None = None,
        **environment: Any,
    ) -> Process:
        """`before` is Python that the process runs first; `file_limit` the bytes that a file may have."""
        self.count += 1
        folder = self.folder / str(self.count)
        folder.mkdir()
        for name in ("stdout", "stderr"):
            (folder / name).touch()
        request = {
            "arguments": [str(argument) for argument in arguments],
            "before": WITHOUT_SPEED + before,
            "stdin": stdin,
            "stdout": str(folder / "stdout"),
            "stderr": str(folder / "stderr"),
            "folder": str(folder),
            "environment": {name: str(value) for name, value in environment.items()},
            "file_limit": file_limit,
        }
        return Process(self.server, self.server.ask({"start": request})["pid"], folder)

    def run(self, arguments: list[str], status: int = 0, **options: Any) -> Process:
        process = self.start(arguments, **options)
        found = process.wait()
        assert found == status, (found, process.stderr)
        return process


def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.002)


@pytest.fixture(scope="session")
def fork_server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def processes(fork_server: Server, tmp_path: Path) -> Processes:
    folder = tmp_path / "processes"
    folder.mkdir()
    return Processes(fork_server, folder)
