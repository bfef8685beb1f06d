"""The file `storage-holder` of a state directory: its id for the lease, and whether its state is in an object store.

The id is that of one directory of one running system. A copy has another one, on another disk or another host: the lock
of the original does not prove that its learner has ended.
"""

import contextlib
import hashlib
import platform
import uuid
from pathlib import Path

import msgspec

from anabranch.core.atomic_files import replace_file
from anabranch.core.errors import SettingsError
from anabranch.core.failures import DamagedError, decoded, state_errors
from anabranch.core.files import MOST_BYTES, read_file

HOLDER = "storage-holder"
"""Name of the file."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class _Holder(msgspec.Struct, frozen=True):
    id: str
    only: str | None = None
    """The URL that has the state while `storage.mode` is `only`."""


def holder_of(state_dir: Path) -> str:
    """Return the id of a state directory, which is made at the first call; its lock must be held."""
    known = _read(state_dir)
    if known is None:
        known = _Holder(uuid.uuid4().hex)
        _write(state_dir, known)
    with state_errors(f"{state_dir} cannot be read"):
        status = state_dir.stat()
    system = _BOOT.read_text() if _BOOT.exists() else platform.node()
    where = hashlib.sha256(f"{system}:{status.st_dev}:{status.st_ino}".encode()).hexdigest()
    return f"{known.id}-{where[:16]}"


def record_mode(state_dir: Path, only: str | None) -> None:
    """Record the URL that has the state in mode `only`, or None; the lock must be held."""
    known = _read(state_dir)
    if known is not None and known.only != only:
        _write(state_dir, msgspec.structs.replace(known, only=only))


def check_state_is_here(state_dir: Path) -> None:
    """Raise SettingsError where the state is in an object store, and there is no `[storage]` any more."""
    known = _read(state_dir)
    if known is not None and known.only is not None:
        raise SettingsError(
            f'the state of {state_dir} is in {known.only}, by storage.mode = "only", and there is no [storage]: put it '
            f'back, with mode = "mirror" to fetch the state, or delete {state_dir / HOLDER} to begin without it'
        )


def _read(state_dir: Path) -> _Holder | None:
    path = state_dir / HOLDER
    with state_errors(f"{path} cannot be read"), contextlib.suppress(FileNotFoundError, DamagedError):
        return decoded(read_file(path, MOST_BYTES), _Holder)
    return None


def _write(state_dir: Path, holder: _Holder) -> None:
    path = state_dir / HOLDER
    with state_errors(f"{path} cannot be written"):
        replace_file(path, msgspec.json.encode(holder))
