"""The benchmarks run, and say what they are meant to say. What the times are is not a test's business."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.scripts import load_script

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "attention_cost.py"


def test_the_quick_benchmark_ends_with_json_that_holds_both_sweeps() -> None:
    command = [sys.executable, str(SCRIPT), "--quick", "--repeats", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.strip().splitlines()
    result = json.loads(lines[-1])
    assert result["benchmark"] == "attention_cost" and result["quick"] is True
    assert "blockwise" in result["kernel"] and result["kernel"] in lines
    for sweep, varied, fixed in (("by_length", "length", "window"), ("by_window", "window", "length")):
        rows = result[sweep]["rows"]
        assert len({row[varied] for row in rows}) == len(rows) >= 3
        assert len({row[fixed] for row in rows}) == 1
        assert all(row["forward_s"] > 0 and row["both_s"] > 0 for row in rows)
        assert math.isfinite(result[sweep]["exponent_forward"]) and math.isfinite(result[sweep]["exponent_both"])


def test_the_fitted_exponent_is_that_of_the_power_law() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import attention_cost as a;"
        "print([round(a.exponent([1, 2, 4, 8], [3 * s**p for s in (1, 2, 4, 8)]), 6) for p in (1, 2, 0.5)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[1.0, 2.0, 0.5]", done.stderr


def test_kernels_are_ordered_by_their_time_beside_the_best() -> None:
    pytest.importorskip("triton")
    script: Any = load_script("benchmarks/attention_gpu.py")
    # a query at position p of 4 sees p + 1 keys, or with a window of 2 at most 2
    assert script.Shape("d1", 1, 4, 1, 4).flops(1) == 10 * 128 and script.Shape("d1", 1, 4, 1, 2).flops(1) == 7 * 128
    assert script.Shape("d1", 1, 4, 1, 4, 2).flops(1) == 6 * 128
    times = {"d8": {"flex": 20, "fused": 10, "varlen": 30}, "d12": {"flex": 100, "fused": 150, "varlen": 99}}
    rows = [
        {"model": model, "rows": 1, "context": 8, "window": 2, "step": 1, "way": way, "both_us": us}
        for model, own in times.items()
        for way, us in own.items()
    ]
    rows += [row | {"window": 8, "way": "sdpa, cudnn", "both_us": 1} for row in rows]
    rows.append(rows[0] | {"step": 2, "way": "blockwise", "both_us": 0.1})
    assert script.orders(rows) == {"windowed": ["fused", "flex", "varlen"], "full": ["sdpa"]}
    assert len(script.SHAPES) == 11 and all(
        shape.window in (shape.context, shape.context // 4) for shape in script.SHAPES
    )
