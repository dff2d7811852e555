"""What tests read from docs/operate/store-login.md."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "operate" / "store-login.md"


def login(password: str) -> list[str]:
    """Return the words of the command that makes the store's login `locks`."""
    (command,) = re.findall(r"^ACL SETUSER.*?(?=^```)", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return str(command).replace("PASSWORD", password).split()
