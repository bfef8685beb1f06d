"""`anabranch checkpoints`: what a restart of the learner can resume from. Reads only."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from anabranch.config.loader import Config
from anabranch.core.errors import SettingsError
from ingest.events.schema import Schema
from learner.errors import CheckpointError
from learner.state_dir.checkpoint import CheckpointManifest, Checkpoints


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


def list_checkpoints(config: Config) -> list[CheckpointSummary]:
    """Return all checkpoints, the newest first; their files' digests are not checked."""
    checkpoints = _checkpoints(config)
    return [_summary(checkpoints, number) for number in reversed(checkpoints.numbers())]


def show_checkpoint(config: Config, which: str) -> CheckpointSummary:
    """Return the checkpoint of a number or `latest`, after a check of its files' digests.

    Raises:
        SettingsError: there is no such checkpoint.
    """
    checkpoints = _checkpoints(config)
    numbers = checkpoints.numbers()
    if not numbers:
        raise SettingsError(f"no checkpoint has been written yet in {checkpoints.path}")
    if which != "latest" and not which.isdecimal():
        raise SettingsError(f'"{which}" is no checkpoint: write a number or latest')
    number = numbers[-1] if which == "latest" else int(which)
    if number not in numbers:
        there = ", ".join(map(str, numbers))
        raise SettingsError(f"there is no checkpoint {number} in {checkpoints.path}; there are {there}")
    summary = _summary(checkpoints, number)
    if summary.manifest is None or summary.problem is not None:
        return summary
    try:
        for name in summary.manifest.files:
            checkpoints.read(summary.manifest, name)
    except (CheckpointError, OSError) as exc:
        return CheckpointSummary(number, summary.manifest, summary.bytes, str(exc))
    return summary


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
        facts = (_time(manifest.time), f"{manifest.step:,}", str(manifest.generation)) if manifest else ("", "", "")
        table.add_row(str(one.number), *facts, f"{one.bytes / 1e6:,.1f} MB", Text("unusable" if one.problem else ""))
    return table


def render_checkpoint(one: CheckpointSummary) -> RenderableType:
    """Return the screen of `checkpoints show`."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("checkpoint", str(one.number))
    if one.manifest is not None:
        table.add_row("time", _time(one.manifest.time))
        table.add_row("step", f"{one.manifest.step:,}, by the learner of generation {one.manifest.generation}")
        table.add_row("schema", one.manifest.schema)
        for name, digest in one.manifest.files.items():
            table.add_row("file", f"{name}, sha256 {digest}")
    table.add_row("size", f"{one.bytes / 1e6:,.1f} MB")
    table.add_row("state", Text(one.problem or "complete; a restart can resume from it"))
    return table


def _checkpoints(config: Config) -> Checkpoints:
    return Checkpoints(config.state_dir / "checkpoints", Schema(config.pipeline.events).digest, 0)


def _summary(checkpoints: Checkpoints, number: int) -> CheckpointSummary:
    size, manifest, problem = 0, None, None
    for file in (checkpoints.path / str(number)).rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # the learner deletes old checkpoints meanwhile
            size += file.stat().st_size if file.is_file() else 0
    try:
        manifest = checkpoints.manifest(number)
        checkpoints.check(manifest)
    except (CheckpointError, OSError) as exc:
        problem = str(exc)
    return CheckpointSummary(number, manifest, size, problem)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
