"""Windowed attention: its kernels in Triton's interpreter here and on the GPU where there is one."""

import pytest
import torch

from tests.kernel_cases import run_cases

CASES = "ops/fused_attention_cases.py"


def test_kernels_in_the_interpreter() -> None:
    if torch.cuda.is_available():
        pytest.skip("the same cases run on the GPU")
    run_cases(CASES, interpreted=True)


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_kernels_on_the_gpu() -> None:
    run_cases(CASES, interpreted=False, limit_s=580)
