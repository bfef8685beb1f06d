"""Composes the store that `[replay]` asks for."""

import contextlib
import functools
import logging
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ingest.errors import DependencyError, SettingsError
from ingest.schema import Schema
from replay.admission import Quotas
from replay.config import RedisSettings, ReplaySettings
from replay.contents import Contents
from replay.disk import DiskTier
from replay.entries import Entries
from replay.memory import MemoryTier
from replay.neighbours import Neighbours
from replay.policies import ADMISSIONS, SAMPLERS, Company, Policies, Surroundings
from replay.redis_tier import RedisTier
from replay.rows import Fields, RowLayout
from replay.store import MOST_INSERTED, Store, slots_for
from replay.tiers import Tiers
from replay.whereabouts import CLUSTERS, Whereabouts

if TYPE_CHECKING:
    from replay.redis import RedisServer

_SUFFIX = ".rows"
_EVENTS_A_CLUSTER = 64
_ROOMY = 65_536
"""Slots for events that are replaced between cuts, where the disk or Redis has them to give."""
_GENERATION = 16
"""Letters of the name of a generation of keys: each key has them."""
_DRAWN_ALIKE = {"uniform"}
"""Samplers under which no event is drawn more often than another, so that a cache need not follow them."""

log = logging.getLogger(__name__)


