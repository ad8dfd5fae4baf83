"""`benchmarks/scores.py`: what moves scores is told for every way to make them."""

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from maglev.evaluate.requests import Request, RequestFile, save_requests
from maglev.evaluate.scoring import open_scorer
from tests.scripts import load_script
from tests.small_runs import Train


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("benchmarks/scores.py")


def test_every_way_has_a_row_and_exact_scores_are_at_no_distance(
    script: ModuleType, lively: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, asked = lively("maglev-shared-0.1"), tmp_path / "r.safetensors"
    contexts = [(0, *range(3, 3 + length)) for length in (4, 11, 29, 30)]
    requests = [Request(context, choice) for context in contexts for choice in ((7, 8), (9,))]
    tokenizer = open_scorer(run, torch.device("cpu"), pytest.fail).tokenizer.fingerprint
    save_requests(asked, RequestFile(requests, tokenizer, {}))
    words = [str(run), "--requests", str(asked), "--contexts", "3", "--device", "cpu"]
    assert script.main([*words, "--out", str(tmp_path / "o.json")]) == 0
    value = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert value == json.loads((tmp_path / "o.json").read_text()) and value["requests"] == 6
    rows = {(row["dtype"], row["reading"], row["batch"]): row for row in value["rows"]}
    assert len(rows) == 8 and all(row["choices"] == 3 for row in rows.values())
    assert rows["float32", "step", "as usual"]["from_exact"] == {"mean": 0, "largest": 0}
    assert rows["float32", "parallel", "alone"]["from_exact"]["largest"] < 1e-4
    for (dtype, reading, _), row in rows.items():
        assert row["passes_per_token"] == 0 if reading == "step" else 1 < row["passes_per_token"] < 25, (dtype, row)
    # rounding shows, and is not far
    assert 1e-4 < rows["bfloat16", "step", "as usual"]["from_exact"]["largest"] < 1


def test_bad_input_ends_in_one_line(
    script: ModuleType, lively: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, asked = str(lively("maglev-shared-0.1")), tmp_path / "r.safetensors"
    save_requests(asked, RequestFile([Request((0,), (1,))], "another", {}))
    for words, line in (
        ([run, "--requests", str(tmp_path / "none")], "does not exist"),
        ([run, "--requests", str(asked)], "was built with another tokenizer"),
        ([run, "--requests", str(asked), "--contexts", "0"], "--contexts is 0"),
        ([str(tmp_path), "--requests", str(asked)], "is not a run folder"),
    ):
        assert script.main([*words, "--device", "cpu"]) == 2
        out, err = capsys.readouterr()
        assert not out and line in err and err.count("\n") == 1
