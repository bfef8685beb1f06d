"""Opens the files of the disk tier: the one that a checkpoint names, or a new one."""

import functools
from collections.abc import Callable
from pathlib import Path

from typing_extensions import override

from anabranch.core.errors import SettingsError
from anabranch.core.failures import away_is_dependency, damage_is
from anabranch.core.files import check_names
from replay.config import DiskSettings
from replay.snapshot import StoreSnapshot, TierRef
from replay.tiers.disk import DiskTier
from replay.tiers.disk_files import SUFFIX, discard, find, next_path, take_back
from replay.tiers.tier import SlowTier, TierContext, TierFactory


class DiskTierFactory(TierFactory):
    """Opens disk tiers: files with ascending numbers in the folder of the context. A cache is a new file."""

    def __init__(self, section: DiskSettings | None, context: TierContext) -> None:
        self._section = section
        self._context = context
        self._path: Path | None = None

    @property
    @override
    def slots(self) -> int:
        assert self._section is not None
        return DiskTier.slots_in(int(self._section.bytes), self._context.row_bytes)

    @override
    def owns(self, file: TierRef) -> bool:
        return file.name.endswith(SUFFIX)

    @override
    def open_existing(self, contents: StoreSnapshot) -> DiskTier:
        file = contents.state.file
        assert file is not None
        with damage_is(SettingsError, f"checkpoint {contents.state.checkpoint}: the file of its replay contents"):
            check_names([file.name])
        path = (take_back if self._context.writable else find)(self._folder, file)
        tier = DiskTier.open(path, pinned=self._context.pinned, writable=self._context.writable)
        if tier.id != file.id:
            tier.close()
            raise SettingsError(
                f"{tier.path} is not the file that checkpoint {contents.state.checkpoint} belongs to; put that one back"
            )
        if self._context.writable:
            with away_is_dependency("replay.disk"):
                tier.mark_named()
        return tier

    @override
    def open_primary(self, slots: int, source: SlowTier | None) -> DiskTier:
        if isinstance(source, DiskTier) and (source.row_bytes, source.slots) == (self._context.row_bytes, slots):
            self._path = source.path
            return source
        return self._create(slots)

    @override
    def cache(self, slots: int, _primary: SlowTier) -> DiskTier:
        return self._create(slots)

    @override
    def cleanup_actions(self, *, first: bool) -> list[Callable[[], None]]:
        files = [] if self._context.folder is None else self._context.folder.glob(f"*{SUFFIX}")
        return [functools.partial(discard, path) for path in files if path != self._path]

    @property
    def _folder(self) -> Path:
        assert self._context.folder is not None
        return self._context.folder

    def _create(self, slots: int) -> DiskTier:
        self._path = next_path(self._folder)
        return DiskTier.create(self._path, self._context.row_bytes, slots, pinned=self._context.pinned)
