"""Recognises loopback addresses, and requests that name them."""

import functools
import ipaddress
from urllib.parse import urlsplit

_KNOWN = 64


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server that listens on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


@functools.lru_cache(_KNOWN)
def names_loopback(header: str) -> bool:
    """Return whether the header `Host` of a request is empty or names this machine.

    A page of another site may let its own name resolve to this machine (DNS rebinding): its requests carry that name.
    """
    try:
        return not header or is_loopback(urlsplit(f"//{header}").hostname or "")
    except ValueError:
        return False
