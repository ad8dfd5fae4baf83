"""The README's commands run, at a smaller size; its code calls what there is."""

import re
from pathlib import Path

import pytest

from tests.documents import blocks, commands, extras_exist, options_exist, run_command, smaller, target_exists

SMALLER = {
    "--depth 4": "--depth 1",
    "model.context=512": "model.context=64",
    "tokens_per_step=16384": "tokens_per_step=256",
    "train.steps=200": "train.steps=2",
    "--vocab-size 8192": "--vocab-size 300",
    "--max-tokens 100": "--max-tokens 5",
}


def test_the_commands_of_the_readme_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    block = next(block for block in blocks("README.md", "sh") if "maglev train" in block)
    monkeypatch.chdir(tmp_path)
    Path("my-text").mkdir()
    for number in range(30):
        Path("my-text", f"{number}.txt").write_text(f"Text number {number}, of which there are some. " * 20)
    pytest.importorskip("matplotlib", reason="needs matplotlib (the extra report)")
    found = commands(smaller(block, SMALLER))
    assert [words[:2] for words in found] == [
        ["maglev", "data"],
        ["maglev", "train"],
        ["maglev", "eval"],
        ["maglev", "report"],
        ["maglev", "generate"],
        ["maglev", "info"],
    ]
    shown = [run_command(words, capsys) for words in found]
    assert "runs/first/report.html" in shown[3] and "Once upon a time" in shown[4]


def test_the_weights_that_come_along_write(capsys: pytest.CaptureFixture[str]) -> None:
    block = next(block for block in blocks("README.md", "sh") if "maglev-tiny" in block)
    install, generate, serve = commands(block)
    assert install[:2] == ["pip", "install"]
    extras_exist(install)
    assert generate[:3] == ["maglev", "generate", "maglev-tiny"] and serve == ["maglev", "serve", "maglev-tiny"]
    assert generate[-1] in run_command([*generate, "--max-tokens", "5"], capsys)
    options_exist(serve)


def test_the_two_commands_exist() -> None:
    found = [words for words in commands(blocks("README.md", "sh")) if words[0] == "make"]
    assert found == [["make", "demo"], ["make", "test"]]
    for words in found:
        target_exists(words)


def test_the_python_of_the_readme_runs() -> None:
    """Up to the part that loads the run of the commands above."""
    import torch

    import maglev
    from maglev.inference import LanguageModel

    (block,) = blocks("README.md", "python")
    before, _, after = block.partition("lm = maglev.load")
    tokens = torch.randint(512, (2, 40))
    objective = maglev.build("maglev-shared-0.1", depth=4, vocab_size=512, context=256, window=32)
    names = {
        "tokens": tokens,
        "targets": tokens,
        "t": 3,
        "previous_memory": torch.zeros(2, 40, 256),
        "state": objective.decoder.initial_state(2),
    }
    exec(compile(before, "README.md", "exec"), names)
    assert names["memory"].shape == (2, 40, 256) and names["memory_t"].shape == (2, 256)
    assert names["losses"].consistency == 0
    for call in re.findall(r"lm\.(\w+)\(", after):
        assert callable(getattr(LanguageModel, call))
