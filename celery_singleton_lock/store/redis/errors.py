"""What an error of redis-py means: an outage, which ends by itself, or a refusal, which does not.

docs/operate/store-login.md lists what a server can answer, and what each answer counts as.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator

from redis import exceptions
from redis.sentinel import MasterNotFoundError

from celery_singleton_lock.errors import StoreError, StoreUnavailable
from celery_singleton_lock.store.access import Access

#: What waiting for a moment does not cure; so no command is sent again after it.
PERMANENT_ERRORS = (exceptions.AuthenticationError, exceptions.AuthorizationError, exceptions.NoPermissionError)

#: First words of error replies, or classes for which redis-py removes them, of a server that cannot serve now.
_OUTAGES = ["LOADING", "BUSY", "OOM", "READONLY", "MASTERDOWN", "MISCONF", "NOREPLICAS", "CLUSTERDOWN", "TRYAGAIN"]
_CLASSES = {
    "BusyLoadingError": "LOADING",
    "OutOfMemoryError": "OOM",
    "ReadOnlyError": "READONLY",
    "MasterDownError": "MASTERDOWN",
    "ClusterDownError": "CLUSTERDOWN",
    "TryAgainError": "TRYAGAIN",
    "MovedError": "MOVED",
    "AskError": "ASK",
    "NoPermissionError": "NOPERM",
}
_CODES = (*_OUTAGES, "MOVED", "ASK", "NOPERM", "DENIED")
_CODE = re.compile(rf"({'|'.join(_CODES)})\b")
#: Scripts of older servers wrap the code in a text of their own.
_WRAPPED_CODE = re.compile(rf"-({'|'.join(_CODES)})\b")
#: What a server before Redis 7, and Valkey, say of a command in a script that the login may not use; redis-py gives no class.
_PERMISSION_REPLY = re.compile(
    r"the user executing the script can't|has no permissions to|no permissions to access", re.IGNORECASE
)
#: Error replies to a refused login, or to a client without one, which may send few and short words only.
_LOGIN_REPLY = re.compile(
    r"AuthenticationError|NOAUTH|WRONGPASS|Authentication required"
    r"|unauthenticated (multi)?bulk length|invalid (username-)?password",
    re.IGNORECASE,
)
_CLUSTER = (
    "the store is a node of a Redis Cluster, which has some of the keys only: "
    "singleton_lock_url must name a server that is no cluster"
)
_REPLICA = "the store is a replica, which takes no writes: the URL is that of a replica, or a failover is under way"
_WORDS = {
    "READONLY": _REPLICA,
    "MASTERDOWN": _REPLICA,
    "NOREPLICAS": "the store has fewer replicas than its min-replicas-to-write",
    "CLUSTERDOWN": "the store is a node of a Redis Cluster that does not serve all keys",
}
#: What a server writes before the words of a command that it does not know.
_QUOTATION = ", with args beginning with"


def store_error_for(error: Exception, access: Access, is_script: bool = True) -> StoreError:
    """Return what to raise for an error of redis-py or of a socket.

    Arguments:
        is_script: whether a script was called, which the login may if it has worked. A single command may be one that it never
            could, such as INFO.
    """
    whole = f"{type(error).__name__}: {error}"
    # Servers repeat a command's words, passwords and tokens too; redis-py shows all options of the Sentinels that it asked.
    text = str(error).partition(" : <" if isinstance(error, MasterNotFoundError) else _QUOTATION)[0][:300]
    if isinstance(error, exceptions.AuthenticationError) or _LOGIN_REPLY.search(whole):
        return access.refused(f"the store refused the login, wrong or missing password: {text}")
    code = code_of(error)
    if code == "NOPERM" and not is_script:
        return StoreError(f"the store refused: {text}")
    if code in ("NOPERM", "DENIED"):
        return access.refused(f"the store refused: {text}")
    if code in ("MOVED", "ASK"):
        return access.refused(f"{_CLUSTER} ({code} {text})")
    if code:
        text = text if code in text else f"{code} {text}"
        return StoreUnavailable(f"{_WORDS[code]} ({text})" if code in _WORDS else f"the store refused: {text}")
    if isinstance(error, exceptions.ResponseError):
        return StoreError(f"the store refused: {text}")
    if _is_refused_by_tls(error):
        return access.refused(f"no TLS connection to the store: {text}")
    return StoreUnavailable(f"the store could not be reached: {text}")


def code_of(error: Exception) -> str:
    """Return the code of an error reply, if it is one that counts here; else ""."""
    text = str(error)
    if found := _CLASSES.get(type(error).__name__):
        return found
    if not isinstance(error, exceptions.ResponseError):
        return ""
    if found_code := _CODE.match(text) or _WRAPPED_CODE.search(text):
        return found_code[1]
    if _PERMISSION_REPLY.search(text):
        return "NOPERM"
    return "MOVED" if text == "SELECT is not allowed in cluster mode" else ""


def is_of_this_connection(error: Exception) -> bool:
    """Return whether another connection may be served: after a failover by the new primary, or with another login."""
    return code_of(error) in ("READONLY", "MASTERDOWN", "NOREPLICAS", "MOVED", "NOPERM")


def _is_refused_by_tls(error: Exception) -> bool:
    """Return whether a certificate, or TLS itself, was refused; not, if a connection broke."""
    broken = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
    return any(isinstance(one, ssl.SSLError) and not isinstance(one, broken) for one in _causes(error))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def without_secrets(error: Exception) -> Exception:
    """Return the error without the words of its command, and without redis-py's frames, whose variables show passwords."""
    error.__cause__ = error.__context__ = None
    if _QUOTATION in str(error):
        error.args = (str(error).partition(_QUOTATION)[0],)
    return error.with_traceback(None)
