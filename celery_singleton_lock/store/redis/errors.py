"""Which errors of redis-py are permanent (the store refuses), and which transient (unreachable, or cannot serve now)."""

from __future__ import annotations

import re

from redis import exceptions
from redis.sentinel import MasterNotFoundError

from celery_singleton_lock.errors import StoreError, StoreUnavailable

#: What waiting does not cure; so no command is sent again after it.
PERMANENT_ERRORS = (exceptions.AuthenticationError, exceptions.AuthorizationError, exceptions.NoPermissionError)

#: Error replies of a server that cannot serve now. redis-py has classes for some and removes the code from their text; scripts of
#: older servers wrap the code in a text of their own.
_TRANSIENT_REPLY = re.compile(
    "READONLY|OOM |LOADING|MASTERDOWN|CLUSTERDOWN|TRYAGAIN|BUSY |NOREPLICAS|MISCONF"
    "|(ReadOnly|OutOfMemory|MasterDown|ClusterDown|TryAgain)Error: "
)
#: Error replies to a refused login, or to a client without one, which may send few and short words only.
_LOGIN_REPLY = re.compile(
    r"AuthenticationError|NOAUTH|WRONGPASS|Authentication required"
    r"|unauthenticated (multi)?bulk length|invalid (username-)?password",
    re.IGNORECASE,
)
#: What a server writes before the words of a command that it does not know.
_QUOTATION = ", with args beginning with"


def store_error_for(error: Exception) -> StoreError:
    """Return what to raise for an error of redis-py or of a socket."""
    whole = f"{type(error).__name__}: {error}"
    # Servers repeat a command's words, passwords and tokens too; redis-py shows all options of the Sentinels that it asked.
    text = str(error).partition(" : <" if isinstance(error, MasterNotFoundError) else _QUOTATION)[0][:300]
    if isinstance(error, exceptions.AuthenticationError) or _LOGIN_REPLY.search(whole):
        return StoreError(f"the store refused the login, wrong or missing password: {text}")
    if isinstance(error, (*PERMANENT_ERRORS, exceptions.ResponseError)):
        transient = _TRANSIENT_REPLY.search(f"{type(error).__name__}: {text}")
        return (StoreUnavailable if transient else StoreError)(f"the store refused: {text}")
    return StoreUnavailable(f"the store could not be reached: {text}")


def is_read_only(error: Exception) -> bool:
    """Return whether the server is a replica now: the next connection must look for the new master."""
    return isinstance(error, exceptions.ReadOnlyError) or "READONLY" in str(error)


def without_secrets(error: Exception) -> Exception:
    """Return the error without the words of its command, and without redis-py's frames, whose variables show passwords."""
    error.__cause__ = error.__context__ = None
    if _QUOTATION in str(error):
        error.args = (str(error).partition(_QUOTATION)[0],)
    return error.with_traceback(None)
