"""How a verb ends: exit status, one line on stderr, nothing but the result on stdout."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from maglev import __version__
from maglev.__main__ import main
from maglev.errors import RequestError, WorkError

DESCRIBE = "maglev.model.accounting.describe"


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The only line on stderr; stdout must be empty."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("maglev: ") and err.endswith("\n") and err.count("\n") == 1, err
    return err


def raising(error: BaseException):
    def describe(config: object) -> None:
        raise error

    return describe


@pytest.mark.parametrize("verb", [[], ["info"], ["data"], ["data", "prepare"], ["eval"]])
def test_help_goes_to_stdout(verb: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*verb, "--help"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"Usage: {' '.join(['maglev', *verb])} ") and err == ""


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"maglev {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "no verb given"),
        (["--"], "maglev --help"),
        (["inof"], "did you mean 'maglev info'"),
        (["prepare"], "did you mean 'maglev data prepare'"),
        (["zzzzzz"], "did you mean"),
        (["data"], "choose one of prepare"),
        (["data", "prep"], "did you mean 'maglev data prepare'"),
        (["--frobnicate"], "--frobnicate"),
        (["info"], "RUN_OR_RECIPE"),
        (["info", "swa-ssss", "--jsn"], "--json"),
        (["info", "swa-ssss", "more"], "more"),
        (["info", "swa-ssss", "--depth", "many"], "--depth"),
        (["info", "swa-ssss", "--depth"], "--depth"),
        (["info", "swa-ssss", "--set"], "--set"),
        (["data", "prepare"], "SOURCE"),
        (["data", "prepare", "a.txt"], "--out"),
        (["data", "prepare", "a.txt", "--out", "x", "--vocab-size", "1.5"], "--vocab-size"),
    ],
)
def test_parse_errors_are_one_line(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    line = one_line(capsys)
    assert says in line
    assert "--help" in line


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["swa-sss"], "did you mean 'swa-ssss'"),
        (["swa-ssss", "--depth", "0"], "at least 1"),
        (["swa-ssss", "--set", "model.windw=4"], "did you mean 'model.window'"),
        (["swa-ssss", "--set", "model.window"], "KEY=VALUE"),
        (["swa-ssss", "--set", "model.window=9999"], "model.context"),
        (["swa-ssss", "--set", "model.window_pattern=SXS"], "S (sliding) and L (full)"),
        (["no/such/run"], "not a run folder"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_wrong_requests_are_one_line(
    arguments: list[str], says: str, as_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", *arguments, *(["--json"] if as_json else [])]) == 2
    assert says in one_line(capsys)


def test_settings_of_a_run_are_fixed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(tmp_path), "--depth", "4"]) == 2
    assert "fixed" in one_line(capsys)


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (RequestError("a\nrequest of\ttwo lines"), 2, "maglev: a request of two lines\n"),
        (RequestError("a \x1b[31mred\x1b[0m name"), 2, "maglev: a \\x1b[31mred\\x1b[0m name\n"),
        (WorkError("the loss is not finite"), 1, "maglev: the loss is not finite\n"),
        (OSError(errno.ENOSPC, "No space left on device", "x.npy"), 1, "No space left on device: x.npy\n"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 1, "maglev: Broken pipe\n"),
        (MemoryError(), 1, "maglev: out of memory\n"),
        (KeyboardInterrupt(), 130, "maglev: interrupted\n"),
    ],
)
def test_how_work_ends(
    error: BaseException,
    status: int,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(DESCRIBE, raising(error))
    assert main(["info", "swa-ssss"]) == status
    assert one_line(capfd).endswith(says)


def test_unexpected_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(DESCRIBE, raising(KeyError("lost")))
    assert main(["info", "swa-ssss", "--json"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" in err
    assert err.splitlines()[-1] == "maglev: unexpected KeyError: 'lost'"


def test_parameters_and_steps_of_the_paper(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "swa-ssss", "--depth", "20", "--json"]) == 0
    out, err = capsys.readouterr()
    value = json.loads(out)
    assert err == ""
    assert value["parameters"]["blocks"] + value["parameters"]["readout"] == 435_159_040
    assert value["steps"] == 83_000


def test_info_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "maglev-shared-0.1", "--depth", "4", "--set", "model.window=32"]) == 0
    out, err = capsys.readouterr()
    assert "maglev-shared-0.1" in out and "32 x4" in out and err == ""


def run(arguments: list[str], folder: Path, **options: object) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, **options)


@pytest.mark.parametrize(
    "work",
    [
        "import maglev; maglev.__version__",
        "main(['--help'])",
        "main(['data', 'prepare', '--help'])",
        "main(['info', 'swa-ssss', '--json'])",
        "main(['nonsense'])",
    ],
)
def test_torch_is_imported_late(work: str, repository: Path) -> None:
    code = f"import sys; from maglev.__main__ import main; {work}; assert 'torch' not in sys.modules"
    assert run(["-c", code], repository).returncode == 0


def test_from_a_bare_checkout(tmp_path: Path, repository: Path) -> None:
    shutil.copytree(repository / "maglev", tmp_path / "maglev", ignore=shutil.ignore_patterns("__pycache__"))
    source = tmp_path / "maglev" / "__init__.py"
    source.write_text(source.read_text().replace(f'"{__version__}"', '"9.9.9"'))
    assert run(["-m", "maglev", "--version"], tmp_path).stdout == "maglev 9.9.9\n"
    assert run(["-m", "maglev", "nonsense"], tmp_path).returncode == 2


def test_closed_pipe_is_quiet(repository: Path) -> None:
    command = [sys.executable, "-m", "maglev", "info", "swa-ssss", "--json"]
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as closed:
        done = subprocess.run(command, cwd=repository, stdout=closed, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_disk_under_stdout(repository: Path) -> None:
    command = [sys.executable, "-m", "maglev", "info", "swa-ssss", "--json"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=repository, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "maglev: No space left on device\n")
