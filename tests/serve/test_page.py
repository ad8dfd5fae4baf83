"""The page at / in a real browser: write, stream, stop, continue, fork, by keyboard, on a phone and on a desk."""

import re
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

import pytest

from tests.processes import Processes
from tests.serve.browser import Browser, browsing
from tests.serve.running import NAME, Running, serving
from tests.small_runs import Train

SIZES = {"phone": (390, 844, True), "desktop": (1200, 800, False)}
WRITTEN = "document.querySelectorAll('#text .written').length"
TEXT = "document.getElementById('text').textContent"
LISTED = "now.base && document.getElementById('sessions').value === now.base"
"""The last thing that the page asks for after a text."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("browser")) as found:
        yield found


def enabled(id: str) -> str:
    return f"!document.getElementById('{id}').disabled"


def set_value(browser: Browser, id: str, value: object) -> None:
    browser.value(f"document.getElementById('{id}').value = '{value}'")
    browser.value(f"document.getElementById('{id}').dispatchEvent(new Event('input'))")


def styles(browser: Browser, name: str) -> list[float]:
    """Of every token that was written."""
    tokens = "[...document.querySelectorAll('#text .written')]"
    return browser.value(f"{tokens}.map(token => Number(token.style.getPropertyValue('{name}')))")


def opened(browser: Browser, server: Running, size: str, url: str = "", scheme: str = "light") -> None:
    browser.tab()
    browser.size(*SIZES[size])
    browser.scheme(scheme)
    browser.open(url or server.url)
    browser.until(f"document.getElementById('model')?.textContent === '{NAME}'")
    browser.until("document.getElementById('sessions').options.length > 0")
    # what is drawn may be the end of the document at any token
    set_value(browser, "temperature", 0)


def test_a_page_answers_for_its_own_complaints_alone(browser: Browser, server: Running) -> None:
    opened(browser, server, "desktop")
    browser.value("setInterval(() => fetch('v1/nothing'), 5); 0")
    browser.until("performance.getEntriesByType('resource').some(each => each.name.endsWith('nothing'))")
    assert any("v1/nothing" in complaint for complaint in browser.complaints)
    opened(browser, server, "desktop")
    browser.value("new Promise(done => setTimeout(done, 200))")
    assert browser.complaints == []


@pytest.mark.parametrize(("size", "scheme"), [("phone", "dark"), ("desktop", "light")])
def test_a_text_is_written_stopped_continued_and_forked(
    browser: Browser, server: Running, size: str, scheme: str, tmp_path: Path
) -> None:
    opened(browser, server, size, scheme=scheme)
    assert browser.value("document.documentElement.scrollWidth <= window.innerWidth"), "it scrolls sideways"
    set_value(browser, "length", 3000)
    # by keyboard alone from here on
    browser.tab_to("prompt")
    browser.press("Enter", control=True)
    browser.until(f"{WRITTEN} > 5")
    assert not browser.value(enabled("write")) and browser.value(enabled("stop"))
    browser.press("Escape")
    browser.until(enabled("write"))
    stopped = browser.value(TEXT)
    assert stopped.startswith("Once upon a time") and browser.value(WRITTEN) < 3000

    set_value(browser, "length", 12)
    browser.tab_to("continue")
    browser.press("Enter")
    browser.until(f"{enabled('fork')} && {enabled('write')}")
    continued = browser.value(TEXT)
    assert continued.startswith(stopped) and len(continued) > len(stopped)
    # going on is the same text as if it had not been stopped
    whole = server.text(prompt="Once upon a time", max_tokens=browser.value("now.written"), temperature=0)
    assert continued == "Once upon a time" + whole

    name = browser.value("now.base")
    browser.tab_to("fork")
    browser.press(" ")
    browser.until(f"now.base !== '{name}'")
    forked = browser.value("now.base")
    browser.tab_to("continue")
    browser.press("Enter")
    browser.until(f"{enabled('write')} && {TEXT}.length > {len(continued)}")
    sessions = {session["name"] for session in server.ask("GET", "/v1/sessions").json["data"]}
    assert {name, forked} <= sessions
    browser.screenshot(tmp_path / f"page-{size}.png")
    assert (tmp_path / f"page-{size}.png").stat().st_size > 10_000
    assert browser.complaints == []


def test_it_works_with_a_key(browser: Browser, processes: Processes, run: Path, tmp_path: Path) -> None:
    key = "a-key-of-sixteen-characters-or-more"
    with serving(processes, run, tmp_path, key=key) as server:
        opened(browser, server, "desktop", f"http://anyone:{key}@127.0.0.1:{server.port}/")
        set_value(browser, "length", 5)
        browser.value("write()")
        browser.until(f"{enabled('fork')} && {enabled('write')} && {LISTED}")
        assert browser.value("now.written") == 5
    assert browser.complaints == []


def test_the_state_stays_and_the_cache_grows(browser: Browser, server: Running) -> None:
    opened(browser, server, "desktop")
    seen = []
    for _ in range(2):
        set_value(browser, "length", 20)
        browser.value("now.written ? goOn() : write()")
        browser.until(f"{enabled('write')} && now.base")
        shown = "['state', 'cache', 'read'].map(id => document.getElementById(id).textContent)"
        seen.append(browser.value(shown))
    assert seen[0][0] == seen[1][0] and seen[0][1] != seen[1][1] and int(seen[0][2]) > 0
    odd, moved = styles(browser, "--odd"), styles(browser, "--moved")
    assert all(0 <= value <= 1 for value in odd + moved) and len(set(odd)) > 3 and len(set(moved)) > 3
    assert browser.complaints == []


@pytest.mark.parametrize(("size", "scheme"), [("phone", "light"), ("desktop", "dark")])
def test_memory_is_drawn_token_by_token(browser: Browser, server: Running, size: str, scheme: str) -> None:
    opened(browser, server, size, scheme=scheme)
    set_value(browser, "length", 130)
    spoken = "document.getElementById('trace').getAttribute('aria-label')"
    assert browser.value(spoken) == "No token is written yet."
    browser.value("write()")
    browser.until(f"{enabled('write')} && now.base")
    (choice,) = server.complete(prompt="Once upon a time", max_tokens=130, temperature=0, memory=True)["choices"]
    changes, gates = choice["memory_change"], choice["memory_gate"]
    # a bar for each of the last tokens, in a lane of its own for each of the two
    drawn = "[...document.querySelectorAll('#trace path')].map(path => path.getAttribute('d').split('M').length - 1)"
    assert browser.value(drawn) == [100, 100]
    assert colours(browser, "#trace path") == colours(browser, ".key b.flat, .key b.gate", "color")
    assert f"memory change {changes[-1]:.2f}, {mean(changes[-100:]):.2f} on average" in browser.value(spoken)
    assert f"memory gate {gates[-1]:.2f}, {mean(gates[-100:]):.2f} on average" in browser.value(spoken)
    titles = browser.value("[...document.querySelectorAll('#text .written')].map(token => token.title)")
    assert f"memory change {changes[0]:.3f}, memory gate {gates[0]:.3f}" in titles[0]

    browser.tab_to("table")
    browser.press("Enter")
    browser.until("document.getElementById('rows').getBoundingClientRect().height > 0")
    columns = browser.value("[...document.querySelectorAll('#columns th')].map(cell => cell.textContent)")
    assert columns == ["token", "probability", "memory change", "memory gate"]
    rows = browser.value("[...at('rows').rows].map(row => [...row.cells].map(cell => cell.textContent))")
    assert [row[2:] for row in rows] == [[f"{a:.3f}", f"{b:.3f}"] for a, b in zip(changes, gates)][:-101:-1]
    browser.press("Tab")
    assert browser.value("document.activeElement.classList.contains('scroll')"), "the table cannot be scrolled by keys"
    assert browser.value("document.documentElement.scrollWidth <= window.innerWidth"), "it scrolls sideways"
    # another text begins anew
    set_value(browser, "length", 3)
    browser.value("write()")
    browser.until(f"{enabled('write')} && now.written === 3")
    assert browser.value(drawn) == [3, 3] and browser.value("at('rows').rows.length") == 3
    assert browser.complaints == []


def colours(browser: Browser, selector: str, name: str = "stroke") -> list[str]:
    """Those that are seen, each once."""
    shown = f"[...document.querySelectorAll('{selector}')].map(each => getComputedStyle(each)['{name}'])"
    return list(dict.fromkeys(browser.value(shown)))


def test_of_a_model_without_memory_nothing_is_said_about_it(
    browser: Browser, processes: Processes, trained: Train, tmp_path: Path
) -> None:
    with serving(processes, trained("swa-ssss"), tmp_path) as server:
        (choice,) = server.complete(prompt="a", max_tokens=3, memory=True)["choices"]
        assert not any("memory" in name for name in choice)
        opened(browser, server, "desktop")
        set_value(browser, "length", 20)
        browser.value("write()")
        browser.until(f"{enabled('write')} && {LISTED}")
        assert "emory" not in browser.value("document.body.innerText")
        assert browser.value("now.written") == 20 and len(set(styles(browser, "--odd"))) > 3
    assert browser.complaints == []


def test_a_length_that_is_none_writes_nothing(browser: Browser, server: Running) -> None:
    opened(browser, server, "desktop")
    for wrong in ("", 0, 10**9):
        set_value(browser, "length", wrong)
        browser.value("write()")
        assert browser.value("document.activeElement.id") == "length" and browser.value(enabled("write"))
    assert browser.value(TEXT) == ""


def test_a_session_goes_on_with_what_it_has_read(browser: Browser, server: Running) -> None:
    usage = server.complete(prompt="Once upon a time", max_tokens=30, temperature=0, save_as="long-tale")["usage"]
    opened(browser, server, "desktop")
    browser.value("at('sessions').value = 'long-tale'; choose()")
    assert browser.value("at('read').textContent") == str(usage["total_tokens"])
    set_value(browser, "length", 5)
    browser.value("goOn()")
    browser.until(f"{enabled('write')} && now.written === 5")
    assert browser.value("now.read") == usage["total_tokens"] and browser.value("at('cache').textContent") != "0 B"
    server.ask("DELETE", "/v1/sessions/long-tale")
    browser.value("at('sessions').value = 'long-tale'; choose()")
    browser.until("document.getElementById('said').classList.contains('wrong')")


def test_an_error_is_shown_and_not_thrown(browser: Browser, server: Running) -> None:
    opened(browser, server, "desktop")
    browser.value("facts.name = 'another'")
    browser.value("write()")
    browser.until("document.getElementById('said').classList.contains('wrong')")
    assert NAME in browser.value("document.getElementById('said').textContent")


def test_every_field_has_a_name(browser: Browser, server: Running) -> None:
    opened(browser, server, "phone")
    unnamed = "[...document.querySelectorAll('input,select,textarea')].filter(e => !e.labels.length).map(e => e.id)"
    assert browser.value(unnamed) == []
    small = "[...document.querySelectorAll('button')].filter(e => e.getBoundingClientRect().height < 40).map(e => e.id)"
    assert browser.value(small) == []


def test_the_page_is_one_file_and_runs_nothing_else(server: Running) -> None:
    answer = server.ask("GET", "/")
    page = answer.body.decode()
    assert answer.status == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
    assert not re.search(r"(src|href)=\"(?!data:)", page) and "http://" not in page and "https://" not in page
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy


def test_memory_is_told_where_it_is_asked_for(server: Running) -> None:
    (choice,) = server.complete(prompt="a", max_tokens=7, temperature=0, memory=True)["choices"]
    assert len(choice["memory_change"]) == 7 and all(0 < change < 3 for change in choice["memory_change"])
    assert len(choice["memory_gate"]) == 7 and all(0 < gate < 2 for gate in choice["memory_gate"])
    (model,) = server.ask("GET", "/v1/models").json["data"]
    assert model["memory"] == ["memory_change", "memory_gate"]
    (plain,) = server.complete(prompt="a", max_tokens=7, temperature=0)["choices"]
    assert set(choice) - set(plain) == set(model["memory"]) and plain["text"] == choice["text"]
