"""The benchmark runs, and says what it is meant to say. What the times are is not a test's business."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from maglev.bench.decode import bytes_per_step, decode_plan, summary
from maglev.errors import RequestError
from maglev.model.decoder import Decoder
from maglev.recipes import run_config

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "decode.py"


def test_the_quick_benchmark_ends_with_json_that_holds_every_measurement() -> None:
    command = [sys.executable, str(SCRIPT), "--quick", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert result["benchmark"] == "decode" and result["quick"] is True and result["weights"] == "random"
    assert result["copy_bytes_per_s"] > 0 and result["matrix_flops"] > 0
    found = [(row["model"], row["step"], row["batch"], row["position"]) for row in result["rows"]]
    kinds = [(model, step) for model in ("swa", "maglev") for step in ("plain", "fast")]
    assert sorted(found) == sorted((*kind, batch, at) for kind in kinds for batch in (1, 3) for at in (100, 1000))
    assert all(row["ms"] > 0 and row["share_of_copy"] > 0 for row in result["rows"])
    assert len(result["summary"]) == 4 and all(each["maglev_by_swa"] > 0 for each in result["summary"])
    assert all("ring_attend" in times and len(times) == 8 for times in result["launch_us"].values())


def test_the_bytes_are_those_of_the_weights_and_the_state() -> None:
    """d20 in bfloat16: 435,159,040 numbers beside the embedding and the scales, and 52.4 MB of rings per row."""
    with torch.device("meta"):
        swa = Decoder(run_config("swa-ssss").model).bfloat16()
    per_row = 2 * 20 * 512 * 1280 * 2 + 2 * 1280 * 2 + 8
    assert bytes_per_step(swa, 3) - bytes_per_step(swa, 2) == per_row
    assert bytes_per_step(swa, 1) == 2 * (435_159_040 + 40) + per_row


def test_the_summary_has_maglev_by_swa_and_the_slowest_position_by_the_fastest() -> None:
    times = {("swa", 10): 2.0, ("swa", 20): 4.0, ("maglev", 10): 3.0, ("maglev", 20): 6.0}
    rows = [
        {"model": model, "step": "fast", "batch": 8, "position": at, "ms": ms, "share_of_copy": 1 / ms, "peak_bytes": 7}
        for (model, at), ms in times.items()
    ]
    (found,) = summary(rows)
    assert found["maglev_by_swa"] == 1.5 and found["slowest_by_fastest_position"] == {"swa": 2.0, "maglev": 2.0}
    assert found["tokens_per_s"]["swa"] == pytest.approx(8 / 3e-3) and found["peak_bytes"]["maglev"] == 7


def test_what_is_given_replaces_what_a_plan_has() -> None:
    plan = decode_plan(batches=(2,), depth=None)
    assert plan.batches == (2,) and plan.depth == 20 and plan.positions[-1] == 1_000_000 and not plan.quick


@pytest.mark.parametrize(
    "given",
    [{"batches": ()}, {"batches": (0,)}, {"batches": (1, 1 << 40)}, {"positions": (-1,)}, {"positions": (1 << 63,)}],
)
def test_sizes_out_of_range_are_refused_by_name(given: dict) -> None:
    with pytest.raises(RequestError, match=next(iter(given))):
        decode_plan(**given)
