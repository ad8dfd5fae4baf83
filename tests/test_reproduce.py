"""docs/reproduce.md: its commands are taken as they stand, its path runs at toy size, its figures follow."""

import json
import os
import re
import subprocess
from functools import partial
from glob import glob
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch.distributed.run

from maglev.__main__ import main
from maglev.checkpoint import newest
from maglev.config import RunConfig
from maglev.evaluate.paper_tasks import read_rows
from maglev.model.accounting import describe
from maglev.recipes import PAPER_VOCAB, run_config
from maglev.runs import read_config
from maglev.train import launch
from tests.documents import REPOSITORY, blocks, extras_exist, run_command
from tests.evaluate.task_files import ITEMS, write_tasks
from tests.scripts import load_script
from tests.small_runs import SMALL, texts, without_speed

__all__ = ["without_speed"]

DOCUMENT = "docs/reproduce.md"
PAPER = ("transformer-slsl", "lrt-slsl", "swa-ssss", "lrt-ssss")
PAPER += ("maglev-shared-0.1", "maglev-shared-1", "maglev-separate-0.1", "maglev-separate-1")
THREE_SEEDS = {"swa-ssss", "transformer-slsl", "lrt-ssss", "lrt-slsl"}
THREE_SEEDS |= {"maglev-shared-0.1", "maglev-separate-1", "maglev-closed"}
HUB = "HuggingFaceFW/fineweb-edu:sample-100BT"
# of FineWeb-Edu's files
COLUMNS = ("id", "dump", "url", "file_path", "language", "language_score", "token_count", "score", "int_score")
# writes down what it is called with
STUB = '#!/bin/sh\nfor word in "${0##*/}" "$@"; do printf \'%s\\0\' "$word"; done >> "$CALLS"\necho >> "$CALLS"\n'


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """What the shell makes of every block of the page, loops and all, as words."""
    folder = tmp_path_factory.mktemp("shell")
    for name in ("maglev", "torchrun", "python", "python3", "pip"):
        (folder / name).write_text(STUB)
        (folder / name).chmod(0o755)
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "activate").touch()
    (folder / "results").mkdir()
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "CALLS": str(folder / "calls")}
    script = "\n".join(blocks(DOCUMENT, "sh"))
    done = subprocess.run(["bash", "-eu", "-c", script], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return [line.split("\0")[:-1] for line in (folder / "calls").read_text().splitlines()]


def first_section(calls: list[list[str]]) -> list[list[str]]:
    """From the empty machine up to its table."""
    return calls[: next(index for index, words in enumerate(calls) if words[:2] == ["maglev", "table"]) + 1]


def after(words: list[str], option: str) -> str:
    return words[words.index(option) + 1]


def test_training_takes_the_commands_as_they_stand(calls: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """At full size, up to the point where the model would be made."""
    asked: list[tuple[Path, RunConfig]] = []

    def configured(recipe: str, data: Path, run: Path, watch: Any, *, resume: bool, **more: Any) -> dict[str, Any]:
        task: Any = SimpleNamespace(vocab_size=PAPER_VOCAB, source=data)
        asked.append((run, launch.configure(recipe, more["depth"], more["settings"], task)))
        return {"run": str(run), "step": 0, "steps": 0, "tokens": 0, "signal": 0}

    monkeypatch.setattr(launch, "train", configured)
    begun = [words for words in calls if words[0] == "torchrun"]
    for words in begun:
        taken = torch.distributed.run.get_args_parser().parse_args(words[1:])
        assert taken.module and taken.training_script == "maglev" and taken.nproc_per_node == "8"
        assert main(taken.training_script_args) == 0
    rows = [config for run, config in asked if run.parent.name == "runs" and config.train.sharding == "none"]
    assert [config.recipe for config in rows[:8]] == list(PAPER)
    for config in rows:
        told = describe(config)
        assert (told["steps"], told["tokens"]) == (83_000, 43_515_904_000)
        assert (told["depth"], told["context"], told["windows"][0]) == (20, 2048, 512)
        # a step's rows divide over the ranks
        assert config.train.tokens_per_step % (8 * config.model.context) == 0
    assert {config.train.sharding for _, config in asked} == {"none", "full"} and len(asked) == len(begun)
    prepared = next(words for words in calls if HUB in words)
    assert int(after(prepared, "--train-tokens")) >= 43_515_904_000


def test_the_path_runs_at_toy_size_from_local_parquet(
    calls: list[list[str]],
    without_speed: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two of its rows. Files in FineWeb-Edu's layout stand for the Hub's, and so do those of the tasks."""
    pytest.importorskip("lm_eval", reason="needs lm_eval, the extra 'tasks' of maglev")
    pytest.importorskip("matplotlib", reason="needs matplotlib, the extra 'report' of maglev")
    monkeypatch.chdir(tmp_path)
    # asks pip and the system for seconds
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
    whole = partial(read_rows, limit=ITEMS)
    monkeypatch.setattr("maglev.evaluate.paper_tasks.read_rows", lambda folder, task, limit: whole(folder, task))
    write_tasks(Path("eval"))
    for number in range(2):
        rows = [{"text": text} | dict.fromkeys(COLUMNS, "x") for text in texts()[number::2]]
        path = Path("fineweb-edu", "sample", "100BT", f"000_0000{number}.parquet")
        path.parent.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    sizes = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    left_out = [f"runs/{recipe}" for recipe in PAPER if recipe not in ("swa-ssss", "maglev-shared-0.1")]
    for words in first_section(calls):
        if words[0] == "pip":
            extras_exist(words)
        if words[0] not in ("maglev", "torchrun") or any(run in words for run in left_out):
            continue
        words = ["maglev", *words[words.index("maglev") + 1 :]]
        words = [found for word in words for found in (sorted(glob(word)) if "*" in word else [word])]
        if words[1] == "data":
            words[words.index(HUB)] = "fineweb-edu"
            words[words.index("--train-tokens") + 1], words[words.index("--validation-tokens") + 1] = "9000", "600"
            words += ["--vocab-size", "300"]
        elif words[1] == "train":
            words += ["--depth", "1", *sizes]
        elif words[2] == "tasks":
            words += ["--data", "eval"]
        shown = run_command(words, capsys)
    assert "Maglev (λ=0.1)" in shown and "lifted" in shown and "paper" in shown
    kept = {run["recipe"]: run for run in json.loads(Path("results/d20.json").read_text())["runs"]}
    assert {recipe: (len(run["bpb"]), len(run["tasks"])) for recipe, run in kept.items()} == {
        "swa-ssss": (1, 1),
        "maglev-shared-0.1": (2, 1),
    }
    head = Path("table/table.md").read_text().splitlines()[0]
    assert "FW BPB" in head and "Avg Acc" in head and "fineweb-edu" not in head
    check_checkpoint(Path("runs/swa-ssss"))
    check_checkpoint(Path("runs/maglev-shared-0.1"))


def checkpoint_bytes(config: RunConfig) -> int:
    """As the page counts them."""
    counts = describe(config)["parameters"]
    matrices = counts["blocks"] + counts["memory_projections"] + counts["prefiller"]
    return 4 * counts["trained"] + 4 * matrices + 8 * (counts["trained"] - matrices)


def check_checkpoint(run: Path) -> None:
    found = newest(run, pytest.fail)
    assert found is not None
    size = sum(path.stat().st_size for path in found.folder.glob("*.safetensors"))
    assert size == pytest.approx(checkpoint_bytes(read_config(run)), rel=0.03)


def test_hours_and_bytes_follow_from_what_was_measured() -> None:
    text = (REPOSITORY / DOCUMENT).read_text(encoding="utf-8")
    measured = json.loads((REPOSITORY / "results" / "train-d20-h200.json").read_text())["rows"]
    rates = sorted({round(row["tokens_per_s"]) for row in measured}, reverse=True)
    rows = re.findall(r"^\| [^|]+ \| ([\d,]+) \| (\d+) \| ([\d.]+) \|$", text, re.MULTILINE)
    assert [int(rate.replace(",", "")) for rate, _, _ in rows] == rates
    for rate, alone, of_eight in rows:
        hours = 43_515_904_000 / int(rate.replace(",", "")) / 3600
        assert round(hours) == int(alone) and float(of_eight) == pytest.approx(hours / 8, rel=0.03)
    plain, separate = (checkpoint_bytes(run_config(name)) / 1e9 for name in ("maglev-shared-0.1", "maglev-separate-1"))
    assert f"{plain:.1f} GB, and {separate:.1f} GB with a separate Q" in text
    flops = {name: describe(run_config(name))["flops_per_token"]["training"] for name in PAPER}
    lrt, full, own = (flops[name] / flops["swa-ssss"] for name in ("lrt-ssss", "lrt-slsl", "maglev-shared-0.1"))
    assert flops["maglev-separate-1"] == flops["maglev-shared-0.1"]
    told = f"LRT (SSSS) {lrt:.2f} x the FLOPs of SWA, LRT (SLSL) {full:.2f} x, Maglev {own:.2f} x, shared or separate"
    assert told in " ".join(text.split())


def test_the_small_table_has_every_row(calls: list[list[str]]) -> None:
    script = load_script("benchmarks/small_table.py")
    asked = [script.parse(words[2:]) for words in calls if words[1].endswith("small_table.py")]
    seeds: dict[str, set[int]] = {}
    for arguments in asked:
        if arguments.verb == "rows":
            assert (arguments.depth, arguments.window, arguments.out.name) == (8, 256, "small-table.json")
            assert arguments.requests and [text.name for text in arguments.text] == ["fineweb-edu"]
            for row in arguments.rows:
                seeds.setdefault(row, set()).update(arguments.seeds)
    assert set(seeds) == {*PAPER, "maglev-closed", "swa-ssss --passes=2", *script.peers.PEERS}
    assert {name for name, own in seeds.items() if len(own) == 3} == THREE_SEEDS
    # twice the tokens are about the FLOPs of Maglev, as far as the page says
    shape = {"model.context": 1024, "model.window": 256, "model.vocab_size": 8192}
    swa, own = (
        describe(run_config(name, 8, shape))["flops_per_token"]["training"]
        for name in ("swa-ssss", "maglev-shared-0.1")
    )
    assert f"{own / swa:.2f} x those of one pass" in " ".join((REPOSITORY / DOCUMENT).read_text().split())
