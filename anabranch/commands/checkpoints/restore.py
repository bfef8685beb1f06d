"""`anabranch checkpoints restore`: the way back to an older checkpoint."""

import contextlib
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from anabranch.command import AsJson, DryRun, Yes, command, confirm, output, say
from anabranch.commands.checkpoints.show import show_checkpoint, stored_checkpoints
from anabranch.commands.versions.show import format_time, stored_versions
from anabranch.config.loader import Config
from anabranch.core.errors import DependencyError, SettingsError
from anabranch.learner.checkpoints.format import Checkpoint, CheckpointManifest, Checkpoints, check_age
from anabranch.learner.errors import VersionError
from anabranch.learner.object_storage.bucket_storage import storage_to_read
from anabranch.learner.object_storage.lease import PrefixOwner
from anabranch.learner.object_storage.opening import lease_storage
from anabranch.learner.state_dir.folders import SET_ASIDE
from anabranch.learner.state_dir.lock import lock_state_directory
from anabranch.learner.versions.format import Versions
from anabranch.replay.erasure.erasure_log import NAME, ErasureLog
from anabranch.runtime.private_state import private_state


@command("anabranch checkpoints restore 41 --dry-run")
def restore(
    checkpoint: Annotated[int, typer.Argument(min=0, metavar="NUMBER", help="The number of the checkpoint.")],
    config: Config,
    yes: Yes = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Make the learner resume from an older checkpoint at its next start; stop it first. Newer ones are set aside."""
    plan, storage = plan_restore(config, checkpoint), config.pipeline.storage
    renamed = storage is None or storage.mode == "mirror"
    if not dry_run and plan.set_aside:
        confirm("checkpoints restore", "\n".join(plan.sentences(done=False, renamed=renamed)), yes=yes)
        with private_state(config):
            plan = restore_checkpoint(config, checkpoint)
    if as_json:
        output(plan.document(), lambda: None)
    else:
        say(*plan.sentences(done=not dry_run, renamed=renamed))


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
            back = f"`anabranch versions serve {self.version_before}` returns to the newest one from before it"
            sentences.append(
                f"versions stay: version {self.served} is served until a newer one has learned as far"
                + (f"; {back}" if self.version_before not in (None, self.served) else "")
            )
        return sentences


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
        lock_state_directory(config.state_dir, command="anabranch checkpoints restore") as generation,
        contextlib.ExitStack() as stack,
    ):
        plan, checkpoints = plan_restore(config, number), stored_checkpoints(config)
        try:
            if (settings := config.pipeline.storage) is not None:
                owner = PrefixOwner(config.pipeline.name, config.pipeline.stream.topics)
                held = stack.enter_context(lease_storage(settings, config.state_dir, generation, owner=owner))
                stored = stored_checkpoints(config, held.checkpoints)
                for newer in _newer_in(stored, checkpoints.manifest(number)):
                    stored.storage.set_aside(newer)
            if settings is None or settings.mode == "mirror":
                for newer in checkpoints.newer_than(number):
                    checkpoints.storage.set_aside(newer)
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


def _step(versions: Versions, number: int) -> float:
    try:
        return versions.manifest(number).step
    except (VersionError, OSError):
        return float("inf")
