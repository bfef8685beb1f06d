"""`anabranch checkpoints`: what a restart of the learner can resume from, and the way back to an older one."""

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from anabranch.commands.versions import format_time, stored_versions
from anabranch.config.loader import Config
from anabranch.core.errors import DependencyError, SettingsError
from anabranch.core.failures import DamagedError
from ingest.events.schema import Schema
from learner.checkpointing.without_erased import check_age
from learner.errors import CheckpointError, VersionError
from learner.object_storage.bucket_storage import storage_to_read
from learner.object_storage.lease import PrefixOwner
from learner.object_storage.opening import hold_storage
from learner.state_dir.checkpoint import Checkpoint, CheckpointManifest, Checkpoints
from learner.state_dir.folders import SET_ASIDE, Storage
from learner.state_dir.lock import hold_state_directory
from learner.state_dir.version import Versions
from replay.erasure.erasure_log import NAME, ErasureLog


@dataclass(frozen=True)
class CheckpointSummary:
    """One checkpoint of the state directory; `problem` says why a restart does not resume from it."""

    number: int
    manifest: CheckpointManifest | None
    bytes: int
    problem: str | None

    def document(self) -> dict[str, Any]:
        """Return it as JSON values."""
        fields = msgspec.to_builtins(self.manifest) if self.manifest else {"number": self.number}
        return {**fields, "bytes": self.bytes, "problem": self.problem}


@dataclass(frozen=True)
class RestorePlan:
    """What `checkpoints restore` does, or would do.

    Attributes:
        checkpoint: the checkpoint that the next start of the learner resumes from.
        step: its step.
        time: when it was written, in seconds since 1970.
        set_aside: the newer checkpoints, the newest first, which are renamed.
        served: the version that is served; None when none is.
        version_before: the newest version that was published before the checkpoint; None when none is left.
    """

    checkpoint: int
    step: int
    time: float
    set_aside: list[int]
    served: int | None
    version_before: int | None

    def document(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)

    def sentences(self, *, done: bool, renamed: bool = True) -> list[str]:
        """Return it as sentences for a person.

        Args:
            done: whether it has happened.
            renamed: whether checkpoints are folders of the state directory.
        """
        which = f"checkpoint {self.checkpoint} of step {self.step:,}, written at {format_time(self.time)}"
        if not self.set_aside:
            return [f"the learner resumes from {which}, at its next start; it is the newest, and nothing is changed"]
        names = ", ".join(f"{number}{SET_ASIDE if renamed else ''}" for number in self.set_aside)
        resumes, were = ("resumes", "were") if done else ("would resume", "would be")
        newer = f"newer checkpoints {were} renamed to {names}; delete them when you are done (the next erasure does)"
        if not renamed:
            newer = f"newer checkpoints ({names}) {were} set aside; the next erasure deletes them"
        sentences = [
            f"the learner {resumes} from {which}, at its next start, and reads the stream again from there",
            newer,
        ]
        if self.served is not None:
            back = f"`anabranch versions rollback --to {self.version_before}` returns to the newest one from before it"
            sentences.append(
                f"versions stay: version {self.served} is served until a newer one has learned as far"
                + (f"; {back}" if self.version_before not in (None, self.served) else "")
            )
        return sentences


def list_checkpoints(config: Config) -> list[CheckpointSummary]:
    """Return all checkpoints, the newest first; their files' digests are not checked."""
    checkpoints = stored_checkpoints(config)
    return [_summary(checkpoints, number) for number in reversed(checkpoints.numbers())]


def show_checkpoint(config: Config, which: str) -> CheckpointSummary:
    """Return the checkpoint of a number or `latest`, after a check of its files' digests.

    Raises:
        SettingsError: there is no such checkpoint.
    """
    checkpoints = stored_checkpoints(config)
    numbers = checkpoints.numbers()
    if not numbers:
        raise SettingsError(f"no checkpoint has been written yet in {checkpoints.location}")
    if which != "latest" and not which.isdecimal():
        raise SettingsError(f'"{which}" is no checkpoint: write a number or latest')
    number = numbers[-1] if which == "latest" else int(which)
    if number not in numbers:
        there = ", ".join(map(str, numbers))
        raise SettingsError(f"there is no checkpoint {number} in {checkpoints.location}; there are {there}")
    summary = _summary(checkpoints, number)
    if summary.manifest is None or summary.problem is not None:
        return summary
    try:
        for name in summary.manifest.files:
            checkpoints.checked(summary.manifest, name)
    except (CheckpointError, OSError) as exc:
        return CheckpointSummary(number, summary.manifest, summary.bytes, str(exc))
    return summary


def plan_restore(config: Config, number: int) -> RestorePlan:
    """Return what `restore_checkpoint` would do; changes nothing.

    Raises:
        SettingsError: there is no such checkpoint, a restart cannot resume from it, or it is older than an erasure that
            the log no longer has.
    """
    one = show_checkpoint(config, str(number))
    if one.manifest is None or one.problem is not None:
        raise SettingsError(f"checkpoint {number} cannot be restored: {one.problem}")
    checkpoints, erasures = stored_checkpoints(config), ErasureLog(config.state_dir / NAME)
    erasures.refresh()
    parts, state = checkpoints.open(one.manifest)
    check_age(number, Checkpoint(one.manifest.step, parts, state), erasures)
    versions = stored_versions(config)
    before = [known for known in versions.numbers() if _step(versions, known) <= one.manifest.step]
    return RestorePlan(
        number,
        one.manifest.step,
        one.manifest.time,
        _newer(config, one.manifest),
        versions.state().serving,
        max(before, default=None),
    )


