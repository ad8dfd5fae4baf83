"""Hostile requests: no 5xx, no leak, and good clients get what they always got."""

import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings, strategies
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error

from tests.processes import Processes, until
from tests.results import keep_result
from tests.serve.hostile import attack
from tests.serve.running import NAME, Running, serving

ATTACKERS = 8


def good_answers(server: Running) -> list[str]:
    return [server.text(prompt=prompt, max_tokens=12, seed=3) for prompt in ("a", "The list of all")]


def assault(server: Running, first: int, count: int) -> Counter[int | None]:
    with ThreadPoolExecutor(ATTACKERS) as pool:
        return Counter(pool.map(lambda seed: attack(server.port, seed), range(first, first + count)))


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.soak)])
def test_hostile_requests(count: int, processes: Processes, run: Path, tmp_path: Path, repository: Path) -> None:
    folder = tmp_path / "sessions"
    with serving(processes, run, folder, "--queue", "500", "--body-bytes", "200000") as server:
        expected = good_answers(server)
        # what is made at first use is no leak
        statuses = assault(server, 0, count // 3)
        until(server.idle)
        before = server.resident
        for first in range(count // 3, count, count // 3):
            statuses += assault(server, first, min(count // 3, count - first))
            assert good_answers(server) == expected
        until(server.idle)
        grown = server.resident - before
        assert server.ask("GET", "/health").json == {"status": "ok"}
    bad = [status for status in statuses if status is not None and status >= 500]
    assert not bad, statuses
    assert statuses[400] > count // 10 and statuses[200] and sum(statuses.values()) == count
    # a few attacks save sessions: nothing but those is there, and nothing beside the folder
    assert all(name.endswith(".safetensors") or name.startswith(".partial-") for name in os.listdir(folder))
    assert {path.name for path in tmp_path.iterdir()} == {"sessions", "processes"}
    assert grown < 64 << 20, f"{grown:,} bytes more"
    if count == 10_000:
        named = {str(status): number for status, number in statuses.items()}
        keep_result(repository, "serve-hostile", {"requests": count, "statuses": named, "grown_bytes": grown})


def described(server: Running, count: int) -> Counter[int]:
    """Up to so many requests for every route and method: what its description allows and what it does not. Most have
    the model's name and a session's, so that they get to the engine and to the disk."""
    statuses: Counter[int] = Counter()
    for operation in schemathesis.openapi.from_url(f"{server.url}/openapi.json").get_all_operations():
        server.complete(prompt="a", max_tokens=1, save_as="kept")

        @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
        @given(
            operation.ok().as_strategy(generation_mode=GenerationMode.NEGATIVE) | operation.ok().as_strategy(),
            strategies.sampled_from([True, True, True, False]),
        )
        def check(case: schemathesis.Case, known: bool) -> None:
            if known:
                name_what_is_there(case)
            statuses[case.call_and_validate(checks=[not_a_server_error]).status_code] += 1

        check()
    return statuses


def name_what_is_there(case: schemathesis.Case) -> None:
    names = {"model": NAME, "session": "kept", "name": "kept"}
    for part in (case.body, case.path_parameters):
        if isinstance(part, dict):
            part.update({name: value for name, value in names.items() if part.get(name)})


@pytest.mark.parametrize("count", [10, pytest.param(1000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
def test_requests_made_from_the_description(
    count: int, processes: Processes, run: Path, tmp_path: Path, repository: Path
) -> None:
    with serving(processes, run, tmp_path / "sessions", "--max-tokens", "40") as server:
        expected = good_answers(server)
        statuses = described(server, 5)
        before = server.resident
        statuses += described(server, count)
        until(server.idle)
        assert good_answers(server) == expected
        grown = server.resident - before
    requests = sum(statuses.values())
    assert requests >= 9 * count // 2 and statuses[200] and statuses[400], statuses
    assert grown < 64 << 20, f"{grown:,} bytes more"
    if count == 1000:
        named = {str(status): number for status, number in statuses.items()}
        keep_result(repository, "serve-described", {"requests": requests, "statuses": named, "grown_bytes": grown})
