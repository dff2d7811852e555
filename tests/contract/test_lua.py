"""No script has a misspelt variable: Lua would read it as nil, and Redis refuses it only when a call comes to that line."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

import pytest

from tests.faults.probes import scripts

#: Global names that Redis and Lua provide.
KNOWN = {"ARGV", "KEYS", "ipairs", "math", "redis", "string", "unpack"}

pytestmark = pytest.mark.skipif(
    not shutil.which("luac5.1") and "CI" not in os.environ, reason="needs the compiler of Lua 5.1 (apt: lua5.1)"
)


def global_names(text: str) -> set[str]:
    """Return the global names that a script reads or writes, as its compiler lists them."""
    done = subprocess.run(["luac5.1", "-l", "-p", "-"], input=text, text=True, capture_output=True, check=True)
    return set(re.findall(r"[GS]ETGLOBAL\s+\d+ -\d+\s*; (\w+)", done.stdout))


def test_names_of_scripts() -> None:
    """Each script compiles, and all its other variables are local."""
    unknown = {name: one.verb for one in scripts().values() for name in global_names(one.text) - KNOWN}
    assert {} == unknown


@pytest.mark.parametrize("text", ["return mispelt", "mispelt = 1", "local function f() return mispelt end"])
def test_unknown_name(text: str) -> None:
    """A name that is not declared is found, also in a function."""
    assert {"mispelt"} == global_names(text)
