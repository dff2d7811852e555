"""A headless Chromium, driven over HTTP as the WebDriver standard of the W3C describes it."""

from __future__ import annotations

import base64
import json
import shutil
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tests.servers import Process, free_port, is_listening, until

PROGRAMS = ("chromium", "chromedriver")
#: Chromium ends with its driver, as it then reads the end of their pipe.
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--remote-debugging-pipe"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1660,720"),
)
#: Asks no proxy.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
#: The key under which the standard names an element.
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"


def missing_programs() -> list[str]:
    """Return the programs that are not installed here."""
    return [name for name in PROGRAMS if not shutil.which(name)]


class Browser:
    """One window. A click returns when the page that it leads to has loaded."""

    def __init__(self, directory: Path) -> None:
        port = free_port()
        self._address = f"http://127.0.0.1:{port}/session"
        self._driver = Process([str(shutil.which("chromedriver")), f"--port={port}"], directory / "chromedriver.log")
        self._driver.start()
        until(lambda: is_listening(port), "the driver listens")
        options = {"binary": shutil.which("chromium"), "args": [*FLAGS, f"--user-data-dir={directory / 'profile'}"]}
        spec = {"alwaysMatch": {"browserName": "chrome", "goog:chromeOptions": options}}
        self._address += "/" + self._call("POST", "", {"capabilities": spec})["sessionId"]

    def close(self) -> None:
        """End Chromium and its driver."""
        try:
            self._call("DELETE", "")
        finally:
            self._driver.stop()

    def open(self, url: str) -> None:
        """Load a page."""
        self._call("POST", "/url", {"url": url})

    def forget_cookies(self) -> None:
        """Forget the cookies of the page's site."""
        self._call("DELETE", "/cookie")

    @property
    def url(self) -> str:
        """The address of the page."""
        return str(self._call("GET", "/url"))

    def text(self, css: str = "body") -> str:
        """Return the text that the first such element shows."""
        return str(self._call("GET", f"/element/{self._element('css selector', css)}/text"))

    def count(self, css: str) -> int:
        """Return how many such elements the page has."""
        return len(self._call("POST", "/elements", {"using": "css selector", "value": css}))

    def type(self, css: str, text: str) -> None:
        """Type text into a field."""
        self._call("POST", f"/element/{self._element('css selector', css)}/value", {"text": text})

    def click(self, label: str) -> None:
        """Click the button or link with this label."""
        self._click(f"//*[self::a or self::button][normalize-space()='{label}'] | //input[@value='{label}']")

    def text_of_row(self, text: str) -> str:
        """Return what the row of a table shows that contains a text."""
        return str(self._call("GET", f"/element/{self._element('xpath', _row(text))}/text"))

    def click_in_row(self, text: str, label: str) -> None:
        """Click the button with this label in the row of a table that contains a text."""
        self._click(f"{_row(text)}//button[normalize-space()='{label}']")

    def resize(self, width: int) -> None:
        """Give the window another width, in pixels."""
        self._call("POST", "/window/rect", {"width": width, "height": 720})

    def hidden_width(self, css: str) -> int:
        """Return how many pixels of the widest such element are outside of the window, or of the box that it scrolls in."""
        script = """
            return Math.max(...Array.from(document.querySelectorAll(arguments[0]), found => {
                let hidden = found.getBoundingClientRect().right - document.documentElement.clientWidth;
                for (let box = found.parentElement; box; box = box.parentElement)
                    hidden = Math.max(hidden, box.scrollWidth - box.clientWidth);
                return Math.max(0, Math.ceil(hidden));
            }))"""
        return int(self._call("POST", "/execute/sync", {"script": script, "args": [css]}))

    def screenshot(self) -> bytes:
        """Return the window as PNG."""
        return base64.b64decode(self._call("GET", "/screenshot"))

    def _click(self, path: str) -> None:
        """Click, and wait for the next page: the click may return before the browser has asked for it."""
        self._call("POST", "/execute/sync", {"script": "document.isOld = true", "args": []})
        self._call("POST", f"/element/{self._element('xpath', path)}/click", {})
        is_new = {"script": "return !document.isOld && document.readyState == 'complete'", "args": []}
        until(lambda: self._call("POST", "/execute/sync", is_new), "the next page")

    def _element(self, using: str, value: str) -> str:
        return str(self._call("POST", "/element", {"using": using, "value": value})[ELEMENT])

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._address + path, data, {"Content-Type": "application/json"}, method=method
        )
        try:
            with DIRECT.open(request, timeout=60) as reply:
                return json.load(reply)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{method} {path} {body}: {error.read().decode()}") from None


def _row(text: str) -> str:
    return f"//tr[contains(normalize-space(), '{text}')]"