def build_store(
    settings: ReplaySettings,
    schema: Schema,
    device: torch.device,
    seed: int,
    folder: Path | None = None,
    contents: Contents | None = None,
    extra: Fields | None = None,
    dim: int | None = None,
    *,
    keys: str = "",
    first: bool = False,
    step: int = 0,
) -> Store:
    """Return the store, with what a cut has of it.

    Args:
        settings: `[replay]`.
        schema: of the events.
        device: the learner's.
        seed: of what is kept and drawn.
        folder: where the disk tier's files lie; needed where there is such a tier, or `contents` is of one.
        contents: of the cut to go on from; None begins empty.
        extra: further columns to keep of each event beside the schema's, such as logits: dtype and shape by name.
        dim: numbers of the model's embedding; None where there is none.
        keys: what its keys in Redis begin with, and no other's do; needed where there is such a tier.
        first: whether there is no cut that could name what earlier processes have left in Redis.
        step: events that a step may offer; `has_room` tells whether they find slots, which are there after some cuts.

    Raises:
        SettingsError: the bytes cannot hold a single event or cannot be had, or the contents do not fit or are gone.
        DependencyError: Redis is to hold the contents, and does not answer.
    """
    layout = RowLayout({**schema.payload(), **(extra or {})})
    row_bytes, pinned = layout.row_bytes, device.type == "cuda"
    k, count = _size(settings, row_bytes, step)
    with contextlib.ExitStack() as opened:
        server = None
        if settings.redis is not None:
            server = _reached(settings.redis, keys, needed=settings.disk is None or _in_redis(contents))
            opened.enter_context(server)
        source = _source_of(contents, folder, server, row_bytes, pinned=pinned)
        disk = redis = None
        if settings.disk is not None:
            assert folder is not None
            disk = _disk(folder, source, row_bytes, count, pinned=pinned)
        if settings.redis is not None and server is not None:
            redis = _redis(settings.redis, server, disk, source, row_bytes, count, pinned=pinned)
        if source is disk or (isinstance(source, RedisTier) and redis is not None and source.id == redis.id):
            source = None
        memory = _memory(settings, row_bytes, min(int(settings.device_bytes) // row_bytes, count), device)
        tiers = Tiers(memory, disk, redis, promote=settings.sampling not in _DRAWN_ALIKE)
        store = _store(settings, schema, layout, tiers, k, seed, dim, step)
        opened.pop_all()
        opened.callback(store.close)
        store.discard_later(_leftovers(folder, disk, redis, first=first))
        if contents is not None:
            _restore(store, contents, source)
        opened.pop_all()
    return store


def _store(
    settings: ReplaySettings,
    schema: Schema,
    layout: RowLayout,
    tiers: Tiers,
    k: int,
    seed: int,
    dim: int | None,
    step: int,
) -> Store:
    """Compose the store of k events, with its policies, and start the index process where they need one."""
    classes = schema.label.one_of
    admission = ADMISSIONS[settings.admission](
        Surroundings(classes, settings.half_life, None if dim is None else CLUSTERS)
    )
    if k < admission.groups:
        raise SettingsError(
            f'replay.admission = "{settings.admission}" shares the store among {admission.groups} groups, and '
            f"it holds {k} events; raise replay.capacity or its bytes"
        )
    quotas = Quotas(k, admission.groups)
    entries = Entries(tiers.slots, quotas.limit + MOST_INSERTED, seed, admission.groups)
    whereabouts = None
    if dim is not None:
        clusters = max(1, min(CLUSTERS - 1, k // _EVENTS_A_CLUSTER))
        neighbours = Neighbours(dim, quotas.limit + MOST_INSERTED, clusters=clusters)
        whereabouts = Whereabouts(entries, tiers.slots, neighbours)
    company = Company(entries, tiers.slots, classes, settings.half_life, whereabouts)
    policies = Policies(admission, quotas, SAMPLERS[settings.sampling](company), whereabouts)
    store = Store(policies, entries, layout, tiers, seed, weighted=schema.weight is not None, step=step)
    if whereabouts is not None:
        whereabouts.neighbours.open()
    return store


def discard_files(folder: Path) -> None:
    """Remove the disk tier's files, when there is no cut that could name them."""
    for path in [*folder.glob(f"*{_SUFFIX}"), *folder.glob(f".tmp-*{_SUFFIX}")]:
        _discard(path)


def _size(settings: ReplaySettings, row_bytes: int, step: int) -> tuple[int, int]:
    """Return how many events are kept, and how many slots the home has."""
    if settings.disk is not None:
        slots, setting = DiskTier.slots_in(int(settings.disk.bytes), row_bytes), f"disk.bytes = {settings.disk.bytes:d}"
    elif settings.redis is not None:
        slots, setting = _slots_in_redis(settings.redis, row_bytes), f"redis.bytes = {settings.redis.bytes:d}"
    else:
        slots, setting = int(settings.device_bytes) // row_bytes, f"device_bytes = {settings.device_bytes:d}"
        k = _most_events(settings.capacity, slots, row_bytes, setting, step)
        return k, k + _spare(k, step)
    k = _most_events(settings.capacity, slots, row_bytes, setting, step)
    return k, min(slots, k + _spare(k, step) + _ROOMY)


def _slots_in_redis(settings: RedisSettings, row_bytes: int) -> int:
    return int(settings.bytes) // RedisTier.bytes_of(row_bytes)


def _reached(settings: RedisSettings, keys: str, *, needed: bool) -> "RedisServer":
    try:
        from replay.redis import RedisServer
    except ImportError as exc:  # an extra
        raise SettingsError(f"replay.redis needs {exc.name}; install it: pip install 'anabranch[redis]'") from exc
    assert keys
    server = RedisServer(settings.url.get_secret_value(), f"anabranch:{keys}:")
    server.open(needed=needed)
    return server


def _in_redis(contents: Contents | None) -> bool:
    file = None if contents is None else contents.standing.file
    return file is not None and file.name == RedisTier.name


def _source_of(
    contents: Contents | None, folder: Path | None, server: "RedisServer | None", row_bytes: int, *, pinned: bool
) -> DiskTier | RedisTier | None:
    """Open what has the payload of a cut; None where the cut has it."""
    if contents is None or contents.standing.file is None:
        return None
    standing, file = contents.standing, contents.standing.file
    if _in_redis(contents):
        if server is None:
            raise SettingsError(
                f"the replay contents of cut {standing.cut} are in Redis, and replay.redis is not set; set it again, "
                "or begin anew by moving the cuts away"
            )
        named = [*contents.index["slot"].tolist(), *standing.retired[:, 1].tolist()]
        return RedisTier(server, file.id, row_bytes, max(named, default=-1) + 1, pinned=pinned)
    assert folder is not None
    source = DiskTier.open(folder / file.name, pinned=pinned)
    if source.id != file.id:
        source.close()
        raise SettingsError(f"{source.path} is not the file that cut {standing.cut} belongs to; put that one back")
    return source


def _disk(folder: Path, source: DiskTier | RedisTier | None, row_bytes: int, count: int, *, pinned: bool) -> DiskTier:
    """Return the disk tier: the cut's own file where it fits, else a new one."""
    if isinstance(source, DiskTier) and (source.row_bytes, source.slots) == (row_bytes, count):
        return source
    number = max((int(path.stem) for path in folder.glob(f"*{_SUFFIX}") if path.stem.isdigit()), default=0) + 1
    return DiskTier.create(folder / f"{number}{_SUFFIX}", row_bytes, count, pinned=pinned)


def _redis(
    settings: RedisSettings,
    server: "RedisServer",
    disk: DiskTier | None,
    source: DiskTier | RedisTier | None,
    row_bytes: int,
    count: int,
    *,
    pinned: bool,
) -> RedisTier:
    """Return the tier in Redis: of the disk's generation, so that it is warm after a restart, of the cut's, or new."""
    if disk is not None:
        return RedisTier(
            *(server, disk.id[:_GENERATION], row_bytes, min(count, _slots_in_redis(settings, row_bytes))), pinned=pinned
        )
    goes_on = isinstance(source, RedisTier) and source.slots <= count
    generation = source.id if source is not None and goes_on else secrets.token_hex(_GENERATION // 2)
    return RedisTier(server, generation, row_bytes, count, pinned=pinned)


def _leftovers(
    folder: Path | None, disk: DiskTier | None, redis: RedisTier | None, *, first: bool
) -> list[Callable[[], None]]:
    """Return what removes things that only cuts of earlier processes can name."""
    files = [] if folder is None else list(folder.glob(f"*{_SUFFIX}"))
    found: list[Callable[[], None]] = [
        functools.partial(_discard, path) for path in files if disk is None or path != disk.path
    ]
    if redis is not None and first:
        redis.sweep_later()
    elif redis is not None:
        found.append(redis.sweep_later)
    return found


def _discard(path: Path) -> None:
    log.info("removing %s, which belongs to no cut", path)
    path.unlink(missing_ok=True)


def _restore(store: Store, contents: Contents, source: DiskTier | RedisTier | None) -> None:
    if source is None:
        store.restore(contents)
        return
    log.info("copying %d stored events from %s", len(contents.index), source.name)
    try:
        store.restore(contents, source)
    except OSError as exc:
        raise DependencyError(f"the replay contents cannot be read: {exc}") from exc
    finally:
        source.close()


def _memory(settings: ReplaySettings, row_bytes: int, slots: int, device: torch.device) -> MemoryTier:
    on_host = settings.device_memory == "host"
    try:
        return MemoryTier(row_bytes, slots, device, on_host=on_host)
    except RuntimeError as exc:
        place = "the host" if on_host else device
        raise SettingsError(
            f"replay: {slots} events of {row_bytes} bytes cannot be had on {place}; lower capacity or device_bytes: "
            f"{str(exc).splitlines()[0]}"
        ) from exc


def _most_events(capacity: int, slots: int, row_bytes: int, setting: str, step: int) -> int:
    """Return how many of `capacity` events so many slots can hold, with what is needed beside them."""
    k = min(capacity, slots)
    while k > 0 and (too_many := k + _spare(k, step) - slots) > 0:
        k -= max(1, too_many * 4 // 9)  # one event less leaves 9/4 slots at most
    if k < 1:
        raise SettingsError(
            f"replay.{setting} is too small: an event has {row_bytes} bytes, and {_spare(1, step)} slots are needed "
            "beside those for events"
        )
    if k < capacity:
        log.warning("replay.%s holds %d events of %d bytes, not %d", setting, k, row_bytes, capacity)
    return k


def _spare(k: int, step: int) -> int:
    """Slots beside k: the reservoir's slack, what a step brings, and what is replaced while a cut is written."""
    quotas = Quotas(k)
    return quotas.limit - k + quotas.at_once + slots_for(step, quotas) + k // 16
