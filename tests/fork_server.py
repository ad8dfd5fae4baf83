"""Run by processes.py: a process that imports torch once and forks a fresh `maglev` process for every request.

A request is a JSON line on stdin: {"start": {...}} answers {"pid": ...}, {"wait": pid, "seconds": ...} answers
{"status": ...}, negative for a signal and null where the process was still running and had to be killed.
"""

import io
import json
import os
import resource
import signal
import sys
import time
from contextlib import redirect_stdout
from importlib import import_module
from typing import Any

import torch

from maglev.__main__ import main

VERBS = (
    "maglev.cli.app",
    "maglev.train.launch",
    "maglev.evaluate.bpb",
    "maglev.evaluate.runs",
    "maglev.inference",
    "maglev.serve.run",
)


def become(request: dict[str, Any]) -> None:
    """Take over the streams, the environment and the limits of the request."""
    files = (request["stdin"], os.O_RDONLY), *((request[name], os.O_WRONLY) for name in ("stdout", "stderr"))
    for number, (path, mode) in enumerate(files):
        descriptor = os.open(path, mode)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(request["folder"])
    os.environ.update(request["environment"])
    if request["file_limit"] is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_limit"], resource.RLIM_INFINITY))
    exec(request["before"], {})


def leave(status: int, whole: bool) -> None:
    """Taking torch apart at exit takes most of a second; it is worth that where an unwritten buffer may complain."""
    if whole:
        sys.exit(status)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def wait_for(pid: int, seconds: float) -> int | None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def serve() -> dict[str, Any] | None:
    """Answer requests; in a forked process return what it shall do."""
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answer: dict[str, Any] = {"status": wait_for(request["wait"], request["seconds"])}
        else:
            pid = os.fork()
            if pid == 0:
                return request["start"]
            answer = {"pid": pid}
        print(json.dumps(answer), flush=True)
    return None


if __name__ == "__main__":
    assert torch.get_num_threads() == 1
    for module in VERBS:
        import_module(module)
    # typer, too, imports much at its first use
    with redirect_stdout(io.StringIO()):
        main(["info", "swa-ssss", "--json"])
    job = serve()
    if job is not None:
        become(job)
        leave(main(job["arguments"]), whole=job["file_limit"] is not None)
