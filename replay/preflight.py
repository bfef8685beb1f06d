"""What would keep the store from its rows: Redis, and the memory of the host. Imports no torch at load time."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from anabranch.core.errors import DependencyError, SettingsError
from anabranch.core.preflight import Finding, check_import, info, ok, problem, warning
from anabranch.replay.settings import ReplaySettings

if TYPE_CHECKING:
    from anabranch.replay.row_layout import Fields

_OVERHEAD = 1.1
"""Slots of the store by slots for events: some are kept free."""


def check_install(replay: ReplaySettings) -> Iterator[Finding]:
    """Whether the client of Redis can be imported, where there is a tier."""
    if replay.redis is not None:
        yield from check_import("replay.redis", "redis", "redis")


def check_redis(replay: ReplaySettings, name: str) -> Iterator[Finding]:
    """Reach it as the learner would; a key is written that goes away by itself."""
    if replay.redis is None:
        return
    try:
        from anabranch.replay.tiers.redis_server import RedisServer
    except ImportError:  # a finding of the installation's check
        return
    try:
        server = RedisServer(replay.redis.url.get_secret_value(), f"anabranch:{name}:doctor:")
        with server:
            server.open(needed=True)
            if server.problem is not None:
                yield warning("redis.full", f"{server.problem}.", "Raise its maxmemory, or lower replay.redis.bytes.")
            else:
                yield ok(f"Redis at {server.address} answers, and can be written.")
            needed = int(replay.redis.bytes)
            for kind, sentence in server.check_memory(needed, is_cache=replay.disk is not None):
                if kind == "memory":
                    fix = f'Raise it: "CONFIG SET maxmemory {needed * 1.25 / 1e6:.0f}mb"; or lower replay.redis.bytes.'
                    yield warning("redis.memory", f"{sentence}.", fix)
                else:
                    fix = 'Set it to noeviction, or add replay.disk: "CONFIG SET maxmemory-policy noeviction".'
                    yield warning("redis.policy", f"{sentence}.", fix)
    except DependencyError as exc:
        if replay.disk is None:
            yield problem("redis.connect", f"{exc}.", "Start or repair it, or fix replay.redis.url.", unreachable=True)
        else:
            fix = "Start or repair it, or fix replay.redis.url; the store does without it meanwhile."
            yield warning("redis.away", f"{exc}.", fix)
    except SettingsError as exc:
        yield problem("redis.refused", f"{exc}.", "Fix replay.redis.url, or the rights of its user on anabranch:*.")
    except OSError as exc:
        fix = "Allow INFO to the user of replay.redis.url, or nothing."
        yield info("redis.unseen", f"Its memory was not checked: {exc}.", fix)


def check_memory(needed: int) -> Iterator[Finding]:
    """Whether the host has memory for the rows of the memory tier, of `needed` bytes."""
    if needed > (free := free_memory()):
        message = f"replay.device_bytes needs {needed / 1e6:,.0f} MB, but cpu has {free / 1e6:,.0f} MB free."
        yield problem("device.memory", message, "Lower replay.device_bytes or replay.capacity.")


def memory_bytes(replay: ReplaySettings, columns: "Fields") -> int:
    """Return the bytes of the memory tier, with events of these columns."""
    from anabranch.replay.row_layout import RowLayout

    most = int(replay.capacity * _OVERHEAD) * RowLayout(columns).row_bytes
    return min(int(replay.device_bytes), most)


def free_memory() -> int:
    """Return the free bytes of the host; all of them where it does not report that."""
    free = []
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free.append(next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")))
        # What a container may take, when it is less.
        group = Path("/sys/fs/cgroup")
        free.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    except (OSError, ValueError, StopIteration):
        pass
    return min(free) if free else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
