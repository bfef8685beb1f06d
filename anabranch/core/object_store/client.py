"""Opens object stores by obstore, and keeps secrets out of its errors."""

import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from anabranch.core.errors import SettingsError
from anabranch.core.extras import needs
from anabranch.core.failures import panicked

_CLIENT_OPTIONS = {
    *("allow_http", "allow_invalid_certificates", "connect_timeout", "http1_only", "http2_only", "pool_idle_timeout"),
    *("pool_max_idle_per_host", "proxy_ca_certificate", "proxy_excludes", "proxy_url", "timeout", "user_agent"),
}
"""Options of the HTTP client, which obstore takes separately from those of the store."""
_QUERY = re.compile(r"\?[^\s'\"]*")
_RETRIES = 3
_RETRY_TIMEOUT = timedelta(seconds=20)
_LONGEST_WORD = 5
"""Longest value of an option that may be part of a message, such as `true` or a number."""
_memory: dict[str, Any] = {}
"""The stores in this process's memory, by URL."""


def open_store(url: str, options: Mapping[str, str], key: str, retries: int = _RETRIES) -> Any:
    """Return the obstore store of a URL, without a request.

    Args:
        url: what paths are relative to.
        options: of the store and of its HTTP client, in obstore's names; others come from the environment.
        key: of the settings, for messages.
        retries: of a request that fails, with a back-off.

    Raises:
        SettingsError: obstore does not recognize the URL or an option, or is not installed.
    """
    with needs(key, "obstore", "storage"):
        from obstore.exceptions import BaseError
        from obstore.store import MemoryStore, from_url
    client: Any = {name: value for name, value in options.items() if name in _CLIENT_OPTIONS}
    own: Any = {name: value for name, value in options.items() if name not in _CLIENT_OPTIONS}
    if any(value.startswith("http://") for value in (url, *options.values())):
        client = {"allow_http": True, **client}
    scheme = urlsplit(url).scheme
    if scheme == "memory":
        return _memory.setdefault(url, MemoryStore())
    retry: Any = {"max_retries": retries, "retry_timeout": _RETRY_TIMEOUT}
    try:
        if scheme == "file":
            return from_url(url, mkdir=True)
        return from_url(url, config=own, client_options=client, retry_config=retry)
    except BaseException as exc:  # obstore panics on an option that lacks the prefix of others
        if not isinstance(exc, BaseError | ValueError | TypeError) and not panicked(exc):
            raise
        raise SettingsError(f"{key}: {without_query(url)} cannot be opened: {reason_of(exc, options)}") from exc


def reason_of(exc: BaseException, options: Mapping[str, str]) -> str:
    """Return the first line of an error of obstore, without values of options and without queries of URLs."""
    reason = without_query(str(exc).partition("\n")[0])
    for value in sorted(options.values(), key=len, reverse=True):
        reason = reason.replace(value, "***") if len(value) > _LONGEST_WORD else reason
    return reason


def without_query(text: str) -> str:
    """Return a text whose URLs have no query, which may be a signature."""
    return _QUERY.sub("", text)
