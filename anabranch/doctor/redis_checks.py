"""Redis, where `[replay]` has a tier there: whether it answers, lets the pipeline write, and has room."""

from collections.abc import Iterator

from anabranch.core.errors import DependencyError, SettingsError
from anabranch.doctor.findings import CheckContext, Finding, found, ok


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
            needed = int(replay.redis.bytes)
            for kind, sentence in server.check_memory(needed, is_cache=replay.disk is not None):
                yield found(f"redis.{kind}", f"{sentence}.", needed=f"{needed * 1.25 / 1e6:.0f}mb")
    except DependencyError as exc:
        yield found("redis.connect" if replay.disk is None else "redis.away", f"{exc}.")
    except SettingsError as exc:
        yield found("redis.refused", f"{exc}.")
    except OSError as exc:
        yield found("redis.unseen", f"Its memory was not checked: {exc}.")
