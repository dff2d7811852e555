"""Credential providers, as URLs and Celery's options name them."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

from redis.credentials import CredentialProvider
from redis.exceptions import ConnectionError

from celery_singleton_lock.errors import ConfigurationError


def with_credentials(options: dict[str, Any], provider: Any) -> dict[str, Any]:
    """Return connection options with this provider, if any, instead of user and password, as Celery (5.7) does it.

    Arguments:
        provider: a `redis.CredentialProvider`, or the dotted name of a class or function that makes one.

    Raises:
        ConfigurationError: it is none.
    """
    if not provider:
        return options
    others = {name: value for name, value in options.items() if name not in ("username", "password")}
    return {**others, "credential_provider": _Provider(_made(provider))}


def _made(provider: Any) -> CredentialProvider:
    made, shown = provider, type(provider).__name__
    if isinstance(provider, str):
        shown = provider
        try:
            made = resolve_name(provider)()
        except Exception as error:
            # The texts of other errors may contain a secret.
            detail = f": {error}" if isinstance(error, (ImportError, AttributeError)) else ""
            raise ConfigurationError(
                f"singleton_lock_url: credential_provider={shown} cannot be used ({type(error).__name__}{detail})"
            ) from error
    if not isinstance(made, CredentialProvider):
        raise ConfigurationError(
            f"singleton_lock_url: credential_provider={shown} must be a redis.CredentialProvider or make one"
        )
    return made


class _Provider(CredentialProvider):
    """A user's provider, whose errors count as an outage and show no secret."""

    def __init__(self, provider: CredentialProvider) -> None:
        self._provider = provider

    def get_credentials(self) -> Any:
        try:
            return self._provider.get_credentials()
        except Exception as error:
            name = type(self._provider).__name__
            raise ConnectionError(f"the credential provider {name} failed: {type(error).__name__}") from error
