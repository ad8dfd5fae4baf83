"""The benchmark runs, and says what it is meant to say. What the times are is not a test's business."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "decode.py"


def test_the_quick_benchmark_ends_with_json_that_holds_every_measurement() -> None:
    command = [sys.executable, str(SCRIPT), "--quick", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert result["benchmark"] == "decode" and result["quick"] is True
    assert result["copy_bytes_per_s"] > 0 and result["matrix_flops"] > 0
    found = [(row["model"], row["step"], row["batch"], row["position"]) for row in result["rows"]]
    kinds = [(model, step) for model in ("swa", "maglev") for step in ("plain", "fast")]
    assert sorted(found) == sorted((*kind, batch, at) for kind in kinds for batch in (1, 3) for at in (100, 1000))
    assert all(row["ms"] > 0 and row["share_of_copy"] > 0 for row in result["rows"])
    assert len(result["summary"]) == 4 and all(each["maglev_by_swa"] > 0 for each in result["summary"])
    assert all("ring_attend" in times and len(times) == 8 for times in result["launch_us"].values())


def test_the_bytes_are_those_of_the_weights_and_the_state() -> None:
    """d20 in bfloat16: 435,159,040 numbers beside the embedding and the scales, and 52.4 MB of rings per row."""
    code = (
        f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import decode, torch;"
        "from maglev.model.decoder import Decoder; from maglev.recipes import run_config\n"
        "with torch.device('meta'): swa = Decoder(run_config('swa-ssss').model).bfloat16()\n"
        "print(decode.bytes_per_step(swa, 3) - decode.bytes_per_step(swa, 2), decode.bytes_per_step(swa, 1))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    per_row = 2 * 20 * 512 * 1280 * 2 + 2 * 1280 * 2 + 8
    weights = 2 * (435_159_040 + 40)
    assert done.stdout.split() == [str(per_row), str(weights + per_row)], done.stderr
