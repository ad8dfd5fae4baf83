"""The report: one file, nothing from outside, every number with its memory source."""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from maglev.errors import RequestError
from maglev.evaluate.figures import OTHER_COLOURS, RECIPE_COLOURS, colours, running_average, short_count
from maglev.evaluate.report import Curve, Report, RunReport, Sample, StateGrowth, write_report

HOSTILE = "<script>alert('&')</script> $x^2$"
VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Checks that elements close in order, and collects tags, ids, links and visible text."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)
        self.collect(attributes)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.collect(attributes)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.text += data

    def collect(self, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name == "id":
                self.ids.append(value or "")
            if name in {"href", "src", "xlink:href", "srcset", "data", "action"}:
                self.links.append(value or "")


def example() -> Report:
    steps = list(range(1, 101))
    falling = Curve(steps, [5 / step + 3 for step in steps])
    positions = Curve([8, 24, 40], [2.5, 2.0, 1.9])
    swa = RunReport("swa-ssss", "SWA", falling, None, {}, {"recurrent": 1.9123}, {"recurrent": positions}, 1032)
    maglev = RunReport(
        "maglev-shared-0.1",
        f"Maglev {HOSTILE}",
        falling,
        Curve(steps, [0.1] * 100),
        {name: Curve([50, 100], [0.9, 0.7]) for name in ("pass", "step")},
        {"recurrent": 1.8897, "lifted": 1.8841, "refined": float("nan")},
        {"recurrent": positions, "lifted": positions},
        state_bytes=1032,
        gap=Curve([50, 100], [0.02, 0.01]),
        memory_share=[Curve([50, 100], [0.4, 0.5]), Curve([50, 100], [0.5, 0.3])],
    )
    return Report(
        title=f"A title {HOSTILE}",
        runs=[swa, maglev],
        baseline="swa-ssss",
        introduction=HOSTILE,
        growth=StateGrowth([64, 128, 256], [6400, 12800, 25600], [1032] * 3),
        samples=[Sample("Maglev", f"prompt {HOSTILE}", f"text {HOSTILE}")],
        facts={"machine": HOSTILE, "steps": 100},
        commands=[f"maglev generate --prompt {HOSTILE}"],
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    pytest.importorskip("matplotlib")
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report(path, example())
    return path.read_text(encoding="utf-8")


def test_well_formed_with_unique_ids(source: str) -> None:
    page = Page(source)
    assert not page.open
    assert len(set(page.ids)) == len(page.ids) > 0


def test_self_contained(source: str) -> None:
    page = Page(source)
    assert not page.tags & {"script", "link", "img", "iframe", "object", "base"}
    assert {"svg", "style"} <= page.tags
    assert all(link.startswith("#") and link[1:] in page.ids for link in page.links)
    assert all(reference in page.ids for reference in re.findall(r"url\(#([^)]*)\)", source))
    assert not re.search(r"https?:|@import|url\((?!#)", source)


def test_texts_are_escaped(source: str) -> None:
    assert "<script" not in source
    # title twice, introduction, label (card, verdict, table, three legends), sample twice, fact, command
    assert Page(source).text.count(HOSTILE) >= 10


def test_numbers_name_their_memory_source(source: str) -> None:
    for value, memory in (("1.9123", "recurrent"), ("1.8897", "recurrent"), ("1.8841", "lifted")):
        assert f'<span class="value">{value}</span><span class="unit">bits per byte, {memory}</span>' in source
    text = Page(source).text
    assert "0.0226 bits per byte fewer than SWA" in text
    assert "SWA, recurrent" in text and "memory: recurrent" in text
    assert "nan" not in text and "refined</th>" not in source


def test_what_says_whether_the_loop_holds_is_drawn(source: str) -> None:
    text = Page(source).text
    for title in ("Whether the loop holds", "What closing the loop costs", "How much of attention is memory"):
        assert title in text
    assert "bits per byte, recurrent less lifted" in text and "last layer" in text


def test_ink_follows_the_page(source: str) -> None:
    assert "currentColor" in source and "#010203" not in source and "prefers-color-scheme: dark" in source
    assert not re.search(r"(?:fill|stroke): #(?:000000|ffffff)", source)


def test_worse_is_said_as_plainly(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    empty = Curve([], [])
    runs = [RunReport("a", "A", empty, bits_per_byte={"recurrent": 1.0})]
    runs += [RunReport("b", "B", empty, bits_per_byte={"recurrent": 1.5})]
    write_report(tmp_path / "r.html", Report("t", runs, baseline="a"))
    assert "B needs 0.5000 bits per byte more than A" in (tmp_path / "r.html").read_text()


def test_a_number_without_a_known_source_is_a_bug(tmp_path: Path) -> None:
    run = RunReport("a", "A", Curve([], []), bits_per_byte={"bpb": 1.0})
    with pytest.raises(AssertionError, match="unknown memory source"):
        write_report(tmp_path / "r.html", Report("t", [run]))


def test_same_content_same_bytes(tmp_path: Path, source: str) -> None:
    write_report(tmp_path / "again.html", example())
    assert (tmp_path / "again.html").read_text(encoding="utf-8") == source


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RequestError, match="extra 'report'"):
        write_report(tmp_path / "r.html", example())
    assert not (tmp_path / "r.html").exists()


def test_colours_are_stable_and_apart() -> None:
    names = [*RECIPE_COLOURS, *(f"mine-{n}" for n in range(len(OTHER_COLOURS)))]
    chosen = colours(names)
    assert len(set(chosen.values())) == len(names)
    assert colours(["swa-ssss"])["swa-ssss"] == chosen["swa-ssss"]
    assert colours(["swa-ssss", "mine-0"])["mine-0"] == colours(["mine-0"])["mine-0"]


def test_running_average() -> None:
    assert running_average([2.0] * 50) == [2.0] * 50
    holes = running_average([1.0, float("nan")] * 100)
    assert holes[-1] == 1.0 and holes[100] == 1.0
    assert running_average([]) == []


def test_short_counts() -> None:
    assert short_count(65536, 1024, ("", "k", "M")) == "64 k"
    assert short_count(1_500_000, 1000, ("B", "kB", "MB")) == "1.5 MB"
