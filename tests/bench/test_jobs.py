"""Commands side by side: their answers, their failures, and a limit that ends them."""

import sys
from pathlib import Path
from typing import Any

from maglev.bench.jobs import Job, work_through


def job(tmp_path: Path, name: str, code: str) -> Job:
    return Job({"name": name}, [sys.executable, "-S", "-c", code], tmp_path / name)


def test_results_come_as_they_end_and_a_failure_stops_nothing(tmp_path: Path) -> None:
    go = tmp_path / "go"
    wait = f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)\nprint('{{\"number\": 1}}')"
    jobs = [
        job(tmp_path, "waits", wait),
        job(tmp_path, "fails", "import sys; print('begun', file=sys.stderr); sys.exit('no such thing')"),
        job(tmp_path, "opens", f"open({str(go)!r}, 'w'); print('{{\"number\": 2}}')"),
    ]
    ended: list[dict[str, Any]] = []
    results = work_through(jobs, 2, ended=ended.append)
    assert [result["name"] for result in results] == ["waits", "fails", "opens"]
    assert [result.get("number") for result in results] == [1, None, 2]
    assert [result["status"] for result in results] == [0, 1, 0] and results[1]["error"] == "no such thing"
    # the first one can only end after the third, which takes the place of the second
    assert {each["name"] for each in ended} == {"waits", "fails", "opens"} and ended[0]["name"] == "fails"


def test_a_limit_ends_what_runs_and_begins_nothing_more(tmp_path: Path) -> None:
    jobs = [job(tmp_path, "sleeps", "import time; time.sleep(60)"), job(tmp_path, "waits", "print({})")]
    first, second = work_through(jobs, 1, limit=0.5, ended=lambda result: None)
    assert first["status"] and first["error"] == "stopped at the limit"
    assert second["status"] == -1 and "no time left" in second["error"] and not (tmp_path / "waits.log").exists()
