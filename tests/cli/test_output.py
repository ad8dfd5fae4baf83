"""Results on stdout, everything else on stderr."""

import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from maglev.cli.output import BarMeter, describe_bytes, emit, make_bars, progress, say
from maglev.cli.tables import rounded, show


def test_emit_json_is_one_valid_document(capsys: pytest.CaptureFixture[str]) -> None:
    value = {"loss": math.nan, "rates": (1, math.inf), "run": Path("runs/x"), "text": "é\ud800\n"}
    emit(value, True, lambda _: pytest.fail("must not render"))
    out, err = capsys.readouterr()
    assert json.loads(out) == {"loss": None, "rates": [1, None], "run": "runs/x", "text": "é\ud800\n"}
    assert out.count("\n") == 1 and err == ""


def test_emit_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    emit({"a": 1}, False, lambda value: print("a is", value["a"]))
    assert capsys.readouterr().out == "a is 1\n"


def test_progress_without_a_terminal_is_a_few_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(unit="bytes", every=60) as meter:
        for done in range(0, 1001, 10):
            meter.update("reading", done * 1000, 1_000_000)
        for done in range(5):
            meter.update("counting", done, None, note=f"loss {done}")
        say("a remark")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "reading: 0 B of 1.0 MB",
        "reading: 1.0 MB of 1.0 MB",
        "counting: loss 0",
        "a remark",
        "counting: 4 B loss 4",
    ]


def test_progress_on_a_terminal_leaves_stdout_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with progress(unit="steps") as meter:
        meter.update("starting", 0)
        meter.update("training", 1, 2, note="loss 3.2")
        emit({"a": 1}, True, print)
        meter.update("training", 2, 2, note="loss [3.1]")
    out, err = capsys.readouterr()
    assert out == '{"a": 1}\n'
    assert "training" in err and "2 of 2 steps" in err and "[3.1]" in err


def test_amounts() -> None:
    assert [describe_bytes(n) for n in (0, 999, 1000, 1_500_000, 3 * 10**12)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "1.5 MB",
        "3.0 TB",
    ]


def test_cells() -> None:
    assert show([512, 512, 2048, 512]) == "512 x2 2,048 512"
    assert show(True) == "yes" and show(None) == "-" and show(0.25) == "0.25"
    assert rounded(435_159_040) == "435 M" and rounded(1000) == "" and rounded("x") == ""


def test_the_bar_and_its_note_fit_into_eighty_columns() -> None:
    console = Console(width=80, file=io.StringIO(), force_terminal=True, color_system=None)
    bars = make_bars(console)
    note = "loss 6.3629 (lifted) consistency 0.0003 22,402 tokens/s MFU 13%"
    BarMeter(bars, "steps").update("maglev-separate-0.1", 1200, 83_000, note)
    with console.capture() as captured:
        console.print(bars.get_renderable())
    shown = captured.get()
    assert note in shown
    assert "maglev-separate-0.1" in shown and "1,200 of 83,000 steps" in shown and "0:00:0" in shown
