"""Many commands as processes, some at a time, on one machine: each prints its result, one JSON document.

What fails is told and does not stop the others. After a limit of seconds all that is left is stopped.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class Job:
    """One command and its process; `facts` tell in its result what it is. What it prints goes to the files `stem`.json
    and `stem`.log."""

    def __init__(self, facts: dict[str, Any], command: Sequence[str], stem: Path) -> None:
        self.facts, self.command, self.stem = facts, list(command), stem
        self.process: subprocess.Popen[bytes] | None = None
        self.began = self.ended = 0.0
        self.stopped = False

    def start(self) -> None:
        self.began = time.monotonic()
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        # one thread each: the processes share the cores, and the compiler brings workers of its own
        own = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        environment = {"TORCHINDUCTOR_COMPILE_THREADS": "4"} | os.environ | own
        with open(f"{self.stem}.json", "wb") as out, open(f"{self.stem}.log", "wb") as log:
            self.process = subprocess.Popen(self.command, stdout=out, stderr=log, env=environment)

    def finished(self) -> bool:
        assert self.process is not None
        if self.process.poll() is None:
            return False
        self.ended = time.monotonic()
        return True

    def stop(self) -> None:
        """A run that is told to stop saves what it has."""
        if self.process is not None and not self.stopped:
            self.process.terminate()
        self.stopped = True

    def result(self) -> dict[str, Any]:
        """The facts, `status` and `seconds`, with what the command answered, or with an `error`."""
        if self.process is None:
            return self.facts | {"status": -1, "seconds": 0.0, "error": "there was no time left for it"}
        status = self.process.returncode
        report = self.facts | {"status": status, "seconds": round(self.ended - self.began, 1)}
        if status:
            lines = Path(f"{self.stem}.log").read_text(errors="replace").splitlines()
            return report | {"error": "stopped at the limit" if self.stopped else lines[-1] if lines else ""}
        return report | json.loads(Path(f"{self.stem}.json").read_bytes())


def work_through(
    jobs: Sequence[Job],
    at_a_time: int,
    *,
    stagger: float = 0.0,
    limit: float = 0.0,
    ended: Callable[[dict[str, Any]], None],
) -> list[dict[str, Any]]:
    """In their order, `stagger` seconds apart; `ended` takes the result of each as it comes. -> all of them"""
    waiting, running = list(jobs), list[Job]()
    began, last = time.monotonic(), -stagger
    # told to stop, leave as by an error: no process stays behind
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        while waiting or running:
            if limit and time.monotonic() - began > limit:
                waiting.clear()
                for job in running:
                    job.stop()
            if waiting and len(running) < at_a_time and time.monotonic() - last >= stagger:
                running.append(waiting.pop(0))
                running[-1].start()
                last = time.monotonic()
                continue
            for job in [each for each in running if each.finished()]:
                running.remove(job)
                ended(job.result())
            time.sleep(0.2)
    finally:
        signal.signal(signal.SIGTERM, before)
        for job in running:
            job.stop()
    return [job.result() for job in jobs]
