"""A folder that is written completely or not at all."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from anabranch.core.errors import SettingsError
from anabranch.core.files import sync_directory
from anabranch.core.temporary_files import temporary_folder


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `folder` when the block ends, and is removed when it raises.

    What a killed process has left is removed by the next one for the same folder.

    Raises:
        SettingsError: `folder` is a file, holds something, or cannot be written.
        DependencyError: the folder above it cannot be written for now.
    """
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise SettingsError(f"{folder} exists and is not an empty folder; name another one")
        folder.parent.mkdir(parents=True, exist_ok=True)
        final = folder.resolve()
        with temporary_folder(f".{final.name}.tmp-", final.parent) as temporary:
            new = temporary / "new"
            new.mkdir()
            yield new
            sync_directory(new)
            new.rename(final)
        sync_directory(final.parent)
    except OSError as exc:
        raise SettingsError(f"{folder} cannot be written: {exc.strerror or exc}") from exc
