"""The connection to the server of the tier `redis`, Redis or Valkey, with a circuit breaker and a sweeper.

No call waits longer than a quarter of a second for the next bytes, nor two seconds for all of a reply. A server that
does not answer is *away*: calls fail at once until a background thread has reached it, so that a reader pays for an
outage once. Every error of the client becomes an OSError. Replies are bounded in bytes, since other users may write
values of any length. KEYS and FLUSHDB are never sent, since other users may share the server.
"""

import collections
import logging
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import ClusterDownError, OutOfMemoryError, TryAgainError
from redis.retry import Retry

from anabranch.core.backoff import Backoff
from anabranch.core.errors import DependencyError, SettingsError

_TIMEOUT_SECONDS = 0.25
_LONGEST_REPLY_SECONDS = 2.0
"""Of one reply as a whole: a server may send a byte in time, again and again."""
_FIRST_BACKOFF = timedelta(seconds=0.1)
_LONGEST_BACKOFF = timedelta(seconds=5)
_MAX_BATCH = 256
"""Keys of one command."""
_MAX_BATCH_BYTES = 1_000_000
"""Bytes of their values: other clients wait while the server runs the command."""
_LONGEST_REPLY_BYTES = 2 * _MAX_BATCH_BYTES
"""Longest reply that is read, unless rows are longer."""
_SWEEP_BATCH = 500
_SWEEP_PAUSE_SECONDS = 0.005
_PROBE_LIFE_MS = 10_000
_BESIDES = 1.1
"""Of `replay.redis.bytes`, what the server needs at least, for itself too."""
_PASSING = ("MISCONF", "NOREPLICAS", "BUSY")
"""What errors begin with that the client has no class for, and that go away without a change of our settings."""
_TLS_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")

Sweep = Callable[[str], bool]
"""Returns whether a key, given without the prefix, is an orphan."""

log = logging.getLogger(__name__)


class _ReplyTooLongError(redis.RedisError):
    """A reply is longer than any that this pipeline needs; the connection is closed."""


class _Limit:
    """The most bytes that a reply may have."""

    def __init__(self) -> None:
        self.bytes = _LONGEST_REPLY_BYTES

    def allow(self, value_bytes: int) -> None:
        """Allow replies with values of `value_bytes` bytes."""
        self.bytes = max(self.bytes, 2 * value_bytes)


class _BoundedSocket:
    """A socket that receives no more than the limit after each send, and not for longer than a reply may take."""

    def __init__(self, inner: Any, limit: _Limit) -> None:
        self._inner = inner
        self._limit = limit
        self._received = 0
        self._until = time.monotonic() + _LONGEST_REPLY_SECONDS

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def sendall(self, data: Any) -> None:
        self._received = 0
        self._until = time.monotonic() + _LONGEST_REPLY_SECONDS
        self._inner.sendall(data)

    def recv(self, *arguments: Any) -> bytes:
        data: bytes = self._inner.recv(*arguments)
        self._count(len(data))
        return data

    def recv_into(self, *arguments: Any) -> int:
        size: int = self._inner.recv_into(*arguments)
        self._count(size)
        return size

    def _count(self, size: int) -> None:
        self._received += size
        if time.monotonic() > self._until:
            raise TimeoutError(f"a reply takes longer than {_LONGEST_REPLY_SECONDS:g} s")
        if self._received > self._limit.bytes:
            raise _ReplyTooLongError(f"a reply has more than {self._limit.bytes} bytes")


def _bounded(connection: type[Any], limit: _Limit) -> type[Any]:
    """Return a subclass of a class of connections, such as TLS, whose sockets are bounded."""

    class Bounded(connection):  # type: ignore[misc]
        def _connect(self) -> Any:
            return _BoundedSocket(super()._connect(), limit)

    return Bounded


