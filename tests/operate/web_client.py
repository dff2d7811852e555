"""A client of a Django site that sends what no page offers, and shows each answer as it came."""

from __future__ import annotations

import http.cookiejar
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Answer:
    """What the site answered; `target`: where it sends the client next."""

    status: int
    target: str
    text: str


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Follow nothing."""


class WebClient:
    """One user's cookies. Without a password it is nobody's."""

    def __init__(self, site: str, user: str = "", password: str = "") -> None:
        self._site = site
        self._cookies = http.cookiejar.CookieJar()
        own = (urllib.request.ProxyHandler({}), _NoRedirect(), urllib.request.HTTPCookieProcessor(self._cookies))
        self._opener = urllib.request.build_opener(*own)
        self.get("/admin/login/")  # for the CSRF token
        if password:
            done = self.post("/admin/login/?next=/admin/", username=user, password=password)
            assert (302, "/admin/") == (done.status, done.target), done.text

    def get(self, path: str, **query: str) -> Answer:
        """Ask for a page."""
        return self._send(f"{path}?{urllib.parse.urlencode(query)}" if query else path, None)

    def post(self, path: str, **form: str) -> Answer:
        """Send a form with the CSRF token."""
        tokens = [cookie.value or "" for cookie in self._cookies if cookie.name == "csrftoken"]
        return self.post_bare(path, csrfmiddlewaretoken=tokens[0], **form)

    def post_bare(self, path: str, **form: str) -> Answer:
        """Send a form as it is."""
        return self._send(path, urllib.parse.urlencode(form).encode())

    def _send(self, path: str, data: bytes | None) -> Answer:
        try:
            with self._opener.open(self._site + path, data, timeout=100) as reply:
                return Answer(reply.status, "", reply.read().decode())
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, error.headers.get("Location", ""), error.read().decode())
