"""What the long runs found, kept for those who read the documentation."""

import os
import platform
from pathlib import Path
from typing import Any

import torch

from maglev.files import write_json


def keep_result(repository: Path, name: str, found: dict[str, Any]) -> None:
    """In results/NAME.json, with what it was measured on."""
    machine = {"cpus": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__}
    write_json(repository / "results" / f"{name}.json", {"machine": machine, **found})
