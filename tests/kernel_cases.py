"""Kernel tests run in a process of their own: Triton settles at its import whether it compiles or interprets."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


def run_cases(file: str, *, interpreted: bool, limit_s: int = 280) -> None:
    """All tests of tests/`file`, on CPU tensors in the interpreter or on the GPU."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    # reading uninitialised memory is NaN under deterministic algorithms, which cuBLAS wants to be told before it starts
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    environment["TRITON_INTERPRET"] = "1" if interpreted else "0"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/{file}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit_s)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-2000:]


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """torch.empty is full of NaN, so an output that is not wholly written shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def round_like_the_gpu() -> None:
    """Triton 3.9's interpreter cuts float32 off to bfloat16, and in products takes bits of bfloat16 for integers."""
    from triton import language as tl
    from triton.runtime import interpreter

    convert, dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

    def rounded(data, source, target, mode):  # type: ignore[no-untyped-def]
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(data, source, target, mode)
        values = torch.tensor(data, dtype=torch.float32).to(torch.bfloat16)
        return values.view(torch.uint16).numpy().reshape(data.shape)

    def widened(self, a, b, d, *rest):  # type: ignore[no-untyped-def]
        a, b = (self.create_fp_ext(each, tl.float32) if each.dtype.scalar == tl.bfloat16 else each for each in (a, b))
        return dot(self, a, b, d, *rest)

    interpreter._convert_float = rounded
    interpreter.InterpreterBuilder.create_dot = widened
