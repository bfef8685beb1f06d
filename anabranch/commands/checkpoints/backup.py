"""`anabranch checkpoints backup`: a copy of all that belongs to a state directory, also while a learner writes there.

What is in the state directory is copied unless it is named here: a new file is in the backup before anybody thinks
of it. The copy is a state directory itself.
"""

import contextlib
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from anabranch.command import AsJson, command, output, say
from anabranch.commands.checkpoints.show import stored_checkpoints
from anabranch.commands.versions.export.folder import new_folder
from anabranch.commands.versions.show import format_time, stored_versions
from anabranch.config.loader import Config
from anabranch.core.errors import SettingsError
from anabranch.core.failures import DamagedError
from anabranch.learner.checkpoints.format import CheckpointManifest, Checkpoints
from anabranch.learner.device.lease import FOLDER as DEVICE_SHARING
from anabranch.learner.errors import CheckpointError
from anabranch.learner.object_storage.opening import FETCHED, HOLDER, fetch_small_files
from anabranch.learner.state_dir.bases import copy_base
from anabranch.learner.state_dir.folders import BASES, PARTIAL, TRACES
from anabranch.learner.state_dir.lock import LOCK
from anabranch.learner.state_dir.undo_file import LOCK as UNDO_LOCK
from anabranch.learner.state_dir.undo_file import stamp_of
from anabranch.learner.status.report import REPORT
from anabranch.learner.versions.format import copy_versions
from anabranch.replay.erasure.erasure_log import NAME as ERASURES
from anabranch.serving.reporting.report import REPORT as SERVING_REPORT

IN_PARTS = frozenset({"checkpoints", "replay", "labels", "versions", BASES})
"""What is copied by what names it: the rest of it is of no use, or half written."""
REPORTS = frozenset({REPORT, SERVING_REPORT, "learner-start.json", "serving-start.json"})
LEFT_OUT = REPORTS | {LOCK, UNDO_LOCK, DEVICE_SHARING, TRACES, FETCHED, PARTIAL, HOLDER}
"""What belongs to the processes that run here, or can be made again."""
_ATTEMPTS = 3


@command("anabranch checkpoints backup /backup/$(date +%F)")
def backup(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to create; it may exist if it is empty.")],
    config: Config,
    as_json: AsJson = False,
) -> None:
    """Copy all that belongs to the state directory into a new one, also while the learner runs."""
    made = back_up(config, folder)
    if as_json:
        output(made.document(), lambda: None)
    else:
        say(*made.sentences())


@dataclass(frozen=True)
class Backup:
    """What a backup has.

    Attributes:
        folder: the copy.
        checkpoint: the number of the newest checkpoint, from which a restored learner goes on.
        step: its step.
        time: when it was written, in seconds since 1970.
        older: older checkpoints, the newest first.
        versions: how many.
        damaged: sentences on what is left out since it cannot be read.
        elsewhere: tiers whose rows are not in it.
    """

    folder: str
    checkpoint: int
    step: int
    time: float
    older: list[int]
    versions: int
    damaged: list[str]
    elsewhere: list[str]

    def document(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)

    def sentences(self) -> list[str]:
        """Return it as sentences for a person."""
        which = f"checkpoint {self.checkpoint} of step {self.step:,}, written at {format_time(self.time)}"
        sentences = [f"backed up {which}, {len(self.older)} older ones and {self.versions} versions to {self.folder}"]
        sentences += [f"left out: {sentence}" for sentence in self.damaged]
        if self.elsewhere:
            sentences.append(f"rows of stored events in {' and '.join(self.elsewhere)} are not in it")
        return sentences


