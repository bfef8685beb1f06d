"""Composes the store that `[replay]` configures."""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from anabranch.core.errors import AnabranchError, DependencyError, SettingsError
from anabranch.core.failures import out_of_memory
from anabranch.core.users_code import in_one_line
from anabranch.ingest.events.schema import Schema
from anabranch.replay.embedding_index.client import NeighbourClient
from anabranch.replay.embedding_index.embedding_tracker import CLUSTERS, EmbeddingTracker
from anabranch.replay.policies import AdmissionContext, SamplerContext, make_admission, make_sampler
from anabranch.replay.reservoir.embeddings import EventEmbeddings, RecentEmbeddings
from anabranch.replay.reservoir.event_table import EventTable
from anabranch.replay.reservoir.quotas import Quotas
from anabranch.replay.row_layout import Fields, RowLayout
from anabranch.replay.settings import INDEXED, ReplaySettings
from anabranch.replay.snapshot import StoreSnapshot
from anabranch.replay.store import MAX_INSERTED, Policies, Store
from anabranch.replay.tiers.cached_hierarchy import CachedHierarchy
from anabranch.replay.tiers.hierarchy import TierHierarchy
from anabranch.replay.tiers.memory import MemoryTier
from anabranch.replay.tiers.registry import TIERS, kind_with, kinds_of
from anabranch.replay.tiers.tier import SlowTier, TierContext, TierFactory

_EVENTS_A_CLUSTER = 64
_ROOMY = 65_536
"""Further slots for events that are replaced between checkpoints, if the primary tier has enough."""
_RECENT = 512
"""New events among which near-duplicates are searched, for `distinct`."""

log = logging.getLogger(__name__)


def build_store(
    settings: ReplaySettings,
    schema: Schema,
    device: torch.device,
    seed: int,
    folder: Path | None = None,
    contents: StoreSnapshot | None = None,
    extra: Fields | None = None,
    dim: int | None = None,
    *,
    keys: str = "",
    first: bool = False,
    step: int = 0,
    complete: bool = False,
    in_memory: bool = False,
) -> Store:
    """Return the store, restored from a checkpoint if there is one.

    Args:
        settings: `[replay]`.
        schema: of the events.
        device: the learner's.
        seed: of admission and sampling, 128 bits: secret, where others may send events.
        folder: of the files of tiers; needed if a tier has files, or `contents` names one.
        contents: of the checkpoint to restore; None starts empty.
        extra: further columns to keep of each event, such as logits: dtype and shape by name.
        dim: numbers of the model's embedding; None if it has none.
        keys: the prefix of its keys on servers, and of no others; needed if a tier is on a server.
        first: whether there is no checkpoint that could name rows of earlier processes on servers.
        step: events that a step may add; `has_room` returns whether there are slots for them.
        complete: whether checkpoints have the rows of slower tiers too, for a host without these.
        in_memory: whether the events of slower tiers are kept in memory, without such tiers: which tier has a row
            changes no step.

    Raises:
        SettingsError: the bytes are too few for one event or cannot be allocated; the contents do not fit or are gone.
        DependencyError: a server that has the contents does not answer.
    """
    layout = RowLayout({**schema.payload(), **(extra or {})})
    if in_memory and settings.slower:
        events, slots = store_size(settings, layout.row_bytes, step)
        only: dict[str, Any] = {"disk": None, "redis": None, "tiers": {}, "capacity": events, "device_memory": "host"}
        settings = settings.model_copy(update={**only, "device_bytes": slots * layout.row_bytes})
    kinds = kinds_of(settings, TierContext(folder, keys, layout.row_bytes, pinned=device.type == "cuda"))
    chain = {name: kind for name, kind in kinds.items() if name in settings.slower}
    k, count = _size(settings, chain, layout.row_bytes, step)
    with contextlib.ExitStack() as opened:
        # First: where the device is short of memory, this is called again.
        memory = _memory(settings, layout.row_bytes, count, device)
        opened.callback(memory.close)
        owner = kind_with(contents, kinds.values())
        for key, kind in kinds.items():
            with _one_sentence(key):
                kind.connect(opened, needed=kind is owner or kind in [*chain.values()][-1:])
        source = None
        if owner is not None and contents is not None:
            with _one_sentence(next(key for key, kind in kinds.items() if kind is owner)):
                source = _existing(owner, contents)
        slow = _slow(chain, source, count)
        if source is not None and slow and slow[-1].file == source.file:
            source = None
        # All events are sampled equally often, so that no row is worth more in the cache than another.
        promote = settings.sampling != "uniform"
        tiers = CachedHierarchy(memory, slow, promote=promote) if slow else TierHierarchy(memory)
        store = _store(settings, schema, layout, tiers, k, seed, dim, step, complete=complete)
        opened.pop_all()
        opened.callback(store.close)
        for key, kind in kinds.items():
            with _one_sentence(key):
                store.cleanup_actions += kind.cleanup_actions(first=first)
        if contents is not None:
            _restore(store, contents, source)
        opened.pop_all()
    return store


