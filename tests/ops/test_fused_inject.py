"""Memory injection: its definition, and its kernels in Triton's interpreter here and on the GPU where there is one."""

import pytest
import torch

from maglev.ops import inject, reference
from tests.kernel_cases import run_cases

CASES = "ops/fused_inject_cases.py"


def test_kernels_in_the_interpreter() -> None:
    if torch.cuda.is_available():
        pytest.skip("the same cases run on the GPU")
    run_cases(CASES, interpreted=True)


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_kernels_on_the_gpu() -> None:
    run_cases(CASES, interpreted=False, limit_s=580)


def test_what_serves_a_cpu_is_the_definition() -> None:
    features = [torch.randn(2, 5, heads, 6, dtype=torch.float64) for heads in (4, 2, 2, 2, 2)]
    logits = [torch.randn(2, 5, 2, dtype=torch.float64) for _ in range(2)]
    angle = torch.randn(5, 1, 3, dtype=torch.float64)
    given = (*features[:3], angle.cos(), angle.sin(), *features[3:], *logits)
    for got, wanted in zip(inject.inject(*given), reference.inject(*given), strict=True):
        torch.testing.assert_close(got, wanted)
