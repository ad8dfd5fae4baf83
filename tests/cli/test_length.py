"""`maglev eval length`: far beyond the trained length, several runs at the same positions."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import maglev
from maglev.__main__ import main
from maglev.data.loader import Loader
from maglev.data.shards import open_data
from maglev.evaluate.length import doubling_edges
from tests.small_runs import Train, one_line

RECIPES = ("swa-ssss", "maglev-shared-0.1")
# rows of the small runs
CONTEXT = 32


@pytest.mark.parametrize(
    ("trained", "context", "edges"),
    [(8, 64, [0, 8, 16, 32, 64]), (8, 16, [0, 8, 16]), (8, 40, [0, 8, 16, 32, 40]), (5, 10, [0, 5, 10])],
)
def test_ranges_double(trained: int, context: int, edges: list[int]) -> None:
    assert doubling_edges(trained, context) == edges


def test_the_numbers_are_those_of_stepping_through_long_rows(
    trained: Train, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, plot = [trained(recipe) for recipe in RECIPES], tmp_path / "length.svg"
    words = ["eval", "length", *map(str, runs), "--data", str(data), "--times", "4", "--rows", "2"]
    assert main([*words, "--plot", str(plot), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["runs"]
    assert plot.read_text().count("<svg") == 1
    tokens = open_data(data)
    batch = Loader(tokens, "validation", 4 * CONTEXT, seed=0, shuffle=False).batch(range(2))
    sizes = torch.tensor([len(piece) for piece in tokens.tokenizer.token_bytes])
    for run, recipe, value in zip(runs, RECIPES, found, strict=True):
        assert (value["recipe"], value["memory"], value["context"]) == (recipe, "recurrent", 4 * CONTEXT)
        parts = value["by_position"]
        assert [(part["first"], part["last"]) for part in parts] == [(0, 31), (32, 63), (64, 127)]
        decoder = maglev.load(run, device="cpu").decoder
        state, bits = decoder.initial_state(2), []
        for tokens_now, target in zip(torch.tensor(batch.tokens).T, torch.tensor(batch.targets).T, strict=True):
            with torch.no_grad():
                memory, state = decoder.step(tokens_now, state)
                bits.append(F.cross_entropy(decoder.readout(memory).double(), target, reduction="none"))
        assert state.position.tolist() == [128, 128]
        nats, size = torch.stack(bits, 1), sizes[torch.tensor(batch.targets)]
        nats = torch.where(size > 0, nats, 0)
        for part in parts:
            at = slice(part["first"], part["last"] + 1)
            expected = float(nats[:, at].sum() / torch.tensor(2.0).log() / size[:, at].sum())
            assert part["bpb_recurrent"] == pytest.approx(expected, abs=1e-4)


def test_for_people_there_is_a_table_with_differences_to_the_first(
    trained: Train, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [str(trained(recipe)) for recipe in RECIPES]
    assert main(["eval", "length", *runs, "--data", str(data), "--times", "2", "--rows", "1"]) == 0
    out = capsys.readouterr().out
    assert "0 to 1" in out and "1 to 2" in out and out.count("(+") + out.count("(-") == 2
    # a part of the rows leaves no result behind
    assert not list(Path(runs[0]).glob("eval/length-*"))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--times", "1"], "--times is 1"),
        (["--times", "1000000"], "use at most"),
        (["--rows", "-1"], "--rows"),
        (["--plot", "x.gif"], "--plot is x.gif"),
        (["--plot", "/proc/x.svg"], "--plot /proc/x.svg cannot be written"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], told: str, trained: Train, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(trained("swa-ssss"))
    capsys.readouterr()
    assert main(["eval", "length", run, "--data", str(data), *words]) == 2
    assert told in one_line(capsys)


def test_every_run_has_to_speak_the_texts_tokens_before_the_first_is_measured(
    trained: Train, data: Path, other_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [shutil.copytree(trained(recipe), tmp_path / recipe) for recipe in RECIPES]
    shutil.copy(other_data / "tokenizer.json", runs[1] / "tokenizer.json")
    capsys.readouterr()
    assert main(["eval", "length", *map(str, runs), "--data", str(data), "--times", "2"]) == 2
    assert f"the tokenizer of {runs[1]} does not match the data" in one_line(capsys)
    assert not list(runs[0].glob("eval/length-*"))
