"""The state directory: whether it can be written, has room, and is a file system that keeps its promises."""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from anabranch.doctor.findings import CheckContext, Finding, found, ok
from anabranch.doctor.storage.space import disk_space
from anabranch.runtime.private_state import is_exposed, is_open_to_others, is_own
from learner.state_dir.folders import BASES
from learner.state_dir.lock import is_held
from learner.state_dir.report import read_report

MOUNTS = Path("/proc/self/mounts")
_MEMORY = {"tmpfs", "ramfs"}
_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "glusterfs", "lustre", "fuse.sshfs", "fuse.s3fs"}
_SKEW_SECONDS = 5.0


def check_state(context: CheckContext) -> Iterator[Finding]:
    """Try everything on a file without a name, so that nothing is left behind."""
    state_dir = context.config.state_dir
    folder = state_dir
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            yield from _check_file(file, folder)
    except OSError as exc:
        yield found("state.unwritable", f"state_dir = {state_dir} cannot be written: {exc.strerror}.")
        return
    yield from _check_kind(folder)
    yield from _check_space(context, folder)
    if is_exposed(context.config) and not is_own(context.config):
        message = f"{state_dir} will hold events in clear text, and users other than its owner may read it."
        yield found("state.exposed", message, path=state_dir)
    yield from _check_keys(context)
    if is_held(state_dir):
        yield found("state.held", f"A learner is running in {state_dir}.")
        report = read_report(state_dir)
        for sentence in () if report is None else report.warnings:
            yield found("learner.warning", f"The learner warns: {sentence}.")


def _check_keys(context: CheckContext) -> Iterator[Finding]:
    """Report private keys that users other than their owner may read."""
    pipeline, folder = context.config.pipeline, context.config.folder
    keys = {"lineage.sign_key": pipeline.lineage.sign_key, "serving.tls.key": pipeline.serving.tls.key}
    for name, key in keys.items():
        if key is not None and is_open_to_others(folder / key):
            message = f"{name} = {folder / key} may be read by users other than its owner."
            yield found("key.exposed", message, path=folder / key)


def _check_file(file: IO[bytes], folder: Path) -> Iterator[Finding]:
    before = time.time()
    file.write(b"anabranch")
    file.flush()
    skew = os.fstat(file.fileno()).st_mtime - before
    faults = []
    try:
        os.fsync(file.fileno())
    except OSError as exc:
        faults.append(found("state.sync", f"{folder} cannot fsync: {exc.strerror}; a crash could tear what is saved."))
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        faults.append(found("state.lock", f"{folder} has no file locks: {exc.strerror}; two learners could run there."))
    if abs(skew) > _SKEW_SECONDS:
        faults.append(found("clock.files", f"The file system's clock is {skew:+,.0f} s off this machine's."))
    yield from faults or [ok(f"{folder} can be written, synced and locked.")]


def _check_kind(folder: Path) -> Iterator[Finding]:
    kind = _file_system(folder.resolve())
    if kind in _MEMORY:
        yield found("state.memory", f"{folder} is in memory ({kind}): a restart of the machine loses everything.")
    elif kind in _NETWORK:
        yield found(
            "state.network", f"{folder} is on a network ({kind}): checkpoints take longer, and locks may not hold."
        )


def _file_system(folder: Path) -> str | None:
    """Return the type of a folder's file system; None where the system has no list of them."""
    try:
        lines = [line.split() for line in MOUNTS.read_text().splitlines()]
    except OSError:
        return None
    # A later mount hides an earlier one on the same path.
    mounts = [(Path(fields[1].replace("\\040", " ")), fields[2]) for fields in lines]
    return max(
        ((len(path.parts), index), kind) for index, (path, kind) in enumerate(mounts) if folder.is_relative_to(path)
    )[1]


def _check_space(context: CheckContext, folder: Path) -> Iterator[Finding]:
    """Compare what is free with what one more checkpoint and version need, and with all that are to be kept."""
    state_dir = context.config.state_dir
    space = disk_space(context.config.pipeline, context.model_bytes, context.base_bytes)
    file = max(0, space.file - used_bytes(state_dir / "replay"))
    full, version = space.checkpoint + space.rows + space.base, space.version
    everything = space.total - space.file + file
    used = sum(used_bytes(state_dir / name) for name in ("checkpoints", "versions", BASES))
    free = shutil.disk_usage(folder).free
    if free < file + full + version:
        message = (
            f"{folder} has {_megabytes(free)} free, but a full checkpoint and a version need "
            f"{_megabytes(full + version)}" + (f", and the disk tier {_megabytes(file)}." if file else ".")
        )
        yield found("state.full", message)
    elif free + used < everything:
        message = f"{folder} has {_megabytes(free)} free, but all that is to be kept needs {_megabytes(everything)}."
        yield found("state.filling", message)
    else:
        yield ok(f"{folder} has {_megabytes(free)} free; at most {_megabytes(everything)} are needed.")


def used_bytes(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # the learner has just deleted it
            continue
    return total


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
