"""Texts of others, as people may be shown them."""

from __future__ import annotations


def printable(text: str) -> str:
    """Return a text in which control characters are escaped: they come with messages, and could steer a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
