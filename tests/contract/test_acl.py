"""The login of the documents may do what the library needs, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from celery_singleton_lock import StoreError
from celery_singleton_lock.store import redis as redis_package
from celery_singleton_lock.store.requests import LeaseSpec
from tests.contract.conftest import MakeStore
from tests.contract.test_redis import every_call
from tests.servers import RedisServer
from tests.store_login import login

MakeRequest = Callable[..., LeaseSpec]
#: What the library sends outside of scripts, besides the commands that scripts use, too.
OWN = {"eval", "evalsha", "hgetall", "info", "lrange", "select", "zscan"}


@pytest.fixture
def base() -> str:
    """What all keys begin with, under the default prefix."""
    return "singleton:{a.task}"


@pytest.fixture
def url(own_server: Callable[..., RedisServer]) -> str:
    """The URL of another database than 0, with that login."""
    server = own_server()
    Redis.from_url(server.url()).execute_command(*login("pass"))
    return server.url(db=1).replace("redis://", "redis://locks:pass@")


def test_commands_are_those_of_the_scripts() -> None:
    """The page lists each command that a script uses, and no other."""
    scripts = "".join(path.read_text() for path in Path(redis_package.__file__).parent.glob("*.lua"))
    used = {name.lower() for name in re.findall(r"redis\.p?call\('(\w+)'", scripts)}
    assert used | OWN == {word[1:] for word in login("pass") if word.startswith("+")}


@every_call
def test_each_call_is_allowed(
    url: str, redis_store: MakeStore, lease_request: MakeRequest, call: Callable[..., Any]
) -> None:
    """Each call of the store works with this login."""
    call(redis_store(url), lease_request())


def test_other_keys_are_refused(url: str, redis_store: MakeStore) -> None:
    """The login has no access to keys of others."""
    with pytest.raises(StoreError, match=r"(?i)noperm|no permissions"):
        redis_store(url).command("SET", "another's", "1")
