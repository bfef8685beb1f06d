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
from replay.tiers.disk_files import (
    REPLAY,
    SUFFIX,
    FileUse,
    check_mounted,
    discard,
    discard_unnamed,
    find,
    next_path,
    take_back,
)
from replay.tiers.tier import SlowTier, TierContext, TierFactory


class DiskTierFactory(TierFactory):
    """Opens disk tiers: files with ascending numbers in the folder of the context. A cache is a new file."""

    def __init__(self, section: DiskSettings | None, context: TierContext) -> None:
        self._section = section
        self._context = context
        self._path: Path | None = None
        self._restores = False
        """Whether the file of the checkpoint is missing, and the checkpoint has the rows."""

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
        file, context = contents.state.file, self._context
        assert file is not None
        number, stamp = contents.state.checkpoint, contents.state.stamp if contents.rows is not None else None
        try:
            return open_named(self._folder, file, number, pinned=context.pinned, writable=context.writable, stamp=stamp)
        except SettingsError:
            if contents.rows is not None and context.writable:
                check_mounted(self._folder, REPLAY.setting)
                discard_unnamed(self._folder, REPLAY.setting)
                self._restores = True
            raise

    @override
    def open_primary(self, slots: int, source: SlowTier | None) -> DiskTier:
        if isinstance(source, DiskTier) and (source.row_bytes, source.slots) == (self._context.row_bytes, slots):
            self._path = source.path
            return source
        try:
            return self._create(slots)
        except SettingsError:
            if not self._restores:
                raise
        for path in self._folder.glob(f"*{SUFFIX}"):  # there is no space for both, and the checkpoint has the rows
            discard(path)
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


def open_named(
    folder: Path,
    file: TierRef,
    checkpoint: int,
    *,
    pinned: bool = False,
    writable: bool = True,
    use: FileUse = REPLAY,
    stamp: str | None = None,
) -> DiskTier:
    """Open the file in a folder that a checkpoint names, also if it was put aside.

    `stamp`: of the checkpoint, if the file must list it, since the checkpoint has the rows otherwise.

    Raises:
        SettingsError: it is missing or damaged, or another file has its name, or it does not list the checkpoint.
        DependencyError: it cannot be read or moved now.
    """
    with damage_is(SettingsError, f"checkpoint {checkpoint}: the name of the file that {use.contents}"):
        check_names([file.name])
    path = (take_back if writable else find)(folder, file, use.setting)
    tier = DiskTier.open(path, pinned=pinned, writable=writable, use=use)
    try:
        if tier.id != file.id:
            raise SettingsError(
                f"{tier.path} is not the file that checkpoint {checkpoint} belongs to; put that one back"
            )
        if stamp is not None and not tier.header.lists(stamp):
            raise SettingsError(f"{tier.path} is from another time than checkpoint {checkpoint}, and may lack its rows")
        if writable:
            with away_is_dependency(use.setting):
                tier.mark_named()
                tier.unlist_after(checkpoint)
    except BaseException:
        tier.close()
        raise
    return tier