class RedisServer:
    """The keys of one pipeline and rank, which begin with `prefix`. Any thread may use it."""

    def __init__(self, url: str, prefix: str) -> None:
        """Prepare; nothing is sent before `open`.

        Raises:
            SettingsError: the URL cannot be used.
        """
        self.prefix = prefix
        try:
            self._client = redis.Redis.from_url(
                url,
                socket_timeout=_TIMEOUT_SECONDS,
                socket_connect_timeout=_TIMEOUT_SECONDS,
                retry=Retry(NoBackoff(), 0),
            )
        except ValueError as exc:
            raise SettingsError(f"replay.redis.url cannot be used: {exc}") from exc
        self._limit = _Limit()
        pool = self._client.connection_pool
        pool.connection_class = _bounded(pool.connection_class, self._limit)
        options = pool.connection_kwargs
        _check_files(options)
        self.address = str(options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}")
        """The address, without user and password."""
        self._away: str | None = None
        self._refusal: str | None = None
        self._backoff = Backoff(_FIRST_BACKOFF, _LONGEST_BACKOFF)
        self._back_at = 0.0
        self._sweeps: collections.deque[Sweep] = collections.deque()
        self._changed = threading.Condition()
        self._closing = False
        self._keeper = threading.Thread(target=self._maintain, name="redis-keeper", daemon=True)

    @property
    def problem(self) -> str | None:
        """One sentence on what does not work, else None."""
        return self._away or self._refusal

    def __enter__(self) -> "RedisServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self, *, needed: bool) -> None:
        """Connect, and start the background thread.

        Args:
            needed: whether the server must answer now; else the background thread reconnects to one that is away.

        Raises:
            SettingsError: the server answers, and refuses the user, the password or the commands.
            DependencyError: the server cannot be reached, or takes no rows for now, and is needed.
        """
        try:
            self._probe()
        except redis.AuthenticationError as exc:
            raise SettingsError(f"replay.redis: {self.address} refuses user or password of url: {exc}") from exc
        except OutOfMemoryError as exc:  # it has rows, and evicts or refuses others
            self._set_refusal(exc)
        except redis.ResponseError as exc:
            if not _passes(exc):
                raise SettingsError(f"replay.redis: {self.address} cannot be used: {exc}") from exc
            if needed:
                raise DependencyError(
                    f"replay.redis: {self.address} takes no rows for now: {exc}; repair it, or fix replay.redis.url"
                ) from exc
            self._set_refusal(exc)
        except TypeError as exc:
            raise SettingsError(f"replay.redis.url has an option that the client does not support: {exc}") from exc
        except redis.RedisError as exc:
            if needed:
                raise DependencyError(
                    f"replay.redis: {self.address} does not answer: {exc}; start it, or fix replay.redis.url"
                ) from exc
            self._set_away(exc)
        self._keeper.start()

    def get(self, keys: Sequence[str], value_bytes: int) -> list[bytes | None]:
        """Return the values of keys, without `prefix`, of `value_bytes` bytes each; None where there is none.

        Of a longer value, which another user has written, only one byte more is read.

        Raises:
            OSError: the server is away.
        """
        self._limit.allow(value_bytes)
        values: list[bytes | None] = []
        for chunk in _chunks(len(keys), value_bytes):
            values += self._call(self._values, [self.prefix + key for key in keys[chunk]], value_bytes)
        return values

    def _values(self, names: Sequence[str], value_bytes: int) -> list[bytes | None]:
        try:
            values: list[Any] = self._client.mget(names)
        except _ReplyTooLongError:
            sentence = f"replay.redis: {self.address} has values that are no rows under this pipeline's keys"
            if sentence != self._refusal:
                log.warning("%s; who writes there?", sentence)
            self._refusal = sentence
            beginnings = self._client.pipeline(transaction=False)
            for name in names:
                beginnings.getrange(name, 0, value_bytes)
            answers = beginnings.execute(raise_on_error=False)
            values = [answer if isinstance(answer, bytes) and answer else None for answer in answers]
        return values

    def put(self, keys: Sequence[str], values: Sequence[memoryview]) -> None:
        """Set keys, without `prefix`, to values of equal size.

        Raises:
            OSError: the server is away, or refuses: its memory is full or it is a replica. Some keys may be set.
        """
        for chunk in _chunks(len(keys), len(values[0]) if values else 1):
            pairs = {self.prefix + key: value for key, value in zip(keys[chunk], values[chunk], strict=True)}
            self._call(self._client.mset, pairs)
        if self._refusal is not None and keys:
            log.info("replay.redis: %s takes rows again", self.address)
            self._refusal = None

    def remove(self, keys: Sequence[str]) -> None:
        """Remove keys, without `prefix`, if they exist; raises OSError when the server is away or refuses."""
        for chunk in _chunks(len(keys), 1):
            self._call(self._client.unlink, *(self.prefix + key for key in keys[chunk]))

    def sweep_later(self, is_orphan: Sweep) -> None:
        """Remove orphans in the background, some hundred at a time; if the server is away, once it is back."""
        with self._changed:
            self._sweeps.append(is_orphan)
            self._changed.notify()

    def memory(self) -> tuple[int, str]:
        """Return the server's `maxmemory` in bytes, 0 for none, and `maxmemory_policy`; raises OSError.

        A server may refuse to say: that says nothing of rows.
        """
        try:
            info: Any = self._client.info("memory")
        except redis.RedisError as exc:
            raise OSError(f"replay.redis: {self.address} does not say how much memory it has: {exc}") from exc
        return int(info.get("maxmemory", 0)), str(info.get("maxmemory_policy", "noeviction"))

    def check_memory(self, needed_bytes: int, *, is_cache: bool) -> Iterator[tuple[str, str]]:
        """Yield what of the server's memory does not go with this many bytes of rows: "memory" or "policy", a sentence.

        `is_cache`: whether another tier has the rows too. Raises OSError as `memory`.
        """
        most, policy = self.memory()
        if most and most < needed_bytes * _BESIDES:
            sizes = f"{most / 1e6:,.0f} MB, and replay.redis.bytes is {needed_bytes / 1e6:,.0f} MB"
            yield "memory", f"Redis at {self.address} has {sizes}"
        if most and policy != "noeviction" and not is_cache:
            yield "policy", f"Redis at {self.address} has maxmemory-policy {policy}, and holds what no other tier has"

    def close(self) -> None:
        """Stop the background thread and close the connections."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._keeper.is_alive():
            self._keeper.join()
        self._client.close()

    def _call(self, command: Callable[..., Any], *arguments: object) -> Any:
        if self._away is not None:
            raise OSError(self._away)
        try:
            return command(*arguments)
        except redis.ResponseError as exc:
            self._set_refusal(exc)
            if isinstance(exc, redis.ReadOnlyError):
                # It has become a replica; its name may resolve to another server now.
                self._client.connection_pool.disconnect(inuse_connections=False)
            raise OSError(self._refusal) from exc
        except redis.RedisError as exc:
            self._set_away(exc)
            raise OSError(self._away) from exc

    def _set_refusal(self, exc: redis.RedisError) -> None:
        """Record that the server answers and refuses a command."""
        sentence = f"replay.redis: {self.address} refuses rows: {exc}"
        if isinstance(exc, OutOfMemoryError):
            sentence = f"replay.redis: {self.address} is full; raise its maxmemory, or lower replay.redis.bytes"
        if sentence != self._refusal:
            log.warning("%s", sentence)
        self._refusal = sentence

    def _set_away(self, exc: redis.RedisError) -> None:
        """Record that the server is away. The back-off goes on if it was back for a moment only."""
        with self._changed:
            if self._away is None:
                if time.monotonic() - self._back_at > _LONGEST_BACKOFF.total_seconds():
                    self._backoff.reset()
                self._away = f"replay.redis: {self.address} does not answer ({exc}); the store goes on without it"
                log.warning("%s", self._away)
                self._changed.notify()

    def _maintain(self) -> None:
        """Reconnect to a server that is away, and sweep one that is not, until `close`."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._away is not None or bool(self._sweeps))
            if self._closes_within(self._backoff.next() if self._away is not None else _SWEEP_PAUSE_SECONDS):
                return
            if self._away is not None:
                self._reconnect()
            else:
                self._sweep(self._sweeps[0])

    def _closes_within(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._closing, seconds)

    def _reconnect(self) -> None:
        try:
            self._probe()
        except redis.ResponseError:
            pass  # it answers
        except redis.RedisError:
            return
        log.info("replay.redis: %s answers again", self.address)
        self._back_at, self._away = time.monotonic(), None

    def _probe(self) -> None:
        """Write a key that expires: a server whose writers are paused still answers a PING."""
        self._client.set(f"{self.prefix}probe", b"", px=_PROBE_LIFE_MS)

    def _sweep(self, is_orphan: Sweep) -> None:
        removed, cursor = 0, 0
        try:
            while True:
                cursor, keys = self._client.scan(cursor, match=f"{self.prefix}*", count=_SWEEP_BATCH)
                names = [str(key, "utf-8", "replace") if isinstance(key, bytes) else key for key in keys]
                orphans = [name for name in names if is_orphan(name.removeprefix(self.prefix))]
                if orphans:
                    removed += int(self._client.unlink(*orphans))
                if not cursor:
                    break
                if self._closes_within(_SWEEP_PAUSE_SECONDS):
                    return
        except redis.ResponseError as exc:
            log.warning("replay.redis: %s lets no orphans be removed: %s", self.address, exc)
        except redis.RedisError as exc:
            self._set_away(exc)
            return
        if removed:
            log.info("removed %d rows from %s that belong to no checkpoint", removed, self.address)
        self._sweeps.popleft()


