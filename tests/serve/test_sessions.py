"""States by name: saved, continued, forked, counted, forgotten, and never lost once acknowledged."""

import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path

import pytest
import torch

from maglev.inference.engine import LanguageModel
from maglev.serve.faults import Fault
from maglev.serve.sessions import DAY, LEFTOVER_SECONDS, Sessions
from tests.processes import Processes
from tests.results import keep_result
from tests.serve.running import Running, serving, start
from tests.small_runs import Train, flip_byte

BAD_NAMES = [
    "",
    ".",
    "..",
    "../x",
    "a/b",
    "a\\b",
    "a.b",
    "-a",
    "_a",
    "a" * 65,
    "ä",
    "a\n",
    "a b",
    "a\x00",
    "%2e%2e",
    "~",
    "C:",
]


@pytest.fixture
def sessions(lm: LanguageModel, tmp_path: Path) -> Sessions:
    return Sessions(tmp_path / "kept", lm, most=3, days=1)


def test_a_state_comes_back_as_it_was(sessions: Sessions, lm: LanguageModel) -> None:
    state = lm.read("some text")
    saved = sessions.save("Name-1_x", state)
    found = sessions.load("Name-1_x")
    assert saved.name == "Name-1_x" and saved.nbytes == state.nbytes
    assert torch.equal(found.memory, state.memory) and found.position == state.position
    sessions.save("Name-1_x", lm.read("another"))
    assert sessions.load("Name-1_x").position != state.position
    assert [session.name for session in sessions.all()] == ["Name-1_x"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_bad_names_reach_no_file(sessions: Sessions, lm: LanguageModel, name: str) -> None:
    for call in (
        lambda: sessions.load(name),
        lambda: sessions.remove(name),
        lambda: sessions.save(name, lm.read("a")),
        lambda: sessions.fork(name, "b"),
        lambda: sessions.fork("b", name),
        lambda: sessions.find(name),
    ):
        with pytest.raises(Fault) as caught:
            call()
        assert caught.value.status == 400
    assert os.listdir(sessions.folder) == []


def test_names_that_differ_in_case_are_two(sessions: Sessions, lm: LanguageModel) -> None:
    sessions.save("a", lm.read("x"))
    sessions.save("A", lm.read("x and y"))
    assert len({path.name.lower() for path in sessions.folder.iterdir()}) == 2


def test_there_are_only_so_many(sessions: Sessions, lm: LanguageModel) -> None:
    state = lm.read("a")
    for name in ("a", "b"):
        sessions.save(name, state)
    with sessions.promise("c"), sessions.promise("c"), sessions.promise("a"):
        with pytest.raises(Fault) as caught, sessions.promise("d"):
            pass
        assert caught.value.status == 409 and caught.value.code == "session_quota"
    with sessions.promise("d"):
        pass
    with pytest.raises(Fault):
        sessions.save("c", state)
        sessions.fork("a", "d")
    sessions.remove("a")
    sessions.fork("b", "d")


def test_old_ones_are_forgotten_and_used_ones_are_not(sessions: Sessions, lm: LanguageModel) -> None:
    for name in ("old", "used"):
        sessions.save(name, lm.read("a"))
        os.utime(sessions.path(name), (time.time() - 0.9 * DAY,) * 2)
    sessions.load("used")
    for name in ("old", "used"):
        path = sessions.path(name)
        os.utime(path, (path.stat().st_mtime - 0.2 * DAY,) * 2)
    with pytest.raises(Fault) as caught:
        sessions.load("old")
    assert caught.value.status == 404
    assert [session.name for session in sessions.all()] == ["used"]
    assert len(os.listdir(sessions.folder)) == 1


def test_what_a_killed_server_left_goes_with_time(sessions: Sessions, lm: LanguageModel) -> None:
    old, new = (sessions.folder / f".partial-{name}.safetensors" for name in ("old", "new"))
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 2 * LEFTOVER_SECONDS,) * 2)
    (sessions.folder / "note.txt").write_text("not ours")
    (sessions.folder / "zz.safetensors").write_text("not ours")
    again = Sessions(sessions.folder, lm, 3, 1)
    assert again.all() == [] and not old.exists() and new.exists()


def test_a_damaged_one_is_told_without_its_path(sessions: Sessions, lm: LanguageModel) -> None:
    sessions.save("a", lm.read("x"))
    flip_byte(sessions.path("a"))
    with pytest.raises(Fault) as caught:
        sessions.load("a")
    assert caught.value.status == 409 and str(sessions.folder) not in caught.value.message


