"""Redis, where `[replay]` has a tier there: whether it answers, lets the pipeline write, and has room."""

from collections.abc import Iterator

from anabranch.core.errors import DependencyError, SettingsError
from anabranch.doctor.findings import CheckContext, Finding, found, ok
from replay.config import ReplaySettings

_OTHERS = 1.1
"""Of `replay.redis.bytes`, what the server needs at least, for itself too."""


def check_redis(context: CheckContext) -> Iterator[Finding]:
    """Reach it as the learner would; a key is written that goes away by itself."""
    replay = context.config.pipeline.replay
    if replay.redis is None:
        return
    try:
        from replay.tiers.redis_server import RedisServer
    except ImportError:  # a finding of the installation's check
        return
    try:
        server = RedisServer(replay.redis.url.get_secret_value(), f"anabranch:{context.config.pipeline.name}:doctor:")
        with server:
            server.open(needed=True)
            if server.problem is not None:
                yield found("redis.full", f"{server.problem}.")
            else:
                yield ok(f"Redis at {server.address} answers, and can be written.")
            yield from _check_memory(server.memory(), server.address, replay)
    except DependencyError as exc:
        yield found("redis.connect" if replay.disk is None else "redis.away", f"{exc}.")
    except SettingsError as exc:
        yield found("redis.refused", f"{exc}.")
    except OSError as exc:
        yield found("redis.unseen", f"Its memory was not checked: {exc}.")


def _check_memory(memory: tuple[int, str], address: str, replay: ReplaySettings) -> Iterator[Finding]:
    assert replay.redis is not None
    (most, policy), needed = memory, int(replay.redis.bytes)
    if most and most < needed * _OTHERS:
        message = f"Redis at {address} has {_megabytes(most)}, and replay.redis.bytes is {_megabytes(needed)}."
        yield found("redis.memory", message, needed=f"{needed * 1.25 / 1e6:.0f}mb")
    if most and policy != "noeviction" and replay.disk is None:
        message = f"Redis at {address} has maxmemory-policy {policy}, and holds what no other tier has."
        yield found("redis.policy", message)


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"
