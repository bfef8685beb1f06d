"""`anabranch checkpoints show`."""

import contextlib
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from anabranch.command import AsJson, command, output
from anabranch.commands.versions.show import format_time
from anabranch.config.loader import Config
from anabranch.core.errors import SettingsError
from anabranch.core.failures import DamagedError
from anabranch.core.sizes import size_text
from anabranch.ingest.events.schema import Schema
from anabranch.learner.checkpoints.format import CheckpointManifest, Checkpoints
from anabranch.learner.errors import CheckpointError
from anabranch.learner.object_storage.bucket_storage import storage_to_read
from anabranch.learner.state_dir.folders import Storage


@command("anabranch checkpoints show latest")
def show(
    config: Config,
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="Its number, or latest.")] = "latest",
    as_json: AsJson = False,
) -> None:
    """Show one checkpoint, and check its files against their digests."""
    one = show_checkpoint(config, checkpoint)
    output(one.document() if as_json else None, lambda: render_checkpoint(one))


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
    summary = summary_of(checkpoints, number)
    if summary.manifest is None or summary.problem is not None:
        return summary
    try:
        for name in summary.manifest.files:
            checkpoints.checked(summary.manifest, name)
    except (CheckpointError, OSError) as exc:
        return CheckpointSummary(number, summary.manifest, summary.bytes, str(exc))
    return summary


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
    table.add_row("size", size_text(one.bytes))
    table.add_row("state", Text(one.problem or "complete; a restart can resume from it"))
    return table


def stored_checkpoints(config: Config, storage: Storage | None = None) -> Checkpoints:
    """Return the checkpoints of a pipeline, for reading, or those of a storage."""
    # A checkpoint whose generation cannot be read counts as the newest, as for a learner that starts now.
    schema = Schema(config.pipeline.events).digest
    storage = storage or storage_to_read(config.pipeline.storage, "checkpoints")
    return Checkpoints(config.state_dir / "checkpoints", schema, sys.maxsize, storage)


def summary_of(checkpoints: Checkpoints, number: int) -> CheckpointSummary:
    """Return one checkpoint; its files' digests are not checked."""
    size, manifest, problem = 0, None, None
    with contextlib.suppress(FileNotFoundError, DamagedError):  # the learner deletes old checkpoints meanwhile
        size = sum(checkpoints.folder(number).files().values())
    try:
        manifest = checkpoints.manifest(number)
        checkpoints.check(manifest)
    except (CheckpointError, OSError) as exc:
        problem = str(exc)
    return CheckpointSummary(number, manifest, size, problem)
