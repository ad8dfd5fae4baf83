"""Chromium without a window, driven through its own protocol over a pair of pipes: no driver to install."""

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")


class Browser:
    """One tab. What the page logs as an error is kept in `complaints`."""

    def __init__(self, write: int, read: int) -> None:
        self.write, self.read = write, read
        self.number, self.held = 0, b""
        self.session: str | None = None
        self.complaints: list[str] = []
        self.target: str | None = None
        self.tab()

    def tab(self) -> None:
        """A new tab in place of the last, with no complaint: what an earlier page still asks for is not heard here."""
        last, self.session = self.target, None
        self.target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=self.target, flatten=True)["sessionId"]
        if last is not None:
            self.call("Target.closeTarget", targetId=last)
        self.session = session
        self.complaints.clear()
        for domain in ("Runtime", "Log", "Page", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]
            self.note(answer)

    def receive(self) -> dict[str, Any]:
        while b"\0" not in self.held:
            part = os.read(self.read, 1 << 16)
            assert part, "the browser is gone"
            self.held += part
        found, _, self.held = self.held.partition(b"\0")
        return json.loads(found)

    def note(self, event: dict[str, Any]) -> None:
        if event.get("sessionId") != self.session:
            return
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.complaints.append(json.dumps(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(json.dumps(params["entry"]))

    def size(self, width: int, height: int, phone: bool) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)

    def scheme(self, name: str) -> None:
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, expression: str, seconds: float = 20) -> None:
        deadline = time.monotonic() + seconds
        while not self.value(expression):
            assert time.monotonic() < deadline, (expression, self.complaints)
            time.sleep(0.02)

    def press(self, key: str, *, control: bool = False, text: str = "") -> None:
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32}
        common = {"key": key, "windowsVirtualKeyCode": codes.get(key, 0), "modifiers": 2 if control else 0}
        typed = {"Enter": "\r", " ": " "}.get(key, text)
        down = {"type": "keyDown", "text": typed} if typed and not control else {"type": "rawKeyDown"}
        self.call("Input.dispatchKeyEvent", **common, **down)
        self.call("Input.dispatchKeyEvent", **common, type="keyUp")

    def tab_to(self, id: str) -> None:
        """By keyboard alone."""
        for _ in range(40):
            if self.value("document.activeElement.id") == id:
                return
            self.press("Tab")
        raise AssertionError(f"#{id} cannot be reached with Tab")

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def browsing(folder: Path) -> Iterator[Browser]:
    command = next((found for name in NAMES if (found := shutil.which(name))), None)
    if command is None:
        pytest.skip("needs Chromium")
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()

    def as_expected() -> None:
        """The browser reads from 3 and writes to 4."""
        first, second = os.dup(theirs_in), os.dup(theirs_out)
        os.dup2(first, 3)
        os.dup2(second, 4)

    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
    flags += ["--no-first-run", "--disable-extensions", "--disable-background-networking", f"--user-data-dir={folder}"]
    process = subprocess.Popen(
        [command, *flags], close_fds=False, preexec_fn=as_expected, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Browser(ours_out, ours_in)
    finally:
        process.kill()
        process.wait()
        os.close(ours_out)
        os.close(ours_in)
