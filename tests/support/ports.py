"""Free ports of the loopback interface."""

import contextlib
import os
import secrets
import socket

import pytest

_PORTS = range(12_000, 32_000)
_PORT_RANGES = 8
_RANGE = len(_PORTS) // _PORT_RANGES
_next = secrets.randbelow(_RANGE)
"""The first port of the range that this process tries next."""


def free_ports(count):
    """Return `count` consecutive free ports from the range of this pytest-xdist worker.

    The ranges are below the system's ephemeral ports, so neither a client's connection nor another worker's test takes
    one of them before it is bound. A port comes again only after all others of the range: a test may need several.
    """
    global _next
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    begin = _PORTS.start + worker % _PORT_RANGES * _RANGE
    for _ in range(100):
        if _next + count > _RANGE:
            _next = 0
        ports = range(begin + _next, begin + _next + count)
        _next += count
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in ports:
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return ports
    raise AssertionError(f"there are no {count} consecutive free ports")


def first_free_port():
    """Return one free port."""
    return free_ports(1)[0]


@pytest.fixture
def free_port():
    """Returns a free port: `free_port() -> int`."""
    return first_free_port
