"""A headless Chromium of its own, spoken to over the DevTools protocol through a pipe: no driver, no port, no library."""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--disable-background-timer-throttling", "--disable-renderer-backgrounding", "--remote-debugging-pipe",
)  # fmt: skip
_DEADLINE_S = 40.0
_LOOK_DEADLINE_S = 4.0
"""Of one look at a page; an answer is lost where the page goes to another process meanwhile."""


def find_chromium() -> str | None:
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class Chromium:
    """One browser with one tab; a context manager."""

    def __init__(self, width: int = 1200, height: int = 900) -> None:
        self._profile = tempfile.mkdtemp(prefix="page-")
        self._size = (width, height)
        self._number = 0
        self._buffer = b""
        self._session: str | None = None
        self.console: list[str] = []
        """Errors and warnings that the page has told, broken policy and failed requests among them."""
        self.requested: list[str] = []
        """Addresses that the page has asked for."""

    def __enter__(self) -> Self:
        binary = find_chromium()
        assert binary is not None
        from_us, self._to = os.pipe()
        self._from, to_us = os.pipe()

        def at_three_and_four() -> None:
            low, high = os.dup(from_us), os.dup(to_us)  # neither may be overwritten by the other's place
            low, high = os.dup(low), os.dup(high)
            os.dup2(low, 3)
            os.dup2(high, 4)

        self._process = subprocess.Popen(
            [binary, *_FLAGS, f"--user-data-dir={self._profile}", "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, close_fds=False, preexec_fn=at_three_and_four,
        )  # fmt: skip
        os.close(from_us)
        os.close(to_us)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(*self._size)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for end in (self._to, self._from):
            os.close(end)
        shutil.rmtree(self._profile, ignore_errors=True)

    def call(self, method: str, *, deadline_s: float = _DEADLINE_S, **parameters: Any) -> dict[str, Any]:
        """One command, and its result; later answers to earlier ones are passed over."""
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + deadline_s
        while True:
            answer = self._next(until)
            assert answer is not None, f"{method} was not answered"
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def run(self, script: str, deadline_s: float = _DEADLINE_S) -> Any:
        """The value of an expression in the page; promises are waited for."""
        told = self.call(
            "Runtime.evaluate", deadline_s=deadline_s, expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def wait_for(self, condition: str, deadline_s: float = 20.0) -> None:
        """Until an expression is true; looked at with every frame of the page."""
        until = time.monotonic() + deadline_s
        look = (  # what is not there yet, such as an element, is no error
            "new Promise(done => requestAnimationFrame(() => {"
            f" try {{ done(!!({condition})); }} catch {{ done(false); }} }}))"
        )
        while True:
            with contextlib.suppress(AssertionError):  # a page on its way to the next one has no context
                if self.run(look, min(deadline_s, _LOOK_DEADLINE_S)):
                    return
            assert time.monotonic() < until, f"never became true: {condition}; console: {self.console[-5:]}"

    def press(self, key: str, times: int = 1) -> None:
        codes = {"Tab": 9, "Enter": 13, " ": 32, "ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "+": 187, "Escape": 27}
        for _ in range(times):
            text = {"Enter": "\r", " ": " "}.get(key, "")
            common = {"key": key, "windowsVirtualKeyCode": codes[key], "text": text}
            self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", **common)
            self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=codes[key])

    def resize(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )

    def prefer(self, **features: str) -> None:
        """Such as color-scheme: `prefer(**{"prefers-color-scheme": "dark"})`."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": n, "value": v} for n, v in features.items()])

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def pump(self) -> None:
        """Take in what the browser has told meanwhile."""
        self.run("0")

    def _next(self, until: float) -> dict[str, Any] | None:
        """The next message; events are noted on the way. None at the deadline."""
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                return None
            part = os.read(self._from, 1 << 20)
            assert part, "Chromium has ended"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        told = json.loads(message)
        self._note(told)
        return told

    def _note(self, told: dict[str, Any]) -> None:
        method, parameters = told.get("method"), told.get("params", {})
        if method == "Log.entryAdded":
            entry = parameters["entry"]
            self.console.append(f"{entry['text']} {entry.get('url', '')}".strip())
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning"):
            self.console.append(str([a.get("value", a.get("description")) for a in parameters["args"]]))
        elif method == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.console.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Network.requestWillBeSent":
            self.requested.append(parameters["request"]["url"])
