"""Headless Chromium by its own protocol, over two pipes: pages of any width, and what a script sees in them."""

from __future__ import annotations

import base64
import json
import os
import select
import subprocess
import time
from pathlib import Path
from typing import Any

PATIENCE = 120.0
"""Seconds that an answer may take on a busy machine."""


class Browser:
    """A browser with one page. Use it as a context manager."""

    def __init__(self, profile: Path) -> None:
        read_by_chromium, self._to = os.pipe()
        self._from, written_by_chromium = os.pipe()
        # Chromium reads commands from descriptor 3 and writes answers to descriptor 4. sh knows descriptors below 10
        command = f'exec "$@" 3<&{read_by_chromium} 4>&{written_by_chromium}'
        flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--remote-debugging-pipe",
            f"--user-data-dir={profile}",
        ]
        self._process = subprocess.Popen(
            ["bash", "-c", command, "bash", "chromium", *flags, "about:blank"],
            pass_fds=(read_by_chromium, written_by_chromium),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_by_chromium)
        os.close(written_by_chromium)
        self._rest = b""
        self._calls = 0
        self._session: str | None = None
        self.requests: list[str] = []
        """The addresses that pages asked for."""

    def __enter__(self) -> Browser:
        try:
            targets = self.call("Target.getTargets")["targetInfos"]
            page = next(target for target in targets if target["type"] == "page")
            attached = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
            self._session = attached["sessionId"]
            self.call("Page.enable")
            self.call("Network.enable")
            self.call("Emulation.setFocusEmulationEnabled", enabled=True)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The answer to a command of the protocol."""
        self._calls += 1
        message: dict[str, Any] = {"id": self._calls, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("method") == "Network.requestWillBeSent":
                self.requests.append(answer["params"]["request"]["url"])
            if answer.get("id") == self._calls:
                assert "error" not in answer, answer
                return answer["result"]

    def _receive(self) -> dict[str, Any]:
        until = time.monotonic() + PATIENCE
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], max(0.0, until - time.monotonic()))
            assert ready, "Chromium does not answer"
            part = os.read(self._from, 1 << 20)
            assert part, "Chromium has ended"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def width(self, pixels: int, height: int = 900) -> None:
        """Give the page a width."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=pixels,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def open(self, address: str) -> None:
        """Open a page, and wait until all of it is loaded."""
        self.call(
            "Page.navigate", url="about:blank"
        )  # an address that differs only after `#` would not be loaded
        self.call("Page.navigate", url=address)
        self.wait_for("location.href !== 'about:blank' && document.readyState === 'complete'")

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, script: str) -> Any:
        """The value of an expression in the page, once it is true."""
        until = time.monotonic() + PATIENCE
        while not (value := self.evaluate(script)):
            assert time.monotonic() < until, f"never true: {script}"
            time.sleep(0.02)
        return value

    def screenshot(self, path: Path) -> None:
        """Write what is seen of the page, as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))
