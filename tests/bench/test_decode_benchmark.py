"""The benchmark runs, and says what it is meant to say. What the times are is not a test's business."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from maglev.bench.decode import bytes_per_step, decode_plan, summary
from maglev.bench.models import QUICK, random_decoder
from maglev.errors import RequestError
from maglev.inference.fast_step import FastDecoder
from maglev.model.decoder import Decoder
from maglev.ops.matrix import Matrix
from maglev.recipes import run_config

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "decode.py"


def matrices(fast: FastDecoder) -> list[Matrix]:
    parts = [part for layer in fast.layers for part in layer] + [fast.readout_weight, fast.memory_weight]
    return [part for part in parts if isinstance(part, Matrix)]


def test_the_quick_benchmark_ends_with_json_that_holds_every_measurement() -> None:
    command = [sys.executable, str(SCRIPT), "--quick", "--device", "cpu", "--weights", "plain,int8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert result["benchmark"] == "decode" and result["quick"] is True and result["weights"] == "random"
    assert result["copy_bytes_per_s"] > 0 and result["matrix_flops"] > 0
    names = ("model", "step", "weight_format", "batch", "position")
    found = [tuple(row[name] for name in names) for row in result["rows"]]
    ways = (("plain", "plain"), ("fast", "plain"), ("fast", "int8"))
    kinds = [(model, *way) for model in ("swa", "maglev") for way in ways]
    assert sorted(found) == sorted((*kind, batch, at) for kind in kinds for batch in (1, 3) for at in (100, 1000))
    assert all(row["ms"] > 0 and row["share_of_copy"] > 0 for row in result["rows"])
    assert len(result["summary"]) == 6 and all(each["maglev_by_swa"] > 0 for each in result["summary"])
    assert "swa, batch 3" in result["launch_us"] and "maglev, batch 1, int8" in result["launch_us"]
    assert all("ring_attend" in times and len(times) == 8 for times in result["launch_us"].values())


def test_the_bytes_are_those_of_the_weights_and_the_state() -> None:
    """d20 in bfloat16: 435,159,040 numbers beside the embedding and the scales, and 52.4 MB of rings per row."""
    with torch.device("meta"):
        swa = Decoder(run_config("swa-ssss").model).bfloat16()
    per_row = 2 * 20 * 512 * 1280 * 2 + 2 * 1280 * 2 + 8
    assert bytes_per_step(swa, 3) - bytes_per_step(swa, 2) == per_row
    assert bytes_per_step(swa, 1) == 2 * (435_159_040 + 40) + per_row


@pytest.mark.parametrize("recipe", ["swa-ssss", "maglev-shared-0.1"])
def test_the_bytes_of_other_weights_are_those_that_are_stored(recipe: str) -> None:
    config = run_config(recipe, 2, QUICK).model
    decoder = random_decoder(config, torch.device("cpu"), torch.bfloat16)
    plain, fast = bytes_per_step(decoder, 3), {w: FastDecoder(decoder, "torch", w) for w in ("plain", "int8", "fp8")}
    size = {weights: bytes_per_step(decoder, 3, each.weight_bytes) for weights, each in fast.items()}
    # two scales of each of two layers are in float32, and rows of zeros fill up the eight that the gates begin
    padding = 2 * (8 - 2 * config.kv_heads) * config.width * 2 if recipe != "swa-ssss" else 0
    assert size["plain"] == plain + 2 * 2 * 2 + padding
    rest = bytes_per_step(decoder, 3, 0) + 2 * 2 * 4
    rows = sum(each.rows for each in matrices(fast["int8"]))
    assert size["int8"] == size["fp8"] == (size["plain"] - rest) // 2 + rest + 4 * rows


def test_the_summary_has_maglev_by_swa_and_the_slowest_position_by_the_fastest() -> None:
    times = {("swa", 10): 2.0, ("swa", 20): 4.0, ("maglev", 10): 3.0, ("maglev", 20): 6.0}
    rows = [
        {"model": model, "step": "fast", "weight_format": "int8", "batch": 8, "position": at, "ms": ms}
        | {"share_of_copy": 1 / ms, "peak_bytes": 7, "bytes": 9}
        for (model, at), ms in times.items()
    ]
    (found,) = summary(rows)
    assert (found["step"], found["weight_format"], found["batch"], found["bytes"]["swa"]) == ("fast", "int8", 8, 9)
    assert found["maglev_by_swa"] == 1.5 and found["slowest_by_fastest_position"] == {"swa": 2.0, "maglev": 2.0}
    assert found["tokens_per_s"]["swa"] == pytest.approx(8 / 3e-3) and found["peak_bytes"]["maglev"] == 7


def test_what_is_given_replaces_what_a_plan_has() -> None:
    plan = decode_plan(batches=(2,), depth=None)
    assert plan.batches == (2,) and plan.depth == 20 and plan.positions[-1] == 1_000_000 and not plan.quick


@pytest.mark.parametrize(
    "given",
    [{"batches": ()}, {"batches": (0,)}, {"batches": (1, 1 << 40)}, {"positions": (-1,)}, {"positions": (1 << 63,)}]
    + [{"weights": ()}, {"weights": ("plain", "int4")}],
)
def test_sizes_out_of_range_are_refused_by_name(given: dict) -> None:
    with pytest.raises(RequestError, match=next(iter(given))):
        decode_plan(**given)