@pytest.mark.parametrize("content", ["pickle", "oversized header", "cut short", "wrong shapes", "empty"])
def test_a_file_that_is_no_state_is_refused(content: str, sessions: Sessions, lm: LanguageModel) -> None:
    """Whoever put it there."""
    state = lm.read("x")
    sessions.save("a", state)
    path = sessions.path("a")
    whole = path.read_bytes()
    if content == "wrong shapes":
        state.inner.memory = state.inner.memory[:, :-1]
        sessions.save("a", state)
    else:
        path.write_bytes(
            {
                "pickle": b"\x80\x04cos\nsystem\n(S'touch pwned'\ntR.",
                "oversized header": (1 << 60).to_bytes(8, "little") + whole[8:],
                "cut short": whole[:-5],
                "empty": b"",
            }[content]
        )
    # the position alone does not show that shapes are wrong
    for use in (sessions.load,) if content == "wrong shapes" else (sessions.load, sessions.tokens):
        with pytest.raises(Fault) as caught:
            use("a")
        assert caught.value.status == 409 and caught.value.code == "session_unusable"
    assert not Path("pwned").exists()


def test_another_models_is_refused(sessions: Sessions, trained: Train, lm: LanguageModel) -> None:
    import maglev

    sessions.lm = maglev.load(trained("swa-ssss"), device="cpu")
    sessions.save("a", sessions.lm.read("x"))
    sessions.lm = lm
    with pytest.raises(Fault) as caught:
        sessions.load("a")
    assert caught.value.status == 409


@pytest.fixture(scope="module")
def text(server: Running) -> str:
    """Two sentences, the second of which goes on from a session."""
    first = server.text(prompt="Once", max_tokens=20, seed=1, save_as="tale")
    return first + server.text(session="tale", prompt=" upon", max_tokens=20, seed=2)


def test_a_session_goes_on_from_where_it_was(server: Running, text: str, lm: LanguageModel) -> None:
    with lm.generate("Once", max_tokens=20, seed=1) as first:
        expected = "".join(first)
    assert text == expected + "".join(lm.generate(" upon", state=first.state, max_tokens=20, seed=2))


def test_a_session_can_be_continued_twice_and_forked(server: Running, text: str) -> None:
    """Going on from a name leaves it as it was, unless it is saved under the same name."""
    on = {"session": "tale", "prompt": " upon", "max_tokens": 20, "seed": 2}
    assert text.endswith(server.text(**on))
    fork = server.ask("POST", "/v1/sessions/tale/fork", {"to": "tale-2"})
    assert fork.status == 200 and fork.json["name"] == "tale-2"
    assert text.endswith(server.text(**on | {"session": "tale-2", "save_as": "tale-2"}))
    assert not text.endswith(server.text(**on | {"session": "tale-2"}))
    assert text.endswith(server.text(**on))


def test_a_session_without_a_prompt_goes_on_at_once(server: Running, text: str, lm: LanguageModel) -> None:
    whole = server.text(prompt="Once", max_tokens=30, temperature=0)
    begun = server.text(prompt="Once", max_tokens=12, temperature=0, save_as="begun")
    assert begun + server.text(session="begun", max_tokens=18, temperature=0) == whole


