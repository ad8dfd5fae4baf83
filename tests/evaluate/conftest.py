"""Small data and runs, made once, processes of their own, and the files of tasks."""

from pathlib import Path

import pytest

from tests.evaluate.task_files import write_tasks
from tests.processes import fork_server, processes
from tests.small_runs import data, exported, lively, other_data, trained, without_speed

__all__ = ["data", "exported", "fork_server", "lively", "other_data", "processes", "trained", "without_speed"]


@pytest.fixture(scope="session")
def tasks_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A handful of items of each task."""
    return write_tasks(tmp_path_factory.mktemp("eval"))


@pytest.fixture(scope="session")
def eval_folder(shared_folder: Path) -> Path:
    """The official splits, for those who have them."""
    folder = shared_folder / "data" / "eval"
    if not folder.is_dir():
        pytest.skip("needs ../shared/data/eval beside the checkout")
    return folder
