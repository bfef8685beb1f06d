"""Which addresses are those of this machine alone."""

import functools
import ipaddress
from urllib.parse import urlsplit

_KNOWN = 64


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


@functools.lru_cache(_KNOWN)
def names_loopback(header: str) -> bool:
    """Whether the header `Host` of a request names this machine, as all do that come from no page; empty without one.

    A page of another site may have its own name lead here (DNS rebinding): to the browser, this server is that site.
    """
    try:
        return not header or is_loopback(urlsplit(f"//{header}").hostname or "")
    except ValueError:
        return False
