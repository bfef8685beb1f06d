"""The replay store of the daemon, for a user's own training loop.

Legend: N events added, n events of a sample.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ByteSize
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info
from typing_extensions import override

from anabranch.api.data import EventReader, arrays_of
from anabranch.api.saved import SavedState
from anabranch.api.schema import Schema
from anabranch.api.sections import check_type, checked
from anabranch.commands.backtest.batches import Numbering
from anabranch.commands.backtest.training import BacktestTraining
from anabranch.core.errors import SettingsError
from anabranch.core.stream_secret import StreamSecret
from anabranch.ingest.events import schema as events
from anabranch.ingest.events.block import Array
from anabranch.ingest.events.partition import TopicPartition
from anabranch.learner.checkpoints.part_formats import STORE
from anabranch.replay.build import build_store
from anabranch.replay.row_layout import RowLayout
from anabranch.replay.settings import DiskSettings, ReplaySettings
from anabranch.replay.store import Store
from anabranch.replay.tiers.disk import DiskTier
from anabranch.replay.tiers.disk_files import PAGE, make_way

_PARTITIONS = [TopicPartition("buffer", 0)]
_LABEL = "label"
_FEATURE = "feature."
_OF_A_LEARNER = ("loss", "agreement", "similar", "diverse", "distinct")
"""Policies that need what the steps of a learner compute."""
_FREE_SLOTS = 4096
"""Slots of a file beyond those of events, for such as are replaced between two calls of `save`."""
_AFTER_ALL_STEPS = 2**40
_AT_ONCE = 256
"""Events that a dataset samples at once where it yields single ones."""


class ReplayBuffer:
    """A bounded sample of all events that were added, from which batches are sampled. Used by one thread.

    Events are in memory or, with `path`, in a file with a cache in memory. It is the store of the daemon: the same
    events, admission, sampling and seed give the same contents.

    Example:
        >>> buffer = ReplayBuffer(1000)
        >>> buffer.add({"x": np.zeros((64, 3), np.float32), "y": np.arange(64)})
        >>> {name: array.shape for name, array in buffer.sample(16).items()}
        {'x': (16, 3), 'y': (16,)}
    """

    def __init__(
        self,
        capacity: int,
        schema: events.Schema | None = None,
        admission: str = "reservoir",
        sampling: str = "uniform",
        path: str | Path | None = None,
        seed: int = 0,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Make an empty buffer, or one with the events that were saved in `path`.

        Args:
            capacity: events to keep, and up to 1/32 more between two evictions.
            schema: the fields of events. Without one, each numeric column of the first events is a field.
            admission: which events stay: `reservoir` a uniform sample of all, `class-balanced` as many of each class,
                `recent` more of the newer ones; or your own, `my_code:MyAdmission`.
            sampling: which are sampled: `uniform`, `class-balanced` or `recent`; or your own, `my_code:MySampler`.
            path: folder that keeps the events across processes; None: they are in memory.
            seed: of admission and sampling.
            settings: further keys of `[replay]`, such as `{"class_floor": 0.25}`.

        Raises:
            AnabranchError: an argument is wrong, or the events in `path` cannot be used.
        """
        values = {**(settings or {}), "capacity": capacity, "admission": admission, "sampling": sampling}
        found = checked(ReplaySettings, "replay", values, "ReplayBuffer")
        if path is None and not found.slower and "device_bytes" not in found.model_fields_set:
            found = found.model_copy(update={"device_bytes": ByteSize(2**62)})  # as many as `capacity` needs
        self.settings = found
        """The keys of `[replay]`."""
        self._seed = seed
        self._store: Store | None = None
        self._of_learner: BacktestTraining | None = None
        """What trains in the learner that has this buffer, and closes its store once neither is used any more."""
        self._close_store: Callable[[], object] = bool
        """Closes the store once, also that of a buffer that nobody has closed."""
        self._is_closed = False
        self._step = 0
        self._numbering = Numbering()
        if schema is not None:
            check_type(schema, events.Schema, "ReplayBuffer: schema", "Schema.infer(data, label=...)")
        self._schema, self._reader = schema, None if schema is None else EventReader(schema)
        self._saved = None if path is None else SavedState(Path(path), "ReplayBuffer")
        self._path = None if path is None else Path(path)
        try:
            if self._saved is not None:
                self._resume(self._saved)
            elif schema is not None:
                self._check(schema)
        except BaseException:
            self._release()
            raise

    def add(self, data: Any) -> None:
        """Add events; which of them stay is up to `admission`.

        Args:
            data: N events: a dict of arrays `[N, ...]`, or a data frame of pandas, polars or Arrow. Other columns than
                those of the schema are left out. The label may be missing.

        Raises:
            AnabranchError: a column is missing, or has a value that the schema does not allow; none is added. With
                `path`, also where the disk cannot be written.
        """
        if self._of_learner is not None:
            raise SettingsError("the buffer is that of a learner, which adds the events that it learns")
        if self._reader is None:
            columns = self._plain(arrays_of(data))
        else:
            columns = self._reader.read(data, copy=self._path is not None)
        store, rows = self._opened(), len(columns["label"])
        columns = self._numbering.add(columns)
        most = rows if store.slots.free_at_once else store.burst
        for begin in range(0, rows, most or 1):
            part = columns
            if rows > most:
                part = {name: column[begin : begin + most] for name, column in columns.items()}
            if not store.has_room():
                self._free_slots(store)
            store.add(part, _PARTITIONS)
            store.flush_pending()  # their arrays may change from now on

    def sample(self, n: int) -> dict[str, NDArray[Any]]:
        """Return events that are chosen by `sampling`, all different, or all if there are fewer than n.

        Returns:
            The columns by name, each `[n, ...]`, which the caller owns: features in their dtype, strings as ids; the
            label, int64 for classes, -1 or NaN where it is missing; and where the schema has a weight, the weight of
            each event's loss, float32, which corrects for how events were admitted.

        Raises:
            AnabranchError: the buffer is empty.
        """
        return {name: column.numpy(force=True) for name, column in self._sampled(n).items()}

    def as_dataset(self, batch_size: int | None = None) -> "IterableDataset[dict[str, Tensor]]":
        """Return an endless dataset of samples for `torch.utils.data.DataLoader`, in the loader's own process.

        Args:
            batch_size: events of each item, each tensor `[batch_size, ...]`: the loader takes `batch_size=None`. None:
                an item is one event, of which the loader makes batches.

        Example:
            >>> loader = DataLoader(buffer.as_dataset(64), batch_size=None)
        """
        return _Samples(self, batch_size)

    def save(self) -> None:
        """Save all events, so that a buffer with this `path` goes on with them; `close` does so too.

        Raises:
            AnabranchError: there is no `path`, or it cannot be written. The events that were saved before stay.
        """
        self._check_open()
        if self._saved is None:
            raise SettingsError("the buffer has no path: ReplayBuffer(..., path=FOLDER) keeps its events")
        if self._store is None:
            return
        assert self._schema is not None
        fields = self._schema.settings.model_dump(mode="json", exclude_unset=True)
        facts = {"schema": fields, "plain": self._reader is None, "next": self._numbering.next}
        self._saved.write(self._step, facts, self._store)

    def close(self) -> None:
        """Save the events where there is a `path`, and release memory and files; the buffer cannot be used again."""
        try:
            if self._saved is not None:
                self.save()
        finally:
            self._release()

    def __len__(self) -> int:
        """Return the number of events."""
        if self._store is None and self._of_learner is None:
            return 0
        store = self._opened()
        store.flush_pending()
        return len(store)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _sampled(self, n: int) -> dict[str, Tensor]:
        """Return n events as tensors by the names of their fields."""
        if not len(self):
            raise SettingsError("the buffer is empty: add events first")
        if n < 1:
            raise SettingsError(f"sample({n}): the number of events has to be 1 or more")
        store, schema = self._opened(), self._schema
        assert schema is not None
        if self._of_learner is None:
            store.plan_blocks(self._step, ())  # removes events whose rows are lost
        found = store.planner.fetch(store.planner.plan([(self._step, n)])[0])
        self._step += 1
        columns = {feature.name: found.columns[f"{_FEATURE}{feature.name}"] for feature in schema.features}
        if self._reader is not None:
            columns[schema.label.name] = found.columns["label"]
        if schema.weight is not None:
            columns[schema.weight] = found.importance
        return columns

    def _resume(self, saved: SavedState) -> None:
        """Go on with what is saved, if anything is."""
        found = saved.newest()
        if found is None:
            make_way(STORE.folder(self._folder))
            if self._schema is not None:
                self._opened()
            return
        facts = saved.facts_of(found)
        schema = Schema(facts["schema"])
        if self._schema is None:
            self._schema, self._reader = schema, None if facts["plain"] else EventReader(schema)
        elif self._schema.digest != schema.digest:
            raise SettingsError(f"the events in {self._path} have another schema; leave it out, or name another folder")
        self._step, self._numbering = found.step, Numbering(facts["next"])
        self._store = self._build(self._schema, contents=saved.contents(found))

    def _give_to(self, training: BacktestTraining, schema: events.Schema) -> None:
        """Be the buffer of a learner: the events of its store, sampled as they are here."""
        self._of_learner, self._schema, self._reader = training, schema, EventReader(schema)
        self._step = _AFTER_ALL_STEPS  # other random numbers than those of steps

    def _check_unused(self) -> None:
        """Raise SettingsError unless a learner may take this buffer."""
        if self._path is not None:
            raise SettingsError(
                "the events of a learner's buffer are saved with it: leave out its path, and call Learner.save"
            )
        if self._store is not None or self._of_learner is not None:
            raise SettingsError("the buffer has events or a learner already: give each learner an empty one")

    def _check_open(self) -> None:
        """Raise SettingsError once it is closed: the file of its folder may be that of another buffer by now."""
        if self._is_closed:
            raise SettingsError("the buffer is closed: make a new one, which goes on with what is saved in its path")

    def _opened(self) -> Store:
        self._check_open()
        if self._of_learner is not None:
            assert self._of_learner.store is not None
            return self._of_learner.store.flush()
        if self._store is None:
            assert self._schema is not None
            self._store = self._build(self._schema)
        return self._store

    def _build(self, schema: events.Schema, **others: Any) -> Store:
        self._check(schema)
        settings, secret = self.settings, StreamSecret.fixed(self._seed).number("replay")
        row_bytes = RowLayout(schema.payload()).row_bytes
        if self._path is not None and settings.disk is None:
            slots = settings.capacity + settings.capacity // 4 + _FREE_SLOTS
            size = DiskSettings(bytes=ByteSize(PAGE + slots * DiskTier.bytes_of(row_bytes)))
            settings = settings.model_copy(update={"disk": size})
        folder = None if self._path is None else STORE.folder(self._folder)
        store = build_store(settings, schema, torch.device("cpu"), secret, folder, **others)
        self._close_store = weakref.finalize(self, store.close)
        return store

    @property
    def _folder(self) -> Path:
        assert self._path is not None
        return self._path

    def _check(self, schema: events.Schema) -> None:
        """Raise SettingsError where a policy needs more than a buffer has."""
        for key in ("admission", "sampling"):
            name = getattr(self.settings, key)
            if name in _OF_A_LEARNER:
                raise SettingsError(
                    f'{key} = "{name}" needs what the steps of a model compute, which a buffer alone does not have'
                )
            if name == "recent" and schema.time is None:
                raise SettingsError(f'{key} = "recent" needs the time of each event: a schema with [schema.time]')
            if name == "class-balanced" and schema.label.one_of is None:
                raise SettingsError(
                    f'{key} = "class-balanced" needs classes: a schema, such as Schema.infer(data, label=...)'
                )

    def _free_slots(self, store: Store) -> None:
        """Save until there are slots of the file that no saved state names."""
        for _ in range(4):
            if store.has_room():
                return
            self.save()

    def _plain(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, Array]:
        """Return the columns of events without a schema: as they are, without a label."""
        if not arrays:
            raise SettingsError("the data has no columns")
        texts = [name for name, array in arrays.items() if array.dtype.kind not in "biuf"]
        if texts:
            raise SettingsError(
                f"the column {texts[0]} is of dtype {arrays[texts[0]].dtype}, and a buffer without a schema takes "
                "numbers; make one, such as with Schema.infer(data, label=...)"
            )
        if self._schema is None:
            features = {name: {"dtype": each.dtype.name, "shape": each.shape[1:]} for name, each in arrays.items()}
            label = next(name for name in (_LABEL, "no_label", "no_label_") if name not in features)
            self._schema = Schema({"features": features, "label": {"name": label, "dtype": "float32"}})
        columns: dict[str, Array] = {}
        for feature in self._schema.features:
            array = arrays.get(feature.name)
            if array is None or array.shape[1:] != feature.shape or array.dtype != feature.dtype:
                had = "missing" if array is None else f"{array.dtype} {list(array.shape[1:])}"
                needed = f"{feature.dtype} {list(feature.shape)}"
                raise SettingsError(f"the column {feature.name} is {had}, and the first events had {needed}")
            columns[f"{_FEATURE}{feature.name}"] = array if self._path is None else array.copy()
        rows = len(next(iter(arrays.values())))
        columns["label"], columns["labelled"] = np.full(rows, np.nan, np.float32), np.zeros(rows, np.bool_)
        columns["weight"] = np.ones(rows, np.float32)
        return columns

    def _release(self) -> None:
        saved, self._is_closed = self._saved, True
        self._store = self._saved = None
        self._close_store()
        if saved is not None:
            saved.close()


class _Samples(IterableDataset[dict[str, Tensor]]):
    """Samples of a buffer without an end."""

    def __init__(self, buffer: ReplayBuffer, batch_size: int | None) -> None:
        self._buffer, self._batch_size = buffer, batch_size

    @override
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        if get_worker_info() is not None:
            raise SettingsError("a replay buffer is sampled in one process: use a DataLoader with num_workers=0")
        while True:
            found = self._buffer._sampled(self._batch_size or _AT_ONCE)
            if self._batch_size is not None:
                yield found
                continue
            for row in range(len(next(iter(found.values())))):
                yield {name: column[row] for name, column in found.items()}
