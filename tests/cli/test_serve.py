"""`maglev serve` as its operator meets it: one line for what is wrong, one when it answers."""

import signal
import socket
from pathlib import Path

import pytest

from maglev.__main__ import main
from tests.processes import Processes, until
from tests.small_runs import Train, one_line

RECIPE = "maglev-shared-0.1"


@pytest.fixture
def run(trained: Train, capsys: pytest.CaptureFixture[str]) -> Path:
    folder = trained(RECIPE)
    capsys.readouterr()
    return folder


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--port", "70000"], "--port is 70000; it must be from 0 to 65535"),
        (["--slots", "0"], "--slots is 0; it must be at least 1"),
        (["--slots", "257"], "--slots is 257; it must be at most 256"),
        (["--replicas", "0"], "--replicas is 0; it must be at least 1"),
        (["--queue", "0"], "--queue is 0; it must be at least 1"),
        (["--seconds", "0"], "--seconds is 0.0; it must be above 0"),
        (["--seconds", "nan"], "--seconds is nan; it must be above 0"),
        (["--host", "nowhere.invalid"], "--host nowhere.invalid is no address of this machine"),
        (["--weights", "int3"], "--weights is 'int3'"),
        (["--device", "tpu"], "device is 'tpu'"),
        (["--api-key-file", "nothing"], "--api-key-file nothing cannot be read"),
        (["--sessions", "/dev/null/x"], "sessions cannot be kept in /dev/null/x"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_is_wrong_is_one_line(
    options: list[str], said: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(run), "--port", "0", *options]) == 2
    assert said in one_line(capsys)


def test_a_folder_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(tmp_path), "--port", "0"]) == 2
    assert "is not a run folder" in one_line(capsys)


def test_a_port_that_is_taken(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["serve", str(run), "--port", str(port)]) == 2
    assert f"cannot listen on 127.0.0.1 port {port}" in one_line(capsys)


@pytest.mark.parametrize("key", ["", "short", "with a space in the middle", "nöt-ascii-but-long-enough"])
def test_a_key_that_is_none(key: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "key").write_text(key)
    assert main(["serve", str(run), "--api-key-file", str(tmp_path / "key")]) == 2
    line = one_line(capsys)
    assert "at least 16 printable ASCII characters" in line and (not key or key not in line.partition("/key: ")[2])


def test_without_the_extra_the_remedy_is_told(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    for module in [name for name in sys.modules if name.startswith("maglev.serve.")]:
        if module != "maglev.serve.limits":
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["serve", str(run), "--port", "0"]) == 2
    assert "pip install 'maglev[serve]'" in one_line(capsys)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_says_where_it_is_and_ends_when_told(
    number: signal.Signals, run: Path, processes: Processes, tmp_path: Path
) -> None:
    process = processes.start(
        ["serve", str(run), "--port", "0", "--host", "0.0.0.0", "--sessions", str(tmp_path / "s")]
    )
    until(lambda: "serving" in process.stderr)
    warning, line = process.stderr.splitlines()
    assert "anyone who reaches 0.0.0.0 can use this server" in warning
    assert line.startswith(f"serving {RECIPE}-1 on http://0.0.0.0:")
    process.kill(number)
    assert process.wait() in (0, -number)
    assert process.stderr.count("\n") == 2 and process.stdout == ""
