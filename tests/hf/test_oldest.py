"""The oldest transformers that pyproject.toml allows passes the tests that the pinned one passes."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.results import keep_result

TESTS = ["tests/hf", "tests/evaluate/test_harness_hf.py"]
# pinned to go with another transformers
FREE = ("transformers==", "huggingface_hub==")


def oldest(repository: Path) -> str:
    extras = tomllib.loads((repository / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (wanted,) = extras["hf"]
    return wanted.removeprefix("transformers>=")


def python(*words: str, cwd: Path, first: Path | None = None) -> subprocess.CompletedProcess[str]:
    """With `first` before the environment's own packages, and without the pins of `make`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    paths = [str(path) for path in (first, cwd) if path is not None]
    environment = kept | {"PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run([sys.executable, *words], cwd=cwd, env=environment, capture_output=True, text=True)


def test_documents_name_the_oldest_release(repository: Path) -> None:
    words = f"transformers {oldest(repository)} or newer"
    for name in ("docs/huggingface.md", "maglev/auto_classes.py"):
        assert words in (repository / name).read_text(encoding="utf-8"), name


@pytest.mark.soak
def test_the_oldest_release_passes(repository: Path, tmp_path: Path) -> None:
    version, packages, pins = oldest(repository), tmp_path / "packages", tmp_path / "constraints.txt"
    lines = (repository / "constraints.txt").read_text().splitlines()
    pins.write_text("\n".join(line for line in lines if not line.startswith(FREE)))
    options = ["--quiet", "--target", str(packages), "--constraint", str(pins)]
    done = python("-m", "pip", "install", *options, f"transformers=={version}", cwd=repository)
    if done.returncode:
        pytest.skip(f"pip cannot bring transformers {version}: {done.stderr.strip().splitlines()[-1]}")
    told = "import transformers, huggingface_hub; print(transformers.__version__, huggingface_hub.__version__)"
    found = python("-c", told, cwd=repository, first=packages).stdout.split()
    assert found[0].startswith(version)
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS, cwd=repository, first=packages)
    passed = re.search(r"^(\d+) passed", done.stdout, re.MULTILINE)
    assert done.returncode == 0 and passed, done.stdout[-5000:]
    result = {"transformers": found[0], "huggingface_hub": found[1], "tests": TESTS, "passed": int(passed[1])}
    keep_result(repository, "hf-oldest", result)
