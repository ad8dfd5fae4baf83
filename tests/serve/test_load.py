"""Many streams at a time, from a second process: no error but 429, and memory that stays."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.processes import Processes, until
from tests.results import keep_result
from tests.serve.running import NAME, Running, serving

# what a server may grow by after it has been at full load once
FLAT = 48 << 20


def load(server: Running, repository: Path, streams: int, seconds: float) -> tuple[dict[str, Any], list[int]]:
    """What the clients saw, and the server's memory once in a while."""
    script = Path(__file__).parent / "load_client.py"
    command = [sys.executable, str(script), server.url, NAME, str(streams), str(seconds)]
    environment = {**os.environ, "PYTHONPATH": str(repository)}
    memory = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as clients:
        while clients.poll() is None:
            time.sleep(seconds / 20)
            memory.append(server.resident)
        assert clients.stdout is not None
        found = json.loads(clients.stdout.read())
    return found, memory


@pytest.mark.parametrize(
    ("streams", "slots", "seconds"),
    [(20, 8, 3), pytest.param(200, 64, 300, marks=[pytest.mark.soak, pytest.mark.timeout(900)])],
)
def test_many_streams(
    streams: int, slots: int, seconds: float, processes: Processes, run: Path, tmp_path: Path, repository: Path
) -> None:
    # fewer places than streams, so that some are refused
    options = ("--slots", str(slots), "--queue", str(slots), "--cache-bytes", "20000000")
    with serving(processes, run, tmp_path, *options) as server:
        expected = server.text(prompt="The list", max_tokens=20, seed=9)
        load(server, repository, streams, seconds / 10)
        before = server.resident
        found, memory = load(server, repository, streams, seconds)
        until(server.idle)
        assert server.text(prompt="The list", max_tokens=20, seed=9) == expected
    assert found["errors"] == {} and found["texts"] > streams and found["refused_429"] > 0
    assert max(memory) - before < FLAT, [before, *memory]
    if streams == 200:
        grown = {"memory_bytes": before, "largest_growth_bytes": max(memory) - before}
        keep_result(repository, "serve-load", {"slots": slots, "queue": slots, **found, **grown})
