"""What tests read from docs/RUNBOOK.md."""

from __future__ import annotations

import re
from pathlib import Path

RUNBOOK = Path(__file__).resolve().parents[1] / "docs" / "RUNBOOK.md"


def login(password: str) -> list[str]:
    """Return the words of the command that makes the store's login `locks`."""
    (command,) = re.findall(r"^ACL SETUSER.*?(?=^```)", RUNBOOK.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return str(command).replace("PASSWORD", password).split()
