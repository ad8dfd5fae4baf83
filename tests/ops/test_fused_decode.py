"""The decoding kernels, in Triton's interpreter here and on the GPU where there is one; and who gets them."""

import subprocess
import sys

import pytest
import torch

from maglev.errors import RequestError
from maglev.ops import decode_steps
from maglev.ops.decode_steps import Backend
from tests.kernel_cases import ROOT, run_cases

CASES = "ops/fused_decode_cases.py"
CPU = torch.device("cpu")


def test_kernels_in_the_interpreter() -> None:
    if torch.cuda.is_available():
        pytest.skip("the same cases run on the GPU")
    run_cases(CASES, interpreted=True)


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_kernels_on_the_gpu() -> None:
    run_cases(CASES, interpreted=False, limit_s=580)


def test_the_twins_serve_a_cpu() -> None:
    assert decode_steps.decode_steps(None, CPU, torch.float64) is decode_steps


@pytest.mark.parametrize(
    ("backend", "dtype", "words"),
    [
        ("cuda", torch.float32, "must be one of torch, triton"),
        ("triton", torch.float64, "float32 or bfloat16"),
        ("triton", torch.float32, "needs a CUDA GPU"),
    ],
)
def test_a_backend_that_cannot_serve_is_refused(backend: Backend, dtype: torch.dtype, words: str) -> None:
    if backend == "triton":
        pytest.importorskip("triton")
    with pytest.raises(RequestError, match=words):
        decode_steps.decode_steps(backend, CPU, dtype)


def test_the_package_does_not_need_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import importlib.util as util; find = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'triton' else find(name, *rest)\n"
        "import maglev.inference.fast_step, torch\n"
        "from maglev.ops.decode_steps import decode_steps\n"
        "decode_steps(None, torch.device('cuda'), torch.bfloat16)\n"
        "try: decode_steps('triton', torch.device('cuda'), torch.bfloat16)\n"
        "except ValueError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "needs the package triton" in done.stdout, done.stderr
