"""What documents say of text beyond the windows is what was measured; its table on the site."""

import json
from types import ModuleType
from typing import Any

import pytest

from tests.documents import REPOSITORY
from tests.scripts import load_script

Rows = dict[str, dict[str, Any]]


def load(name: str) -> Rows:
    runs = json.loads((REPOSITORY / "results" / name).read_text(encoding="utf-8"))["runs"]
    return {run["label"]: run for run in runs}


@pytest.fixture(scope="module")
def own() -> Rows:
    return load("history-d4-cpu.json") | load("history-d4-own-q-cpu.json")


@pytest.fixture(scope="module")
def shuffled() -> Rows:
    return load("history-d4-shuffled-cpu.json") | load("history-d4-own-q-shuffled-cpu.json")


def bare(value: float, digits: int = 4) -> str:
    return f"{value:.{digits}f}".replace("0.", ".", 1)


def words_of(name: str) -> str:
    return " ".join((REPOSITORY / name).read_text(encoding="utf-8").split())


def test_what_the_readme_and_the_results_say_is_measured(own: Rows, shuffled: Rows) -> None:
    readme, results, closed = words_of("README.md"), words_of("docs/results.md"), own["closed-rollout-128"]
    last, far = closed["rows"][-1], shuffled["closed-rollout-128"]["rows"][-1]
    assert (last["reaches"], closed["plain_reach"], closed["step"]) == (8, 60, 800)
    recurrent, lifted = bare(last["gain_recurrent"]), bare(last["gain_lifted"])
    gained = f"{recurrent} ± {bare(last['error_recurrent'])} bits per byte"
    assert f"gains {gained} on own memories from reading eight reaches and not one, {lifted} on Q's" in readme
    assert f"shuffled {bare(far['gain_recurrent'])} and {bare(far['gain_lifted'])}. A" in readme
    full, none = (rows["transformer-slsl"]["rows"][-1]["gain_recurrent"] for rows in (own, shuffled))
    assert f"A Transformer (SLSL) gains {bare(full)}, and loses {bare(-none)} where it is shuffled" in readme
    assert f"{gained} gained by eight reaches over one, as much from shuffled text" in results
    assert bare(far["gain_recurrent"]) == recurrent
    assert f"{lifted} lifted, {bare(far['gain_lifted'])} from shuffled text; full layers {bare(full)} (" in results
    trained = [run for label, run in own.items() if label.startswith("closed-rollout")]
    most = max(row["gain_prefiller"] for run in trained for row in run["rows"])
    q, p = (own["closed-own-q"]["rows"][-1][f"gain_{source}"] for source in ("prefiller", "lifted"))
    assert (
        f"(as a predictor it gains {bare(most)} at most), and that what one of its own looks up ({bare(q)})" in results
    )
    assert f"does not reach P ({bare(p)})" in results
    # all of one table are of the same places
    assert len({run["places"] for rows in (own, shuffled) for run in rows.values()}) == 1


def test_the_table_of_the_log_is_measured(own: Rows, shuffled: Rows) -> None:
    log = (REPOSITORY / "docs" / "log.md").read_text(encoding="utf-8")
    entry = log[log.index("## 2026-11-19: what text beyond") :].split("\n## ")[0]
    lines = [
        [cell.strip().replace("**", "") for cell in line.split("|")[1:-1]] for line in entry.splitlines() if "|" in line
    ][2:]
    names = {"SWA": "swa-ssss", "Transformer SLSL": "transformer-slsl", "Maglev shared 0.1": "maglev-shared-0.1"}
    names |= {"Maglev separate 0.1": "maglev-separate-0.1", "`closed`, rollouts of 4": "closed-rollout-4"}
    sources = {"-": "recurrent", "Q itself": "prefiller", "Q itself, not trained to predict": "prefiller"}
    told, run = 0, ""
    for name, memory, first, *gained in lines:
        run = names.get(name, name.strip("`")) or run
        source = sources.get(memory, memory)
        rows = own[run]["rows"]
        assert first == f"{rows[0][f'bpb_{source}']:.4f}", (run, source)
        expected = [bare(row[f"gain_{source}"]) for row in rows[1:]]
        assert [cell.split(" ±")[0] for cell in gained[:3]] == (["0", "0", "0"] if run == "swa-ssss" else expected)
        for cell, row in ((gained[2], rows[-1]), (gained[3], shuffled[run]["rows"][-1])):
            if run != "swa-ssss":
                assert cell == f"{bare(row[f'gain_{source}'])} ± {bare(row[f'error_{source}'])}", (run, source)
        told += 1
    assert told == sum(len(run["sources"]) for run in own.values())


def test_the_site_shows_gains_and_one_document_without_an_error() -> None:
    site: ModuleType = load_script("tools/site_results.py")
    content = {
        "runs": [
            {"label": "x", "sources": ["recurrent"], "memory": True, "far": "foreign", "plain_reach": 7, "rows": [
                {"reaches": 1, "bpb_recurrent": 2.0, "gain_recurrent": 0.0, "error_recurrent": None},
                {"reaches": 2, "bpb_recurrent": 1.5, "gain_recurrent": 0.5, "error_recurrent": None},
                {"reaches": 4, "bpb_recurrent": 2.5, "gain_recurrent": -0.5, "error_recurrent": 0.125},
            ]}
        ]
    }  # fmt: skip
    last = site.history(content).splitlines()[-1]
    assert [cell.strip() for cell in last.split("|")[1:-1]] == [
        "`x`", "recurrent", "foreign", "2.0000", "+0.50000", "-0.50000 ± 0.12500",
    ]  # fmt: skip
