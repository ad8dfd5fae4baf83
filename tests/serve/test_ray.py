"""Two replicas under Ray Serve on one machine serve OpenAI's client as one server does."""

import inspect
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from maglev.inference.engine import LanguageModel
from tests.processes import until
from tests.results import keep_result
from tests.serve import test_client
from tests.serve.running import NAME, Running

pytestmark = pytest.mark.soak

REPLICAS = 2
TESTS = {name: test for name, test in vars(test_client).items() if name.startswith("test_")}
PASSED: list[str] = []


@pytest.fixture(scope="module")
def replicas(run: Path, repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    pytest.importorskip("ray")
    folder = tmp_path_factory.mktemp("ray")
    log = folder / "stderr"
    command = [sys.executable, "-m", "maglev", "serve", str(run), "--port", "0", "--name", NAME]
    command += ["--replicas", str(REPLICAS)]
    environment = {**os.environ, "PYTHONPATH": str(repository), "RAY_TMPDIR": "/tmp"}
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [*command, "--sessions", str(folder / "sessions")], stderr=stderr, stdout=stderr, env=environment
        )
    try:
        until(lambda: process.poll() is not None or "serving" in log.read_text(), 120)
        found = re.search(rf"{REPLICAS} replicas on http://127\.0\.0\.1:(\d+)", log.read_text())
        assert found, log.read_text()
        yield Running(cast(Any, SimpleNamespace(pid=process.pid)), int(found.group(1)))
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    if set(PASSED) == set(TESTS):
        keep_result(repository, "serve-ray", {"replicas": REPLICAS, "client_tests_passed": len(PASSED)})


@pytest.mark.parametrize("name", TESTS)
def test_the_clients_tests(name: str, replicas: Running, lm: LanguageModel) -> None:
    given = {"server": replicas, "client": replicas.client(), "lm": lm}
    TESTS[name](**{argument: given[argument] for argument in inspect.signature(TESTS[name]).parameters})
    PASSED.append(name)


def test_a_session_is_found_wherever_a_request_lands(replicas: Running) -> None:
    begun = replicas.text(prompt="Once", max_tokens=10, temperature=0, save_as="shared")
    on = {replicas.text(session="shared", max_tokens=10, temperature=0) for _ in range(12)}
    assert len(on) == 1
    assert begun + on.pop() == replicas.text(prompt="Once", max_tokens=20, temperature=0)


def test_a_session_stays_with_its_replica(replicas: Running) -> None:
    """Which has read its prompt already; sessions are spread over both."""
    client = replicas.client()

    def cached(session: str, prompt: str) -> int:
        headers = {"x-session-id": session}
        found = client.completions.create(model=NAME, prompt=prompt, max_tokens=1, extra_headers=headers)
        return found.usage.prompt_tokens_details.cached_tokens

    names = [f"session-{number}" for number in range(16)]
    for name in names:
        first, *again = (cached(name, f"{name} has a prompt of its own") for _ in range(3))
        assert first == 0 and all(again), name
    assert [cached(name, "All have the same") for name in names].count(0) == 2