def back_up(config: Config, folder: Path) -> Backup:
    """Copy the state of a pipeline into a new folder, completely or not at all.

    1. The checkpoints, the newest first, then the rows that they name, then the small files: what these say of erased
       and undone events is of the time of the checkpoints, or later.
    2. Once more if the newest checkpoint was deleted, or events were undone, meanwhile. Older ones that were deleted
       are left out: their rows may have been overwritten.
    3. The versions, and the frozen weights that versions and checkpoints name.

    Raises:
        SettingsError: there is no checkpoint that can be used; or the folder holds something, or cannot be written.
        DependencyError: the object store of the state cannot be reached.
    """
    checkpoints, versions = stored_checkpoints(config), stored_versions(config)
    damaged: list[str] = []
    with new_folder(folder) as target:
        manifests = _copy_checkpoints(config, checkpoints, target, damaged)
        copied = copy_versions(versions, target, damaged)
        for manifest in manifests:
            try:
                copy_base(checkpoints, manifest, target)
            except CheckpointError as exc:  # the learner writes its own again
                damaged.append(str(exc))
    newest, primary = manifests[0], config.pipeline.replay.primary
    return Backup(
        folder=str(folder),
        checkpoint=newest.number,
        step=newest.step,
        time=newest.time,
        older=[manifest.number for manifest in manifests[1:]],
        versions=copied,
        damaged=damaged,
        elsewhere=[] if primary in (None, "disk") else [f"replay.{primary}"],
    )


def _copy_checkpoints(
    config: Config, checkpoints: Checkpoints, target: Path, damaged: list[str]
) -> list[CheckpointManifest]:
    """Copy checkpoints, rows and small files; return the manifests of the checkpoints, the newest first."""
    from anabranch.learner.checkpoints.checkpoint_copy import copy_checkpoint, copy_rows  # with torch

    for attempt in range(_ATTEMPTS):
        undone, numbers = stamp_of(config.state_dir), checkpoints.by_age()[::-1]
        if not numbers:
            raise SettingsError(f"no checkpoint has been written yet in {checkpoints.location}")
        damaged.clear()
        found: dict[int, tuple[CheckpointManifest, Any]] = {}
        known: dict[str, Path] = {}
        for number in numbers:
            try:
                manifest = checkpoints.manifest(number)
                found[number] = manifest, copy_checkpoint(checkpoints, manifest, target, known)
            except (CheckpointError, DamagedError, FileNotFoundError) as exc:
                partial = target / "checkpoints" / str(number)
                known = {digest: path for digest, path in known.items() if not path.is_relative_to(partial)}
                shutil.rmtree(partial, ignore_errors=True)
                damaged.append(str(exc))
        copy_rows((state for _, state in found.values()), config.state_dir, target)
        _copy_others(config, target)
        there, newest = {*checkpoints.numbers()}, numbers[0]
        is_steady = newest in there and stamp_of(config.state_dir) == undone
        # A file that cannot be read may be one that an erasure replaces just now.
        if found and is_steady and (newest in found or attempt == _ATTEMPTS - 1):
            for number in found.keys() - there:
                shutil.rmtree(target / "checkpoints" / str(number))
            return [manifest for number, (manifest, _) in found.items() if number in there]
        for path in target.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    raise SettingsError(
        f"no checkpoint in {checkpoints.location} stayed until it was copied, or can be read"
        f"{f' ({damaged[0]})' if damaged else ''}: raise checkpoints.keep, or stop the learner for the backup"
    )


def _copy_others(config: Config, target: Path) -> None:
    """Copy what else is in the state directory, and what only the object store has of it."""
    for path in sorted(config.state_dir.iterdir()) if config.state_dir.is_dir() else ():
        if path.name in IN_PARTS | LEFT_OUT or path.name.startswith((".", f"{ERASURES}-")):
            continue
        if path.is_dir():
            _copy_folder(path, target / path.name)
        elif path.is_file():
            with contextlib.suppress(FileNotFoundError):  # what is gone by now is no part of the state any more
                content = path.read_bytes()
                # A line that is being written is no record yet.
                content = content[: content.rfind(b"\n") + 1] if path.name == ERASURES else content
                (target / path.name).write_bytes(content)
    storage = config.pipeline.storage
    if storage is not None and storage.mode == "only":
        fetch_small_files(storage.bucket, target)


def _copy_folder(folder: Path, target: Path) -> None:
    """Copy a folder, without what the learner removes from it meanwhile."""
    try:
        shutil.copytree(folder, target)
    except FileNotFoundError:  # the folder itself
        pass
    except shutil.Error as exc:
        if any(Path(source).exists() for source, _, _ in exc.args[0]):
            raise
