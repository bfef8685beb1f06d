"""Listens on addresses; recognises those of loopback, and requests that name them."""

import errno
import functools
import ipaddress
import socket
from urllib.parse import urlsplit

from anabranch.core.errors import SettingsError

_KNOWN = 64
_OWN_ADDRESS = "name an address of this machine"


class TakenError(SettingsError):
    """Another program listens on the port."""


def listen(key: str, host_key: str, host: str, port: int, backlog: int = 1) -> socket.socket:
    """Return a listening socket.

    Args:
        key: the setting with the port.
        host_key: the setting with the host.
        host: a name or an address, with or without brackets.
        port: 0 takes a free one.
        backlog: connections that wait to be accepted.

    Raises:
        SettingsError: as `bind_error`.
    """
    try:
        addresses = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
        family, kind, protocol, _, address = addresses[0]
        listener = socket.socket(family, kind, protocol)  # asyncio sets TCP_NODELAY only where the protocol is named
    except OSError as exc:
        raise SettingsError(f'{host_key} = "{host}" cannot be bound: {exc.strerror}; {_OWN_ADDRESS}') from exc
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(backlog)
    except OSError as exc:
        listener.close()
        raise bind_error(key, host_key, host, port, exc) from exc
    return listener


def bind_error(key: str, host_key: str, host: str, port: int, error: OSError) -> SettingsError:
    """Return why an address cannot be listened on: TakenError where another program does, else SettingsError."""
    if error.errno == errno.EADDRINUSE:
        way_out = "stop the program that has it, or choose another port (0 takes a free one)"
        return TakenError(f"{key} = {port} is taken on {host}: {way_out}")
    if error.errno == errno.EACCES:
        wrong, way_out = f"{key} = {port}", "choose a port above 1023"
    else:
        wrong, way_out = f'{host_key} = "{host}"', _OWN_ADDRESS
    return SettingsError(f"{wrong} cannot be bound: {error.strerror or error}; {way_out}")


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