def store_size(settings: ReplaySettings, row_bytes: int, step: int) -> tuple[int, int]:
    """Return how many events a store keeps, and how many slots its primary tier has; opens nothing.

    Args:
        settings: `[replay]`.
        row_bytes: bytes of a row.
        step: events that a step may add.

    Raises:
        SettingsError: the bytes are too few for one event.
    """
    kinds = kinds_of(settings, TierContext(None, "", row_bytes))
    return _size(settings, {name: kind for name, kind in kinds.items() if name in settings.slower}, row_bytes, step)


def check_policies(settings: ReplaySettings, schema: Schema, dim: int | None) -> None:
    """Raise SettingsError if the schema, or a model whose embedding has `dim` numbers, lacks what a policy needs, or a
    tier of the user refuses its arguments."""
    kinds_of(settings, TierContext(None, "", 1))
    classes, clusters = schema.label.one_of, None if dim is None else CLUSTERS
    make_admission(settings, AdmissionContext(classes, settings.half_life, clusters, settings.class_floor))
    if dim is None or settings.sampling not in INDEXED:
        make_sampler(settings, SamplerContext(EventTable(1, 1, 1), 1, classes, settings.half_life, None, dim))


def _store(
    settings: ReplaySettings,
    schema: Schema,
    layout: RowLayout,
    tiers: TierHierarchy,
    k: int,
    seed: int,
    dim: int | None,
    step: int,
    *,
    complete: bool,
) -> Store:
    """Compose the store of k events with its policies, and start the index process if they need it."""
    classes = schema.label.one_of
    admission = make_admission(
        settings, AdmissionContext(classes, settings.half_life, None if dim is None else CLUSTERS, settings.class_floor)
    )
    floors = admission.floors(k)
    if floors is None and k < admission.groups:
        raise SettingsError(
            f'replay.admission = "{settings.admission}" shares the store among {admission.groups} groups, and '
            f"it holds {k} events; raise replay.capacity or its bytes"
        )
    quotas = Quotas(k, admission.groups, floors)
    event_table = EventTable(tiers.slots, quotas.limit + MAX_INSERTED, admission.groups)
    tracker = None
    if dim is not None and {settings.admission, settings.sampling} & INDEXED:
        clusters = max(1, min(CLUSTERS - 1, k // _EVENTS_A_CLUSTER))
        neighbours = NeighbourClient(dim, quotas.limit + MAX_INSERTED, clusters=clusters)
        tracker = EmbeddingTracker(event_table, tiers.slots, neighbours)
    context = SamplerContext(event_table, tiers.slots, classes, settings.half_life, tracker, dim)
    recent = RecentEmbeddings(dim, _RECENT) if dim is not None and settings.admission == "distinct" else None
    policies = Policies(admission, quotas, make_sampler(settings, context), tracker or EventEmbeddings(), recent)
    weighted = schema.weight is not None
    store = Store(policies, event_table, layout, tiers, seed, weighted=weighted, step=step, complete=complete)
    if tracker is not None:
        tracker.neighbours.open()
    return store


def _size(settings: ReplaySettings, chain: Mapping[str, TierFactory], row_bytes: int, step: int) -> tuple[int, int]:
    """Return how many events are kept, and how many slots the primary tier has."""
    if not chain:
        slots, setting = int(settings.device_bytes) // row_bytes, f"device_bytes = {settings.device_bytes:d}"
        k = _max_events(settings.capacity, slots, row_bytes, setting, step)
        return k, k + _spare(k, step)
    name, primary = [*chain.items()][-1]
    with _one_sentence(name):
        slots = primary.slots
    setting = f"{name}.bytes = {settings.slower[name].bytes:d}"
    k = _max_events(settings.capacity, slots, row_bytes, setting, step)
    return k, min(slots, k + _spare(k, step) + _ROOMY)


def _slow(chain: Mapping[str, TierFactory], source: SlowTier | None, count: int) -> list[SlowTier]:
    """Open the slower tiers: a primary tier of `count` slots, which may be `source`, below its caches."""
    if not chain:
        return []
    *caches, (last, kind) = chain.items()
    with _one_sentence(last):
        primary = kind.open_primary(count, source)
    if primary.file is None:
        raise SettingsError(
            f"replay.{last}: its primary tier has no file, by which checkpoints name it: return a TierRef"
        )
    tiers = list[SlowTier]()
    for key, kind in caches:
        with _one_sentence(key):
            tiers.append(kind.cache(min(count, kind.slots), primary))
    tiers.append(primary)
    for key, tier in zip(chain, tiers, strict=True):
        tier.name = key.removeprefix("tiers.")
    return tiers


@contextlib.contextmanager
def _one_sentence(key: str) -> Iterator[None]:
    """Raise an exception of a tier of the user as a DependencyError, if it is an OSError, or as a SettingsError."""
    try:
        yield
    except AnabranchError:
        raise
    except Exception as exc:
        if key in TIERS or out_of_memory(exc):  # a start without memory is tried again
            raise
        kind = DependencyError if isinstance(exc, OSError) else SettingsError
        raise kind(f"replay.{key} cannot be opened: {in_one_line(exc)}") from exc


def _existing(owner: TierFactory, contents: StoreSnapshot) -> SlowTier | None:
    """Open the tier with the payload of a checkpoint; return None where it is gone, and the checkpoint has the rows."""
    try:
        return owner.open_existing(contents)
    except SettingsError as exc:
        if contents.rows is None:
            raise
        log.warning("%s", exc)
        log.warning("its %d events are restored from checkpoint %d", len(contents.index), contents.state.checkpoint)
        return None


def _restore(store: Store, contents: StoreSnapshot, source: SlowTier | None) -> None:
    if source is not None:
        log.info("copying %d stored events from the tier that the checkpoint names", len(contents.index))
    try:
        store.restore(contents, source)
    except OSError as exc:
        raise DependencyError(f"the replay contents cannot be read: {exc}") from exc
    finally:
        if source is not None:
            source.close()


def _memory(settings: ReplaySettings, row_bytes: int, count: int, device: torch.device) -> MemoryTier:
    slots, on_host = min(int(settings.device_bytes) // row_bytes, count), settings.device_memory == "host"
    try:
        return MemoryTier(row_bytes, slots, device, on_host=on_host)
    except (RuntimeError, MemoryError) as exc:
        where = "the host" if on_host else device
        raise SettingsError(
            f"replay: {slots} events of {row_bytes} bytes do not fit on {where}; lower capacity or device_bytes: "
            f"{(str(exc) or type(exc).__name__).splitlines()[0]}"
        ) from exc


def _max_events(capacity: int, slots: int, row_bytes: int, setting: str, step: int) -> int:
    """Return how many of `capacity` events fit in `slots` slots, which must include the spare ones."""
    k = min(capacity, slots)
    while k > 0 and (too_many := k + _spare(k, step) - slots) > 0:
        k -= max(1, too_many * 4 // 9)  # one event less leaves 9/4 slots at most
    if k < 1:
        raise SettingsError(
            f"replay.{setting} is too small: an event has {row_bytes} bytes, and {_spare(1, step)} slots are needed "
            "in addition to those for events"
        )
    if k < capacity:
        sentence = "replay.%s holds %d events, not %d: of its %d slots, %d are needed in addition to those of events"
        log.warning(sentence, setting, k, capacity, slots, slots - k)
    return k


def _spare(k: int, step: int) -> int:
    """Return the spare slots: for the reservoir's slack, a step's events, and replacements during a checkpoint."""
    quotas = Quotas(k)
    return quotas.limit - k + quotas.at_once + quotas.slots_for(step) + k // 16
