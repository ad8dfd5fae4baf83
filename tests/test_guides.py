"""Every block of the guides runs, in their order and in one place, at a smaller size; what they name exists."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.documents import (
    REPOSITORY,
    commands,
    extras_exist,
    fenced,
    options_exist,
    run_command,
    smaller,
    target_exists,
)
from tests.small_runs import Train, data, texts, trained, without_speed

__all__ = ["data", "trained", "without_speed"]

TINY = {"train.tokens_per_step=4096": "train.tokens_per_step=128", "model.context=256": "model.context=32"}
TINY |= {"train.steps=100": "train.steps=2", "--depth 3": "--depth 1", "--vocab-size 1024": "--vocab-size 300"}
TINY |= {"model.window=16": "model.window=8", "--steps 600": "--steps 2 --rows 8", "--context 64": "--context 32"}
MIDDLE = {"train.tokens_per_step=16384": "train.tokens_per_step=128", "model.context=512": "model.context=32"}
MIDDLE |= {"train.steps=500": "train.steps=2", "--depth 4": "--depth 1"}
SIZES: dict[str, dict[str, str]] = {
    "docs/first-hour.md": TINY,
    "docs/guides/data.md": MIDDLE | {"--vocab-size 8192": "--vocab-size 300"},
    "docs/guides/tokenizer.md": {"--vocab-size 8192": "--vocab-size 300"},
    "docs/guides/many-gpus.md": {"model.context=64": "model.context=32", "--depth 2": "--depth 1"},
    "docs/guides/evaluate.md": {
        "--steps 600": "--steps 2 --rows 8",
        "--context 64": "--context 32",
        "--pairs 2": "--pairs 2 --rows 8",
    },
    "docs/guides/deploy.md": {},
    "docs/guides/extend.md": {},
}
MARKDOWN = sorted(path.relative_to(REPOSITORY).as_posix() for path in (REPOSITORY / "docs").rglob("*.md"))
DOCUMENTS = ["README.md", "CONTRIBUTING.md", *MARKDOWN]
Check = Callable[[list[str]], object]


def furnish(text: str, run: Path, data: Path) -> None:
    """What readers have by then: text of their own, and of data and runs what the guide does not make itself."""
    for name in ("my-text", "more-text"):
        Path(name).mkdir()
        for number, document in enumerate(texts()):
            Path(name, f"{number}.txt").write_text(document, encoding="utf-8")
    Path("stories.txt").write_text("\n\n\n".join(texts()), encoding="utf-8")
    Path("held-out.txt").write_text(texts()[0], encoding="utf-8")
    for name, source in (("demo/maglev-shared-0.1", run), ("runs/first", run), ("data", data)):
        if f"--out {name}" not in text:
            shutil.copytree(source, name)


def torchrun(words: list[str]) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words[1:]], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def image_exists(words: list[str]) -> None:
    """`docker build --target NAME`, and `docker run` of a name that some build gave."""
    stages = re.findall(r"^FROM \S+ AS (\w+)", (REPOSITORY / "Dockerfile").read_text(), re.MULTILINE)
    if words[1] == "build":
        assert words[words.index("--target") + 1] in stages
    else:
        assert words[-1].removeprefix("maglev:") in stages


# what is not started here: it would install, serve for ever, or needs what is not there
INSTEAD: dict[str, Check] = {
    "pip": extras_exist,
    "make": target_exists,
    "docker": image_exists,
    "torchrun": torchrun,
    ".": lambda words: words[1] == ".venv/bin/activate" or pytest.fail(str(words)),
}


@pytest.mark.parametrize("document", SIZES)
def test_a_guide_runs(
    document: str,
    trained: Train,
    data: Path,
    without_speed: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    content = fenced(document)
    text = smaller("\0".join(block for _, block in content), SIZES[document])
    furnish(text, trained("maglev-shared-0.1"), data)
    names: dict[str, Any] = {}
    for (language, _), block in zip(content, text.split("\0"), strict=True):
        if language == "python":
            exec(compile(block, document, "exec"), names)
            continue
        for words in commands(block):
            if words[0] != "maglev":
                INSTEAD[words[0]](words)
            elif words[1] == "serve":
                options_exist(words)
            else:
                run_command(words, capsys)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_what_a_document_names_exists(document: str) -> None:
    """Verbs and options, in blocks and in sentences; extras; files of the repository."""
    text = (REPOSITORY / document).read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    for words in commands(f"{spoken}\n" for spoken in re.findall(r"`(maglev [^`\n]+)`", prose)):
        options_exist(words)
    for words in commands(block for language, block in fenced(document) if language == "sh"):
        if words[0] == "maglev":
            options_exist(words)
    extras_exist(re.findall(r"(?:maglev|\.)\[[a-z,]+\]", text))
    for path in re.findall(r"`((?:tests|maglev|benchmarks|tools)/[\w/.-]+)`", text):
        assert (REPOSITORY / path).exists(), path
