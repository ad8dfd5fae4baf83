"""The commands of docs/reproduce.md run in their order, at toy size and on one process."""

import glob
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pyarrow
import pyarrow.parquet
import pytest
from torch.distributed.run import get_args_parser

from tests.documents import blocks, commands, extras_exist, options_exist, run_command
from tests.evaluate.task_files import ITEMS
from tests.scripts import load_script
from tests.small_runs import SMALL, texts

pytest.importorskip("lm_eval", reason="needs lm_eval, the extra 'tasks' of maglev")

DOCUMENT = "docs/reproduce.md"
TOY = ["--depth", "1", *(word for key, value in SMALL.items() for word in ("--set", f"{key}={value}"))]
HUB = "HuggingFaceFW/fineweb-edu:sample-100BT"
TEXT_FILES = ("TEXT/train-0.parquet", "TEXT/validation.parquet")


@pytest.fixture
def script() -> ModuleType:
    return load_script("benchmarks/small_table.py")


def furnish() -> None:
    for path in TEXT_FILES:
        Path(path).parent.mkdir(exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.table({"text": texts()}), path)
    Path("fineweb_edu.txt").write_text(texts()[0], encoding="utf-8")


def at_toy_size(words: list[str], tasks: Path) -> list[str]:
    """What is elsewhere is replaced by what is here; patterns of files are expanded, as a shell does it."""
    here = {"DIR": str(tasks), "EVAL": str(tasks), HUB: TEXT_FILES[0], "8192": "300", "1024": "32"}
    found = [each for word in words for each in (sorted(glob.glob(word)) or [here.get(word, word)])]
    if found[1] == "train":
        return found + TOY
    if found[1:3] == ["data", "prepare"]:
        # the paper's table and the small one have a folder of the same name
        return [*found, "--overwrite"] if "--tokenizer" in found else [*found, "--vocab-size", "300"]
    return [*found, "--limit", str(ITEMS)] if "--data" in found and found[1:3] == ["eval", "tasks"] else found


def test_the_commands_run(
    script: ModuleType,
    tasks_folder: Path,
    without_speed: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    furnish()

    def maglev(words: list[str]) -> None:
        options_exist(words)
        # the harness's own copies of the tasks come from the Hub
        if words[1:3] == ["eval", "tasks"] and not {"--data", "--scores"} & set(words):
            return
        run_command(at_toy_size(words, tasks_folder), capsys)

    def torchrun(words: list[str]) -> None:
        launched = get_args_parser().parse_args(words[1:])
        assert launched.training_script == "maglev" and launched.module
        maglev(["maglev", *launched.training_script_args])

    def small_table(words: list[str]) -> None:
        """tests/evaluate/test_small_table.py runs them; here is what they leave."""
        assert words[1] == "benchmarks/small_table.py"
        script.parse(words[2:])
        Path("results/small-table.json").write_bytes(Path("results/table.json").read_bytes())

    ways: dict[str, Callable[[list[str]], None]] = {"maglev": maglev, "torchrun": torchrun, "python": small_table}
    for words in commands(blocks(DOCUMENT, "sh")):
        ways.get(words[0], extras_exist)(words)
    told = capsys.readouterr()
    assert not told.out and all(Path("table", f"table.{kind}").stat().st_size for kind in ("txt", "md", "csv", "tex"))
    assert {path.name for path in Path("runs").iterdir()} == {"maglev-shared-0.1", "d12"}