def test_reading_alone_makes_a_session(server: Running) -> None:
    answer = server.complete(prompt="A prompt to be read once", max_tokens=0, save_as="read")
    assert answer["choices"][0]["text"] == "" and answer["session"]["name"] == "read"
    texts = [server.text(session="read", max_tokens=9, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0] == server.text(prompt="A prompt to be read once", max_tokens=9, seed=1)


def test_a_stream_saves_before_it_ends(server: Running) -> None:
    parts = list(
        server.client().completions.create(
            model="small", prompt="a", max_tokens=5, stream=True, seed=1, extra_body={"save_as": "streamed"}
        )
    )
    assert parts[-1].choices[0].finish_reason == "length"
    assert parts[-1].session["name"] == "streamed"  # type: ignore[attr-defined]
    # one was read, five were written
    assert server.ask("GET", "/v1/sessions/streamed").json["tokens"] == 6


def test_sessions_can_be_listed_and_removed(server: Running) -> None:
    server.complete(prompt="a", max_tokens=1, save_as="short-lived")
    names = [session["name"] for session in server.ask("GET", "/v1/sessions").json["data"]]
    assert "short-lived" in names
    assert server.ask("DELETE", "/v1/sessions/short-lived").json["deleted"]
    for method in ("GET", "DELETE"):
        answer = server.ask(method, "/v1/sessions/short-lived")
        assert answer.status == 404 and answer.error["code"] == "session_not_found"
    assert server.refused(404, session="short-lived")["code"] == "session_not_found"
    assert server.ask("POST", "/v1/sessions/short-lived/fork", {"to": "b"}).status == 404


def test_one_name_is_one_state(server: Running) -> None:
    assert server.refused(400, prompt="a", n=2, save_as="x")["param"] == "save_as"
    assert server.refused(400, prompt=["a", "b"], save_as="x")["param"] == "save_as"


def test_several_ways_on_from_one_state(server: Running, text: str) -> None:
    answer = server.complete(session="tale", prompt=[" upon", ""], n=2, max_tokens=20, seed=2)
    assert text.endswith(answer["choices"][0]["text"])
    assert answer["choices"][2]["text"] == server.text(session="tale", max_tokens=20, seed=2)


def test_many_clients_at_one_session(server: Running) -> None:
    """The last to save wins, and every state that is seen is a whole one."""
    server.complete(prompt="a", max_tokens=0, save_as="shared")

    def go_on(seed: int) -> str:
        return server.text(session="shared", prompt=" b", max_tokens=4, seed=seed, save_as="shared")

    with ThreadPoolExecutor(6) as pool:
        assert len(list(pool.map(go_on, range(24)))) == 24
    assert server.text(session="shared", max_tokens=1) is not None


def test_sessions_outlive_the_server(processes: Processes, run: Path, tmp_path: Path) -> None:
    on = {"session": "kept", "prompt": " upon", "max_tokens": 20, "seed": 2}
    with serving(processes, run, tmp_path) as first:
        first.complete(prompt="Once", max_tokens=20, seed=1, save_as="kept")
        expected = first.text(**on)
    with serving(processes, run, tmp_path) as second:
        assert second.text(**on) == expected


def test_the_quota_is_told(processes: Processes, run: Path, tmp_path: Path) -> None:
    with serving(processes, run, tmp_path, "--session-count", "1") as server:
        server.complete(prompt="a", max_tokens=1, save_as="a")
        assert server.refused(409, prompt="a", save_as="b")["code"] == "session_quota"
        assert server.ask("POST", "/v1/sessions/a/fork", {"to": "b"}).status == 409
        server.complete(session="a", max_tokens=1, save_as="a")


class Savers:
    """Clients that save states under a few names for as long as the server lives, and note what was acknowledged."""

    def __init__(self, server: Running, round: int) -> None:
        self.server, self.round = server, round
        self.acknowledged: dict[str, int] = {}
        self.asked: dict[str, set[int]] = {}
        self.threads = [threading.Thread(target=self.save_on, args=(f"s{index}",)) for index in range(3)]

    def save_on(self, name: str) -> None:
        count = 0
        while True:
            count += 1
            # a prompt of so many tokens, so that the state says which of them it is
            length = 1 + (7 * self.round + count) % 40
            self.asked.setdefault(name, set()).add(length)
            body = {"model": "small", "prompt": [5] * length, "max_tokens": 0, "save_as": name}
            try:
                answer = self.server.ask("POST", "/v1/completions", body, seconds=10)
            except (OSError, HTTPException):
                return
            assert answer.status == 200, answer.body
            self.acknowledged[name] = length
            self.asked[name] = {length}


def kill_while_saving(processes: Processes, run: Path, folder: Path, lm: LanguageModel, kills: int) -> dict[str, int]:
    delays, known, checked, saves = random.Random(kills), dict[str, set[int]](), 0, 0
    for round in range(kills):
        server = start(processes, run, folder)
        savers = Savers(server, round)
        for thread in savers.threads:
            thread.start()
        # a state to lose: a busy machine takes longer for the first than the delays are
        patience = time.monotonic() + 60
        while not round and not savers.acknowledged and time.monotonic() < patience:
            time.sleep(0.01)
        time.sleep(delays.uniform(0.0, 0.3))
        server.process.kill()
        server.process.wait()
        for thread in savers.threads:
            thread.join()
        # what was acknowledged last, or a later one that was on its way
        for name, lengths in savers.asked.items():
            known[name] = lengths if name in savers.acknowledged else known.get(name, set()) | lengths
        saves += len(savers.acknowledged)
        sessions = Sessions(folder, lm, 100, 1)
        there = {session.name for session in sessions.all()}
        assert set(savers.acknowledged) <= there
        for name in there:
            assert sessions.load(name).position - 1 in known[name]
            checked += 1
    return {"kills": kills, "states_checked": checked, "acknowledged": saves}


@pytest.mark.parametrize("kills", [4, pytest.param(100, marks=pytest.mark.soak)])
def test_a_kill_while_saving_loses_nothing(
    kills: int, processes: Processes, run: Path, tmp_path: Path, lm: LanguageModel, repository: Path
) -> None:
    """Every acknowledged session is there after `kill -9`, and none is damaged."""
    found = kill_while_saving(processes, run, tmp_path, lm, kills)
    assert found["states_checked"] >= kills
    if kills == 100:
        keep_result(repository, "serve-kills", found)
