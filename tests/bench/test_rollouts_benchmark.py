"""`benchmarks/rollouts.py` at the smallest size: three ways, and what each keeps."""

import json
import sys

import pytest

from tests.scripts import load_script


def test_three_ways_and_what_they_keep(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    script = load_script("benchmarks/rollouts.py")
    monkeypatch.setitem(script.SIZES, "cpu", (2, 2, 64))
    monkeypatch.setattr(sys, "argv", ["rollouts.py", "--shapes", "4,32,8", "--repeats", "1", "--device", "cpu"])
    script.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["found"]
    kept = {row["way"]: row["kept_bytes"] for row in found}
    assert [*kept] == list(script.WAYS) and all(row["seconds"] > 0 for row in found)
    # copies of whole rows, or windows alone
    assert kept[script.WAYS[0]] > max(kept[way] for way in script.WAYS[1:]) > 0
