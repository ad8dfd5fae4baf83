"""Wheel and source archive hold what they should, and the wheel alone gives a working `maglev`."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests.documents import REPOSITORY, extras_exist, options_exist

pytest.importorskip("hatchling", reason="needs hatchling")
pytest.importorskip("pip", reason="needs pip")


def run(*words: str | Path, **options: object) -> str:
    """Its stdout. No path of this checkout is left in the environment, and nothing is downloaded."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_"))}
    done = subprocess.run(
        [str(word) for word in words], env=kept | {"PIP_NO_INDEX": "1"}, capture_output=True, text=True, **options
    )
    assert done.returncode == 0, (words, done.stdout, done.stderr)
    return done.stdout


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-d", out, cwd=REPOSITORY)
    return {"wheel": next(out.glob("*.whl")), "sdist": next(out.glob("*.tar.gz"))}


@pytest.fixture(scope="module")
def installed(archives: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of a fresh environment with the wheel in it; what it depends on lies where these tests found it."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", archives["wheel"])
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    # a path is searched last, and its own .pth files, an editable maglev's among them, are not read
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def test_the_wheel_holds_the_package_and_nothing_else(archives: dict[str, Path]) -> None:
    names = set(zipfile.ZipFile(archives["wheel"]).namelist())
    ours = {path.relative_to(REPOSITORY).as_posix() for path in (REPOSITORY / "maglev").rglob("*.py")}
    assert ours <= names
    others = {name for name in names - ours if ".dist-info/" not in name}
    assert "maglev/serve/web/index.html" in others
    tiny = {name.removeprefix("maglev/weights/maglev-tiny/") for name in others if name.startswith("maglev/weights/")}
    expected = {"model.safetensors", "config.json", "generation_config.json", "README.md"}
    assert tiny == expected | {"tokenizer.json", "tokenizer_config.json"}
    assert all(name.startswith("maglev/") and "__pycache__" not in name for name in others)
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_the_source_archive_can_be_tested_and_documented(archives: dict[str, Path]) -> None:
    with tarfile.open(archives["sdist"]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for name in ("Makefile", "constraints.txt", "mkdocs.yml", "CHANGELOG.md", "CITATION.cff", "Dockerfile"):
        assert name in names
    for folder in ("maglev", "tests", "docs", "notebooks", "results", "benchmarks", "tools", ".github"):
        assert any(name.startswith(f"{folder}/") for name in names), folder
    assert not any("__pycache__" in name or name.startswith((".venv", "site/", "runs/", "demo/")) for name in names)


def test_the_wheel_alone_works(installed: Path, tmp_path: Path) -> None:
    maglev = installed / "maglev"
    assert "train" in run(maglev, "--help", cwd=tmp_path)
    described = json.loads(run(maglev, "info", "maglev-shared-0.1", "--depth", "2", "--json", cwd=tmp_path))
    assert described["recipe"] == "maglev-shared-0.1"
    # with weights in it, so that there is something to see
    written = run(maglev, "generate", "maglev-tiny", "--prompt", "The river", "--max-tokens", "20", cwd=tmp_path)
    assert written.startswith("The river") and len(written.split()) > 5


def test_what_is_no_code_is_found_there(installed: Path, tmp_path: Path) -> None:
    """The server's page, the kernels, and the sources that an export's one file is made from."""
    script = """
import maglev, pathlib
from importlib.resources import files
home = pathlib.Path(maglev.__file__).parent
page = (files("maglev.serve") / "web" / "index.html").read_text(encoding="utf-8")
kernels = sorted(path.stem for path in (home / "ops").glob("fused_*.py"))
from maglev.hf.one_file import generate
print(home); print(len(page), "<script>" in page); print(*kernels); print("class MaglevForCausalLM" in generate())
"""
    home, page, kernels, remote = run(installed / "python", "-c", script, cwd=tmp_path).splitlines()
    assert Path(home).is_relative_to(installed.parent) and page.endswith("True")
    assert {"fused_decode", "fused_inject", "fused_loss", "fused_read"} <= set(kernels.split())
    assert remote == "True"


def dockerfile() -> list[list[str]]:
    """Its instructions, with continued lines joined."""
    text = (REPOSITORY / "Dockerfile").read_text(encoding="utf-8")
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    return [line.split() for line in text.splitlines() if line.strip()]


def test_what_the_dockerfile_copies_and_calls_exists() -> None:
    instructions = dockerfile()
    stages = [words[3] for words in instructions if words[0] == "FROM"]
    assert stages == ["base", "cpu", "cuda"]
    allowed = (REPOSITORY / ".dockerignore").read_text().split()
    for words in instructions:
        if words[0] == "COPY":
            for name in words[1:-1]:
                assert (REPOSITORY / name).exists() and f"!{name}" in allowed, name
        if words[0] == "RUN":
            extras_exist(words)
    assert re.search(r"^torch==", (REPOSITORY / "constraints.txt").read_text(), re.MULTILINE)
    (entrance,) = (json.loads(" ".join(words[1:])) for words in instructions if words[0] == "ENTRYPOINT")
    (arguments,) = (json.loads(" ".join(words[1:])) for words in instructions if words[0] == "CMD")
    assert entrance == ["maglev"] and arguments[:2] == ["serve", "/model"]
    options_exist(entrance + arguments)


def test_both_images_run_as_a_user_without_rights() -> None:
    users: dict[str, str] = {}
    stage = ""
    for words in dockerfile():
        if words[0] == "FROM":
            stage = words[3]
        if words[0] == "USER":
            users[stage] = words[1]
    assert users == {"cpu": "maglev", "cuda": "maglev"}


def test_the_version_is_told_once(archives: dict[str, Path]) -> None:
    from maglev import __version__

    assert f"maglev-{__version__}-" in archives["wheel"].name
    assert f"version: {__version__}" in (REPOSITORY / "CITATION.cff").read_text()


def test_templates_can_be_read() -> None:
    yaml = pytest.importorskip("yaml", reason="needs PyYAML")
    folder = REPOSITORY / ".github" / "ISSUE_TEMPLATE"
    forms = {path.stem: yaml.safe_load(path.read_text()) for path in folder.glob("*.yml")}
    assert set(forms) == {"bug", "config", "idea", "result"}
    for name in ("bug", "idea", "result"):
        assert forms[name]["name"] and forms[name]["description"]
        assert all(
            part["type"] in ("textarea", "checkboxes") and part["attributes"]["label"] for part in forms[name]["body"]
        )
    cited = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors", "version", "license"} <= set(cited)
