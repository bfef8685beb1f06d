"""A folder that is written completely or not at all."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from anabranch.core.errors import SettingsError
from anabranch.core.files import sync_directory


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `folder` when the block ends, and is removed when it raises.

    Raises:
        SettingsError: `folder` is a file, holds something, or cannot be written.
    """
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise SettingsError(f"{folder} exists and is not an empty folder; name another one")
        folder.parent.mkdir(parents=True, exist_ok=True)
        final = folder.resolve()
        temporary = final.with_name(f".{final.name}.tmp-{os.getpid()}")
        with contextlib.ExitStack() as stack:
            temporary.mkdir()
            stack.callback(shutil.rmtree, temporary, ignore_errors=True)
            yield temporary
            sync_directory(temporary)
            temporary.rename(final)
            stack.pop_all()
        sync_directory(final.parent)
    except OSError as exc:
        raise SettingsError(f"{folder} cannot be written: {exc.strerror or exc}") from exc
