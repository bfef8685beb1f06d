"""Composes the store that `[replay]` asks for."""

import logging
from pathlib import Path

import torch

from ingest.errors import SettingsError
from ingest.schema import Schema
from replay.admission import ADMISSIONS, Quotas, Surroundings
from replay.config import ReplaySettings
from replay.contents import Contents
from replay.disk import DiskTier
from replay.entries import Entries
from replay.memory import MemoryTier
from replay.neighbours import Neighbours
from replay.rows import Fields, RowLayout
from replay.sampler import SAMPLERS, Company
from replay.store import MOST_INSERTED, Policies, Store
from replay.tiers import Tiers
from replay.whereabouts import CLUSTERS, Whereabouts

_SUFFIX = ".rows"
_EVENTS_A_CLUSTER = 64
_ROOMY = 65_536
"""Slots for events that are replaced between cuts, where the disk has them to give."""

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
) -> Store:
    """Return the store, with what a cut has of it.

    Args:
        settings: `[replay]`.
        schema: of the events.
        device: the learner's.
        seed: of what is kept and drawn.
        folder: where the disk tier's files lie; needed where there is such a tier, or `contents` is of one.
        contents: of the cut to go on from; None begins empty.
        dim: numbers of the model's embedding; None where there is none.
        extra: further columns to keep of each event beside the schema's, such as logits: dtype and shape by name.

    Raises:
        SettingsError: the bytes cannot hold a single event or cannot be had, or the contents do not fit or are gone.
    """
    layout = RowLayout({**schema.payload(), **(extra or {})})
    row_bytes, pinned = layout.row_bytes, device.type == "cuda"
    in_memory = int(settings.device_bytes) // row_bytes
    admission = ADMISSIONS[settings.admission](
        Surroundings(schema.label.classes, settings.half_life, None if dim is None else CLUSTERS)
    )
    if settings.disk is None:
        k = _most_events(settings.capacity, in_memory, row_bytes, f"device_bytes = {int(settings.device_bytes)}")
        count = k + _spare(k)
    else:
        in_file = DiskTier.slots_in(int(settings.disk.bytes), row_bytes)
        k = _most_events(settings.capacity, in_file, row_bytes, f"disk.bytes = {int(settings.disk.bytes)}")
        count = min(in_file, k + _spare(k) + _ROOMY)
    source = _file_of(contents, folder, pinned=pinned)
    disk = None
    stale = list(folder.glob(f"*{_SUFFIX}")) if folder is not None else []
    if settings.disk is not None:
        assert folder is not None
        if source is not None and (source.row_bytes, source.slots) == (row_bytes, count):
            disk, source = source, None
        else:
            number = max((int(path.stem) for path in stale if path.stem.isdigit()), default=0) + 1
            disk = DiskTier.create(folder / f"{number}{_SUFFIX}", row_bytes, count, pinned=pinned)
    memory = _memory(row_bytes, max(1, min(in_memory, count)), device)
    tiers = Tiers(memory, disk)
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
    company = Company(entries, tiers.slots, schema.label.classes, settings.half_life, whereabouts)
    policies = Policies(admission, quotas, SAMPLERS[settings.sampling](company), whereabouts)
    store = Store(policies, entries, layout, tiers, seed, weighted=schema.weight is not None)
    store.discard_later([path for path in stale if disk is None or path != disk.path])
    if whereabouts is not None:
        whereabouts.neighbours.open()
    if contents is not None:
        if source is not None:
            log.info("copying %d stored events from %s", len(contents.index), source.path)
        store.restore(contents, source)
    if source is not None:
        source.close()
    return store


def discard_files(folder: Path) -> None:
    """Remove the disk tier's files, when there is no cut that could name them."""
    for path in [*folder.glob(f"*{_SUFFIX}"), *folder.glob(f".tmp-*{_SUFFIX}")]:
        log.info("removing %s, which belongs to no cut", path)
        path.unlink(missing_ok=True)


def _file_of(contents: Contents | None, folder: Path | None, *, pinned: bool) -> DiskTier | None:
    """Open the file that has the payload of a cut; None where the cut has it."""
    if contents is None or contents.standing.file is None:
        return None
    assert folder is not None
    source = DiskTier.open(folder / contents.standing.file.name, pinned=pinned)
    if source.id != contents.standing.file.id:
        source.close()
        raise SettingsError(
            f"{source.path} is not the file that cut {contents.standing.cut} belongs to; put that one back"
        )
    return source


def _memory(row_bytes: int, slots: int, device: torch.device) -> MemoryTier:
    try:
        return MemoryTier(row_bytes, slots, device)
    except RuntimeError as exc:
        raise SettingsError(
            f"replay: {slots} events of {row_bytes} bytes cannot be had on {device}; lower capacity or device_bytes: "
            f"{str(exc).splitlines()[0]}"
        ) from exc


def _most_events(capacity: int, slots: int, row_bytes: int, setting: str) -> int:
    """Return how many of `capacity` events so many slots can hold, with what is needed beside them."""
    k = min(capacity, slots)
    while k > 0 and (too_many := k + _spare(k) - slots) > 0:
        k -= max(1, too_many * 8 // 9)
    if k < 1:
        raise SettingsError(
            f"replay.{setting} is too small: an event has {row_bytes} bytes, and {_spare(1)} slots are needed beside "
            "those for events"
        )
    if k < capacity:
        log.warning("replay.%s holds %d events of %d bytes, not %d", setting, k, row_bytes, capacity)
    return k


def _spare(k: int) -> int:
    """Slots beside k: the reservoir's slack, what one insertion brings, and what is replaced while a cut is written."""
    return Quotas(k).limit - k + 2 * max(64, min(1024, k // 32)) + k // 16
