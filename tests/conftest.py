"""What every test folder shares."""

import os
import sys
from pathlib import Path

import pytest

# Several workers run side by side; subprocesses that tests start inherit this too.
os.environ.setdefault("OMP_NUM_THREADS", "1")

REPOSITORY = Path(__file__).resolve().parent.parent


def pytest_collection_finish(session: pytest.Session) -> None:
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA GPU")


@pytest.fixture(scope="session")
def repository() -> Path:
    return REPOSITORY


@pytest.fixture(scope="session")
def shared_folder() -> Path:
    """Data and documents beside the checkout, for those who have them."""
    folder = REPOSITORY.parent / "shared"
    if not folder.is_dir():
        pytest.skip("needs ../shared beside the checkout")
    return folder
