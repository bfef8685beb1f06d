"""The state directory: whether it can be written, has room, and is a file system that keeps its promises.

And two small checks of `[learner]`.
"""

import fcntl
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from anabranch.core.errors import SettingsError
from anabranch.core.files import existing_folder, used_bytes
from anabranch.core.preflight import Finding, check_address, info, ok, problem, warning
from anabranch.core.sizes import size_text
from anabranch.ingest.events.schema import Schema
from anabranch.learner.checkpoints.format import Checkpoints
from anabranch.learner.errors import MisfitError
from anabranch.learner.preflight.disk_space import disk_space
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.settings.pipeline import PipelineSettings
from anabranch.learner.state_dir.folders import BASES
from anabranch.learner.state_dir.lock import is_locked
from anabranch.learner.status.report import read_report

MOUNTS = Path("/proc/self/mounts")
_MEMORY = {"tmpfs", "ramfs"}
_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "glusterfs", "lustre", "fuse.sshfs", "fuse.s3fs"}
_SKEW_SECONDS = 5.0


def check_state(settings: PipelineSettings, model_bytes: int, base_bytes: int) -> Iterator[Finding]:
    """Try everything on a file without a name, so that nothing is left behind.

    `model_bytes` and `base_bytes`: of the trained and of the frozen weights; 0 where that is unknown.
    """
    state_dir = settings.state_dir
    folder = existing_folder(state_dir)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            yield from _check_file(file, folder)
    except OSError as exc:
        fix = "Fix the rights of the directory, or set state_dir."
        yield problem("state.unwritable", f"state_dir = {state_dir} cannot be written: {exc.strerror}.", fix)
        return
    yield from _check_kind(folder)
    yield from _check_space(settings, folder, model_bytes, base_bytes)
    if is_locked(state_dir):
        fix = "Nothing; stop that learner before another is started."
        yield info("state.held", f"A learner is running in {state_dir}.", fix)
        report = read_report(state_dir)
        for sentence in () if report is None else report.warnings:
            yield warning("learner.warning", f"The learner warns: {sentence}.", "See docs/operate/troubleshoot.md.")


def check_status(settings: PipelineSettings) -> Iterator[Finding]:
    """Whether the address of the status is free, or held by this pipeline's own learner."""
    host, _, port = settings.learner.status.rpartition(":")
    report = read_report(settings.state_dir)
    yield from check_address("learner.status", "learner.status", host.strip("[]"), int(port), report)


def check_replicas(learner: LearnerSettings) -> Iterator[Finding]:
    """Whether a learner of one process has settings that only several processes use."""
    if learner.replicas == 1:
        for key in ("sharding", "sync_every", "comm_hook"):
            value = getattr(learner, key)
            if value != LearnerSettings.model_fields[key].default:
                shown = f'"{value}"' if isinstance(value, str) else value
                fix = f"Take learner.{key} out, or raise learner.replicas."
                yield info("learner.alone", f"learner.{key} = {shown} has no effect with one replica.", fix)


def check_checkpoints(settings: PipelineSettings) -> Iterator[Finding]:
    """Whether the newest checkpoint is whole, and of this release and schema; `try_newest` tries what is in it."""
    checkpoints = Checkpoints(settings.state_dir / "checkpoints", Schema(settings.events).digest, sys.maxsize)
    if not (numbers := checkpoints.by_age()):
        yield ok("There is no checkpoint yet.")
        return
    number, location = numbers[-1], checkpoints.location
    try:
        manifest = checkpoints.manifest(number)
        for name in manifest.files:
            checkpoints.checked(manifest, name)
        checkpoints.check(manifest)
    except MisfitError as exc:
        fix = f"Put [schema] back, or move {location} away to start again."
        yield problem("checkpoint.schema", f"{str(exc).rpartition('; ')[0]}.", fix)
    except (SettingsError, OSError) as exc:
        if number not in checkpoints.numbers():
            yield ok(f"The learner has just replaced checkpoint {number}.")
            return
        fix = f"Nothing, when an older checkpoint is whole; else move {location} away to start again."
        yield warning("checkpoint.damaged", f"The newest checkpoint is damaged: {exc}.", fix)
    else:
        yield ok(f"The newest checkpoint, {number}, is whole and of this schema.")


def _check_file(file: IO[bytes], folder: Path) -> Iterator[Finding]:
    before = time.time()
    file.write(b"anabranch")
    file.flush()
    skew = os.fstat(file.fileno()).st_mtime - before
    faults = []
    try:
        os.fsync(file.fileno())
    except OSError as exc:
        message = f"{folder} cannot fsync: {exc.strerror}; a crash could tear what is saved."
        fix = "Set state_dir to a file system that can fsync."
        faults.append(problem("state.sync", message, fix))
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        message = f"{folder} has no file locks: {exc.strerror}; two learners could run there."
        fix = "Set state_dir to a file system that has flock."
        faults.append(problem("state.lock", message, fix))
    if abs(skew) > _SKEW_SECONDS:
        fix = "Set the clock of the file server and of this machine by the same source (ntp)."
        faults.append(warning("clock.files", f"The file system's clock is {skew:+,.0f} s off this machine's.", fix))
    yield from faults or [ok(f"{folder} can be written, synced and locked.")]


def _check_kind(folder: Path) -> Iterator[Finding]:
    kind = _file_system(folder.resolve())
    if kind in _MEMORY:
        message = f"{folder} is in memory ({kind}): a restart of the machine loses everything."
        fix = "Set state_dir to a disk."
        yield warning("state.memory", message, fix)
    elif kind in _NETWORK:
        message = f"{folder} is on a network ({kind}): checkpoints take longer, and locks may not hold."
        fix = "Set state_dir to a local disk, unless its locks and fsync can be relied upon."
        yield warning("state.network", message, fix)


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


def _check_space(settings: PipelineSettings, folder: Path, model_bytes: int, base_bytes: int) -> Iterator[Finding]:
    """Compare what is free with what one more checkpoint and version need, and with all that are to be kept."""
    state_dir, space = settings.state_dir, disk_space(settings, model_bytes, base_bytes)
    file = max(0, space.file - used_bytes(state_dir / "replay"))
    full, version = space.checkpoint + space.rows + space.base, space.version
    everything = space.total - space.file + file
    used = sum(used_bytes(state_dir / name) for name in ("checkpoints", "versions", BASES))
    free = shutil.disk_usage(folder).free
    if free < file + full + version:
        message = (
            f"{folder} has {size_text(free)} free, but a full checkpoint and a version need "
            f"{size_text(full + version)}" + (f", and the disk tier {size_text(file)}." if file else ".")
        )
        yield problem(
            "state.full", message, "Make room, set state_dir elsewhere, or lower replay.device_bytes or replay.disk."
        )
    elif free + used < everything:
        message = f"{folder} has {size_text(free)} free, but all that is to be kept needs {size_text(everything)}."
        yield warning(
            "state.filling", message, "Make room, or lower checkpoints.keep, versions.keep and versions.keep_hourly."
        )
    else:
        yield ok(f"{folder} has {size_text(free)} free; at most {size_text(everything)} are needed.")
