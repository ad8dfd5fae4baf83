"""A small run and a server for it, started once per worker."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import maglev
from maglev.inference.engine import LanguageModel
from tests.processes import Processes, Server, fork_server, processes
from tests.serve.running import Running, serving
from tests.small_runs import Train, data, trained

__all__ = ["data", "fork_server", "processes", "trained"]


@pytest.fixture(scope="session")
def run(trained: Train) -> Path:
    return trained("maglev-shared-0.1")


@pytest.fixture(scope="session")
def lm(run: Path) -> LanguageModel:
    return maglev.load(run, device="cpu")


@pytest.fixture(scope="session")
def server(fork_server: Server, run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("server")
    with serving(Processes(fork_server, folder), run, folder / "sessions", "--queue", "200") as running:
        yield running
