"""The page at / in a real browser: write, stream, stop, continue, fork, by keyboard, on a phone and on a desk."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve.browser import Browser, browsing
from tests.serve.running import NAME, Running

SIZES = {"phone": (390, 844, True), "desktop": (1200, 800, False)}
WRITTEN = "document.querySelectorAll('#text .written').length"
TEXT = "document.getElementById('text').textContent"


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


def opened(browser: Browser, server: Running, size: str) -> None:
    browser.complaints.clear()
    browser.size(*SIZES[size])
    browser.open(server.url)
    browser.until(f"document.getElementById('model')?.textContent === '{NAME}'")
    browser.until("document.getElementById('sessions').options.length > 0")


@pytest.mark.parametrize(("size", "scheme"), [("phone", "dark"), ("desktop", "light")])
def test_a_text_is_written_stopped_continued_and_forked(
    browser: Browser, server: Running, size: str, scheme: str, tmp_path: Path
) -> None:
    browser.scheme(scheme)
    opened(browser, server, size)
    assert browser.value("document.documentElement.scrollWidth <= window.innerWidth"), "it scrolls sideways"
    set_value(browser, "temperature", 0)
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


def test_memory_change_is_told_where_it_is_asked_for(server: Running) -> None:
    (choice,) = server.complete(prompt="a", max_tokens=7, temperature=0, memory=True)["choices"]
    assert len(choice["memory_change"]) == 7 and all(0 < change < 3 for change in choice["memory_change"])
    (choice,) = server.complete(prompt="a", max_tokens=7, temperature=0)["choices"]
    assert "memory_change" not in choice
