"""The site builds without a warning, its results are those of the files, and nothing in it comes from elsewhere."""

import html
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from maglev.evaluate.table_facts import collect, save_facts
from tests.documents import REPOSITORY, options_exist, target_exists
from tests.evaluate.table_runs import make_run
from tests.scripts import load_script

pytest.importorskip("mkdocs", reason="needs mkdocs (the extra docs)")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)],
        cwd=REPOSITORY,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def results() -> ModuleType:
    return load_script("tools/site_results.py")


def shown(page: Path) -> str:
    """The words of a page."""
    article = re.search(r"<article.*?</article>", page.read_text(encoding="utf-8"), re.DOTALL)
    assert article is not None
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", article[0])))


def test_every_page_is_there(site: Path) -> None:
    pages = [path.relative_to(REPOSITORY / "docs") for path in (REPOSITORY / "docs").rglob("*.md")]
    assert len(pages) > 20
    for page in [*pages, Path("CONTRIBUTING.md"), Path("CHANGELOG.md")]:
        assert (site / page.with_suffix(".html")).is_file(), page


def test_links_that_leave_the_folder_of_documents_arrive(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        for link in re.findall(r'(?:href|src)="(?![a-z]+:|#)([^"#?]+)', text):
            assert page.name == "404.html" or (page.parent / link).exists(), (page.name, link)


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not re.search(r'<(?:script|img|iframe)[^>]+src="(?:https?:)?//', text), page
        assert not re.search(r'<link[^>]+href="(?:https?:)?//(?![^"]*"[^>]*rel="canonical")', text), page


def test_the_reference_has_docstrings_and_verbs(site: Path) -> None:
    assert "Read text into a new state; the one given stays as it is." in shown(site / "reference" / "index.html")
    assert "consistency_weight" in shown(site / "reference" / "config.html")
    verbs = shown(site / "reference" / "cli.html")
    for verb in ("maglev data prepare", "maglev eval recall", "maglev serve", "--api-key-file"):
        assert verb in verbs


def test_results_are_those_of_the_files(site: Path, results: ModuleType) -> None:
    page = shown(site / "results.html")
    texts = [content for _, content, kind in results.found() if kind == "text"]
    assert texts
    for content in texts:
        for row in content["rows"]:
            assert f"{row['bpb_recurrent']:.4f}" in page
    for path, _, _ in results.found():
        assert path.name in page and (site / "results" / path.name).is_file()
    assert "<!-- results" not in (site / "results.html").read_text()


def test_recall_is_shown_by_distance(results: ModuleType) -> None:
    facts = {"recipe": "swa-ssss", "depth": 2, "window": 8, "pairs": 4, "variant": "pairs", "steps": 9, "settings": {}}
    facts |= {"cost": 0.5}
    rows = [
        facts | {"memory": memory, "distance": distance, "seed": seed, "accuracy": accuracy}
        for memory, distance, seed, accuracy in (
            ("lifted", "0-1", 0, 1.0),
            ("recurrent", "0-1", 0, 0.5),
            ("recurrent", "0-1", 1, 0.7),
            ("recurrent", "1-2", 0, 0.25),
        )
    ]
    head, _, lifted, recurrent = results.recall({"rows": rows}).splitlines()
    assert head.endswith("| seeds | cost | memory | 0-1 | 1-2 |")
    assert lifted.endswith("| 1 | 0.50 | lifted | 1.000 |  |")
    assert recurrent.endswith("| 2 | 0.50 | recurrent | 0.600 | 0.250 |")
    # asked otherwise it is another line
    other = [row | {"query_share": 0.1, "trained": {"query_share": 0.75}} for row in rows[1:2]]
    *_, recurrent, sparse = results.recall({"rows": rows + other}).splitlines()
    assert recurrent.endswith("| 2 | 0.50 | recurrent | 0.600 | 0.250 |") and sparse.endswith(
        "| recurrent | 0.500 |  |"
    )
    assert "questions at 0.1 of the places, trained with query_share 0.75" in sparse


def test_options_and_lengths_are_shown(results: ModuleType) -> None:
    sizes = {"deployed": 5000, "prefiller": 4, "state_bytes": 8456, "train_tokens_per_s": 1234, "step_tokens_per_s": 56}
    row = {"option": "Q full", "seed": 0, "metric": "recall", "recurrent": 0.5, "lifted": 0.75, "contraction_step": 0.6}
    plain = row | {"option": "swa", "lifted": None, "contraction_step": None}
    failed = {"option": "teacher", "seed": 0, "error": "no time"}
    head, _, *lines = results.options({"rows": [row | sizes, plain | sizes, failed]}).splitlines()
    assert "recall, recurrent" in head and len(lines) == 2
    assert lines[0] == "| Q full | 0 | 0.5000 | 0.7500 | 0.60 | 5,000 | 4 | 8,456 | 1,234 | 56 | - |"
    assert lines[1].startswith("| swa | 0 | 0.5000 | - | - | 5,000 |")
    parts = [{"first": first, "last": last, "bpb_recurrent": 1.5} for first, last in ((0, 7), (8, 15), (16, 31))]
    runs = [
        {"recipe": name, "seed": 0, "trained_context": 8, "by_position": parts} for name in ("swa-ssss", "lrt-ssss")
    ]
    head, _, *lines = results.length({"runs": runs}).splitlines()
    assert head == "| positions | `swa-ssss`, seed 0 | `lrt-ssss`, seed 0 |"
    assert lines[-1] == "| 2 to 4 | 1.5000 | 1.5000 |"


def test_a_small_table_is_shown_as_the_verb_writes_it(
    results: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [make_run(tmp_path, "swa-ssss", seed, recurrent=1.3 + seed / 100) for seed in (0, 1)]
    facts = [run | {"machine": {"device": "a GPU", "dtype": "bfloat16", "torch": "2.11"}} for run in collect(runs)]
    save_facts(tmp_path / "small-table.json", facts)
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    shown = results.expanded("<!-- results: table -->")
    assert "| SWA (SSSS) | ours | recurrent | 2 | 1.3050 ± 0.0071 |" in shown
    assert "small-table.json): a GPU, bfloat16, torch 2.11; `python benchmarks/small_table.py`." in shown


def test_every_command_that_made_results_exists(results: ModuleType) -> None:
    for kind in results.KINDS.values():
        words = kind.command.split()
        if words[0] == "python":
            assert (REPOSITORY / words[1]).is_file()
        elif words[0] == "make":
            target_exists(words)
        else:
            options_exist(words)


def test_pictures_are_ours_and_whole() -> None:
    from xml.etree import ElementTree

    pictures = sorted((REPOSITORY / "docs" / "images").glob("*.svg"))
    assert {"idea", "window", "reach", "injection", "state", "reading"} <= {path.stem for path in pictures}
    for path in pictures:
        ElementTree.parse(path)
