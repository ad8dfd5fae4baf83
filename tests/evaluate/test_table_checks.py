"""Facts that no table can be made of end in one line."""

from pathlib import Path
from typing import Any

import pytest

from maglev.__main__ import main
from maglev.evaluate.results import save_result
from maglev.evaluate.table_facts import collect, save_facts
from tests.evaluate.table_runs import make_run
from tests.small_runs import one_line


def first_of(facts: Any, *path: str | int) -> tuple[Any, Any]:
    """Where the last step of a path leads from."""
    for step in path[:-1]:
        facts = facts[step]
    return facts, path[-1]


GONE = object()
ACCURACY = ("tasks", 0, "tasks", "piqa", "acc_recurrent")


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("bpb", 0, "data"), GONE, "has no 'data'"),
        (("bpb", 0, "bpb_recurrent"), GONE, "has no 'bpb_recurrent'"),
        (("bpb", 0, "bpb_recurrent"), "low", "bpb_recurrent in bits per byte of swa-ssss-0-50 is 'low'"),
        (("bpb", 0, "memory"), "dreams", "is 'dreams'"),
        (("bpb", 0, "by_position"), GONE, "has no 'by_position'"),
        (("bpb", 0, "by_position", 0, "last"), GONE, "has no 'last'"),
        (("bpb", 0), 3, "is no object"),
        (("bpb",), {}, "bpb in a run is {}"),
        (ACCURACY, GONE, "piqa of swa-ssss-0-50 has no 'acc_recurrent'"),
        (ACCURACY, [], "is []"),
        (("tasks", 0, "tasks"), GONE, "has no 'tasks'"),
        (("tasks", 0, "tasks", "piqa"), 0.5, "piqa in tasks of swa-ssss-0-50 is 0.5"),
        (("tasks", 0, "passes"), "two", "passes in tasks of swa-ssss-0-50 is 'two'"),
        (("training", "step"), [1], "has no curves of one length"),
        (("training",), None, "training in a run is None"),
        (("recall",), [{"recipe": "swa-ssss"}], "recall of swa-ssss-0-50 has no"),
        (("seed",), "zero", "seed in a run is 'zero'"),
        (("settings",), GONE, "a run has no 'settings'"),
        (("stopped_at",), None, "stopped_at in a run that was not finished is None"),
        (("stopped_at",), "x", "stopped_at in a run that was not finished is 'x'"),
    ],
)
def test_damaged_facts_end_in_one_line(
    path: tuple[str | int, ...], value: Any, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = collect([make_run(tmp_path, "swa-ssss", recurrent=1.0, accuracy=0.4)])
    place, last = first_of(facts[0], *path)
    if value is GONE:
        del place[last]
    else:
        place[last] = value
    kept = tmp_path / "kept.json"
    save_facts(kept, facts)
    assert main(["table", str(kept), "--out", str(tmp_path / "out")]) == 2
    line = one_line(capsys)
    assert "is no file of table facts" in line and says in line


@pytest.mark.parametrize("name", ["bpb-x", "tasks-paper-recurrent", "recall-x"])
def test_a_damaged_result_of_a_run_ends_in_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path, "swa-ssss", recurrent=1.0)
    save_result(run, name, {"recipe": "swa-ssss", "tasks": {"piqa": {}}, "setting": 3})
    assert main(["table", str(run), "--out", str(tmp_path / "out")]) == 2
    assert "eval is damaged (" in one_line(capsys)
    save_result(run, name, {"recipe": ["swa-ssss"]})
    assert main(["table", str(run), "--out", str(tmp_path / "out")]) == 2
    assert "is not a result of 'maglev eval'" in one_line(capsys)