def _passes(exc: redis.ResponseError) -> bool:
    """Return whether a refusal is of the server's state (a failed snapshot, a failover), and not of our settings."""
    if isinstance(exc, OutOfMemoryError | redis.ReadOnlyError | ClusterDownError | TryAgainError):
        return True
    return str(exc).startswith(_PASSING)


def _check_files(options: Mapping[str, Any]) -> None:
    """Raise SettingsError for unusable TLS files; the client would report them as a server that is away."""
    files = {name: options[name] for name in _TLS_FILES if options.get(name)}
    certificate, key = files.get("ssl_certfile"), files.get("ssl_keyfile")
    try:
        if "ssl_ca_certs" in files:
            ssl.create_default_context(cafile=files["ssl_ca_certs"])
        if certificate is not None:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(certificate, key, options.get("ssl_password"))
    except OSError as exc:  # as an SSLError is
        named = ", ".join(f"{name}={path}" for name, path in files.items())
        raise SettingsError(f"replay.redis.url names a file for TLS that cannot be used, of {named}: {exc}") from exc


def _chunks(n: int, value_bytes: int) -> Iterator[slice]:
    step = max(1, min(_MAX_BATCH, _MAX_BATCH_BYTES // max(1, value_bytes)))
    return (slice(begin, begin + step) for begin in range(0, n, step))
