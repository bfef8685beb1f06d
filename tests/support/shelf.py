"""A tier of a user that survives restarts: a file of records in the folder of its context."""

import secrets
from pathlib import Path

import numpy as np
from typing_extensions import override

from anabranch.core.errors import SettingsError
from anabranch.replay.snapshot import TierRef
from anabranch.replay.tiers.tier import SlowTier, TierFactory

_OVERHEAD_BYTES = 9


class Shelf(SlowTier):
    """S slots in a file, whose name is the id of `file`."""

    def __init__(self, path, row_bytes, slots, name):
        self.slots, self.row_bytes, self.slot_bytes = slots, row_bytes, row_bytes + _OVERHEAD_BYTES
        self.path, self.file = path, TierRef(name, path.name)
        record = np.dtype([("identity", "u8"), ("written", "?"), ("row", "u1", (row_bytes,))])
        self._records_S = np.memmap(path, record, mode="r+" if path.exists() else "w+", shape=slots)

    @override
    def write(self, slots, identity, rows_nR):
        for name, values in (("identity", identity), ("written", True), ("row", rows_nR)):
            self._records_S[name][slots] = values

    @override
    def read_into(self, rows_NR, positions, slots, identity):
        records_n = self._records_S[slots]
        rows_NR.numpy()[positions] = records_n["row"]
        return np.asarray(records_n["written"] & (records_n["identity"] == identity))

    @override
    def erase(self, slots):
        self._records_S[slots] = np.zeros((), self._records_S.dtype)

    @override
    def sync(self):
        self._records_S.flush()


class ShelfFactory(TierFactory):
    """Opens files; `most` bounds the slots."""

    kind = Shelf

    def __init__(self, section, context, *, most=1_000_000):
        self._slots = min(most, int(section.bytes) // (context.row_bytes + _OVERHEAD_BYTES))
        self._context = context
        self._opened: Path | None = None

    @property
    @override
    def slots(self):
        return self._slots

    @override
    def owns(self, file):
        return file.name == self._context.name

    @override
    def open_existing(self, contents):
        assert contents.state.file is not None
        path = self._folder / contents.state.file.id
        if not path.exists():
            raise SettingsError(f"{path} is gone; put it back")
        size = path.stat().st_size // (self._context.row_bytes + _OVERHEAD_BYTES)
        return self.kind(path, self._context.row_bytes, size, self._context.name)

    @override
    def open_primary(self, slots, source):
        kept = isinstance(source, Shelf) and source.slots == slots
        tier = source if kept and isinstance(source, Shelf) else self._new(slots)
        self._opened = tier.path
        return tier

    @override
    def cache(self, slots, primary):
        tier = self._new(slots)
        self._opened = tier.path
        return tier

    @override
    def cleanup_actions(self, *, first):
        return [path.unlink for path in self._folder.glob("*") if path != self._opened]

    @property
    def _folder(self):
        assert self._context.folder is not None
        return self._context.folder

    def _new(self, slots):
        self._folder.mkdir(parents=True, exist_ok=True)
        return self.kind(self._folder / secrets.token_hex(4), self._context.row_bytes, slots, self._context.name)