def restore_checkpoint(config: Config, number: int) -> RestorePlan:
    """Make the next start of the learner resume from a checkpoint.

    Renames the newer checkpoints, the newest first: a crash leaves a state directory from which a start resumes at the
    newest checkpoint that still has its name, and the command can run again. They must not stay: the resumed learner
    writes slots of the disk tier that only they name.

    With `[storage]`, those of the object store come first: a start resumes from the newest of both.

    Raises:
        SettingsError: as `plan_restore`; or a learner holds the lock or the lease; or a checkpoint cannot be renamed.
        DependencyError: the object store cannot be reached.
    """
    with (
        hold_state_directory(config.state_dir, command="anabranch checkpoints restore") as generation,
        contextlib.ExitStack() as stack,
    ):
        plan, checkpoints = plan_restore(config, number), stored_checkpoints(config)
        try:
            if (settings := config.pipeline.storage) is not None:
                owner = PrefixOwner(config.pipeline.name, config.pipeline.stream.topics)
                held = stack.enter_context(hold_storage(settings, config.state_dir, generation, owner=owner))
                stored = stored_checkpoints(config, held.checkpoints)
                for newer in _newer_in(stored, checkpoints.manifest(number)):
                    stored.set_aside(newer)
            if settings is None or settings.mode == "mirror":
                for newer in checkpoints.newer_than(number):
                    checkpoints.set_aside(newer)
        except DependencyError:
            raise
        except OSError as exc:
            raise SettingsError(f"{checkpoints.location} cannot be changed: {exc.strerror or exc}") from exc
    return plan


def _newer(config: Config, manifest: CheckpointManifest) -> list[int]:
    """Return the checkpoints that a restart prefers to this one, also those of an object store, the newest first."""
    newer, settings = stored_checkpoints(config).newer_than(manifest.number), config.pipeline.storage
    if settings is None or settings.mode == "only":
        return newer
    only = settings.model_copy(update={"mode": "only"})
    there = _newer_in(stored_checkpoints(config, storage_to_read(only, "checkpoints")), manifest)
    return list(dict.fromkeys([*there, *newer]))


def _newer_in(checkpoints: Checkpoints, manifest: CheckpointManifest) -> list[int]:
    """Return the checkpoints of an object store that are newer than one that need not be there, the newest first."""
    ages = [(checkpoints.generation_of(number) or 0, number) for number in checkpoints.numbers()]
    return [number for generation, number in sorted(ages, reverse=True) if (generation, number) > _age(manifest)]


def _age(manifest: CheckpointManifest) -> tuple[int, int]:
    return manifest.generation, manifest.number


def render_checkpoints(summaries: Sequence[CheckpointSummary]) -> RenderableType:
    """Return the table of `checkpoints ls`."""
    if not summaries:
        return Text("there is no checkpoint yet")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("checkpoint", "time", "step", "generation", "size", "state"):
        right = name not in ("time", "state")
        table.add_column(name, justify="right" if right else "left", no_wrap=name != "state")
    for one in summaries:
        manifest = one.manifest
        facts = (
            (format_time(manifest.time), f"{manifest.step:,}", str(manifest.generation)) if manifest else ("", "", "")
        )
        table.add_row(str(one.number), *facts, f"{one.bytes / 1e6:,.1f} MB", Text("unusable" if one.problem else ""))
    return table


def render_checkpoint(one: CheckpointSummary) -> RenderableType:
    """Return the screen of `checkpoints show`."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("checkpoint", str(one.number))
    if one.manifest is not None:
        table.add_row("time", format_time(one.manifest.time))
        table.add_row("step", f"{one.manifest.step:,}, by the learner of generation {one.manifest.generation}")
        table.add_row("schema", one.manifest.schema)
        if one.manifest.base is not None:
            table.add_row("base", one.manifest.base)
        for name, digest in one.manifest.files.items():
            table.add_row("file", f"{name}, sha256 {digest}")
    table.add_row("size", f"{one.bytes / 1e6:,.1f} MB")
    table.add_row("state", Text(one.problem or "complete; a restart can resume from it"))
    return table


def stored_checkpoints(config: Config, storage: Storage | None = None) -> Checkpoints:
    """Return the checkpoints of a pipeline, for reading, or those of a storage."""
    # A checkpoint whose generation cannot be read counts as the newest, as for a learner that starts now.
    schema = Schema(config.pipeline.events).digest
    storage = storage or storage_to_read(config.pipeline.storage, "checkpoints")
    return Checkpoints(config.state_dir / "checkpoints", schema, sys.maxsize, storage)


def _step(versions: Versions, number: int) -> float:
    try:
        return versions.manifest(number).step
    except (VersionError, OSError):
        return float("inf")


def _summary(checkpoints: Checkpoints, number: int) -> CheckpointSummary:
    size, manifest, problem = 0, None, None
    with contextlib.suppress(FileNotFoundError, DamagedError):  # the learner deletes old checkpoints meanwhile
        size = sum(checkpoints.folder(number).files().values())
    try:
        manifest = checkpoints.manifest(number)
        checkpoints.check(manifest)
    except (CheckpointError, OSError) as exc:
        problem = str(exc)
    return CheckpointSummary(number, manifest, size, problem)
