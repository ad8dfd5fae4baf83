"""What stands before every route: the key, the host's name, the size and the time of a body."""

import base64
import socket
from pathlib import Path

import openai
import pytest

from maglev.serve.guard import host_name, is_loopback, key_sent, same_key
from tests.processes import Processes
from tests.serve.running import NAME, Running, serving

KEY = "a-key-of-sixteen-characters-or-more"
ROUTES = [
    ("GET", "/"),
    ("GET", "/health"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("GET", "/v1/models"),
    ("GET", f"/v1/models/{NAME}"),
    ("POST", "/v1/completions"),
    ("GET", "/v1/sessions"),
    ("GET", "/v1/sessions/a"),
    ("DELETE", "/v1/sessions/a"),
    ("POST", "/v1/sessions/a/fork"),
    ("GET", "/nowhere"),
    ("OPTIONS", "/v1/completions"),
]


@pytest.fixture(scope="module")
def locked(fork_server, run: Path, tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    folder = tmp_path_factory.mktemp("locked")
    options = ("--body-bytes", "2000", "--prompt-tokens", "50", "--max-tokens", "60", "--choices", "4")
    with serving(Processes(fork_server, folder), run, folder / "sessions", *options, key=KEY) as running:
        yield running


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_asks_for_the_key(locked: Running, method: str, path: str) -> None:
    wrong = ["", "Bearer", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", KEY, f"Basic {KEY}", "Basic !!!", "Bearer \xff"]
    for header in wrong:
        answer = locked.ask(method, path, headers={"Authorization": header})
        assert answer.status == 401 and answer.error["code"] == "invalid_api_key", header
        assert answer.error["type"] == "authentication_error"
    password = base64.b64encode(f"anyone:{KEY}".encode()).decode()
    for header in (f"Bearer {KEY}", f"bearer {KEY}", f"Basic {password}"):
        assert locked.ask(method, path, headers={"Authorization": header}).status != 401


def test_the_client_meets_the_key(locked: Running) -> None:
    assert locked.client().completions.create(model=NAME, prompt="a", max_tokens=2).choices
    with pytest.raises(openai.AuthenticationError):
        locked.client(api_key="wrong").models.list()


def test_keys_are_compared_whole() -> None:
    assert same_key(KEY, KEY) and not same_key("", KEY) and not same_key(KEY + " ", KEY)
    assert not same_key("\udcff", KEY)
    assert key_sent("Bearer  x ") == "x" and key_sent("Digest x") == "" and key_sent("Basic w7w=") == ""


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "10.0.0.1", "[::2]"])
def test_a_strangers_name_is_refused_without_a_key(server: Running, host: str) -> None:
    """Else a page on the web could point its name at this machine and read the answers."""
    answer = server.ask("GET", "/v1/models", headers={"Host": host})
    assert answer.status == 403 and answer.error["message"]


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "127.8.9.1", "[::1]:80"])
def test_names_of_this_machine_are_served(server: Running, host: str) -> None:
    assert server.ask("GET", "/v1/models", headers={"Host": host}).status == 200


def test_a_key_allows_any_name(locked: Running) -> None:
    assert locked.ask("GET", "/v1/models", headers={"Host": "my.example"}).status == 200


def test_host_names() -> None:
    assert host_name("[::1]:80") == "::1" and host_name("a:80") == "a" and host_name("[") == ""
    assert is_loopback("::1") and is_loopback("127.1.2.3") and not is_loopback("0.0.0.0") and not is_loopback("x")


def test_a_body_has_a_largest_size(locked: Running) -> None:
    answer = locked.ask("POST", "/v1/completions", {"model": NAME, "prompt": "a" * 3000})
    assert answer.status == 413 and answer.headers["connection"] == "close" and answer.error
    for length in ("9" * 5000, "-1", "x", "99999999999999999999999999"):
        status = status_of(
            locked, f"POST /v1/completions HTTP/1.1\r\nContent-Length: {length}\r\n{AUTHORIZED}\r\n".encode()
        )
        assert status in (400, 413), length


AUTHORIZED = f"Host: localhost\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"


def status_of(server: Running, sent: bytes, wait: float = 10) -> int:
    """0 where there is no answer."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=wait) as connection:
        connection.sendall(sent)
        try:
            found = connection.recv(4096)
        except (ConnectionError, TimeoutError):
            return 0
    return int(found.split()[1]) if found else 0


def test_a_body_without_a_length_has_one_too(locked: Running) -> None:
    head = f"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n{AUTHORIZED}\r\n".encode()
    chunk = b"400\r\n" + b" " * 0x400 + b"\r\n"
    assert status_of(locked, head + 3 * chunk) == 413


def test_a_body_that_does_not_come_is_given_up(processes: Processes, run: Path, tmp_path: Path) -> None:
    with serving(processes, run, tmp_path, "--transfer-seconds", "0.3") as server:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{"
        assert status_of(server, head, wait=5) == 408


def test_a_head_that_does_not_come_is_given_up(processes: Processes, run: Path, tmp_path: Path) -> None:
    """However steadily it drips, and after a good request too."""
    good = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with serving(processes, run, tmp_path, "--transfer-seconds", "0.5") as server:
        for begun in (b"", good):
            with socket.create_connection(("127.0.0.1", server.port), timeout=0.1) as slow:
                slow.sendall(begun)
                assert not begun or slow.recv(4096).startswith(b"HTTP/1.1 200")
                assert any(is_closed_after(slow, bytes([letter])) for letter in b"GET /health HTTP/1.1" * 5)
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as silent:
            assert silent.recv(1) == b""
        assert server.ask("GET", "/health").status == 200


def is_closed_after(connection: socket.socket, sent: bytes) -> bool:
    try:
        connection.sendall(sent)
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_what_one_request_may_ask_for(locked: Running) -> None:
    assert locked.refused(400, prompt="a", max_tokens=61)["param"] == "max_tokens"
    assert locked.refused(400, prompt="a", n=5)["param"] == "n"
    assert locked.refused(400, prompt=["a"] * 3, n=2)["param"] == "n"
    assert locked.refused(400, prompt=[5] * 51)["param"] == "prompt"
    assert locked.refused(400, prompt="a", logprobs=21)["param"] == "logprobs"
    assert locked.refused(400, prompt="a", stop=["x"] * 17)["message"] == "stop: give a text or a list of at most 16"
    for prompt in (5, [-1], ["a", 1], [None], {}):
        assert "a list of token ids" in locked.refused(400, prompt=prompt)["message"], prompt
    assert locked.refused(400, prompt="a", stop="x" * 257)["param"] == "stop"


def test_a_simple_form_of_a_page_is_no_request(server: Running) -> None:
    """A page elsewhere can send text/plain without asking; JSON it cannot."""
    body = b'{"model": "small", "prompt": "a"}'
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        assert server.ask("POST", "/v1/completions", body, headers={"Content-Type": kind}).status in (400, 415)
    answer = server.ask("OPTIONS", "/v1/completions", headers={"Origin": "http://evil.example"})
    assert not any(name.startswith("access-control") for name in answer.headers)
