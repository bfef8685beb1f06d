"""`anabranch versions rebuild`: learns a version again, and compares it with the one that was published."""

import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from anabranch.command import AsJson, command, output, say
from anabranch.commands.versions.export.command import EXPORTED_BASE
from anabranch.commands.versions.export.folder import new_folder
from anabranch.commands.versions.show import VersionArgument, Which, parse_which, stored_versions, version_number
from anabranch.config.loader import Config
from anabranch.core.errors import SettingsError
from anabranch.core.failures import state_errors
from anabranch.learner.checkpoints.format import Checkpoints
from anabranch.learner.object_storage.bucket_storage import storage_to_read
from anabranch.learner.versions.format import WEIGHTS
from anabranch.learner.versions.rebuilt import Distance, Rebuilt
from anabranch.runtime.lifecycle import Exit, stop_on_signals


@command("anabranch versions rebuild 4711 --verify")
def rebuild(
    version: VersionArgument,
    config: Config,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare it with the version that was published, bit for bit.")
    ] = False,
    folder: Annotated[
        Path | None,
        typer.Option("--output", metavar="DIR", help="Folder to write it to; it may exist if it is empty."),
    ] = None,
    as_json: AsJson = False,
) -> Exit:
    """Learn a version again, from the checkpoint before it and the stream, and say whether the weights are the same."""
    if not verify and folder is None:
        raise SettingsError("add --verify to compare the rebuilt version, or --output DIR to write it")
    report = learn_again(config, parse_which(version), folder)
    if report is None:
        say("stopped; nothing was written")
        return Exit.DONE
    if verify or as_json:
        output(report.document() if as_json else None, lambda: render_rebuild(report))
    else:
        say(f"wrote version {report.rebuilt.manifest.number} as rebuilt to {folder}")
    return report.code if verify else Exit.DONE


@dataclass(frozen=True)
class RebuildReport:
    """A rebuild as it is printed; `published` is the digest of the version's weights."""

    rebuilt: Rebuilt
    published: str
    folder: Path | None = None
    """Where the rebuilt version was written."""

    @property
    def code(self) -> Exit:
        """DONE, or SETTINGS where bit for bit is promised, and it is not so."""
        return Exit.SETTINGS if self.rebuilt.deterministic and not self.rebuilt.equal else Exit.DONE

    def document(self) -> dict[str, Any]:
        """Return it as JSON values."""
        rebuilt = self.rebuilt
        distance = None if rebuilt.distance is None else asdict(rebuilt.distance)
        return {
            "version": rebuilt.manifest.number,
            "equal": rebuilt.equal,
            "deterministic": rebuilt.deterministic,
            "published": self.published,
            "rebuilt": rebuilt.manifest.files[WEIGHTS],
            "checkpoint": rebuilt.start.checkpoint,
            "steps": rebuilt.steps,
            "reasons": rebuilt.reasons,
            "distance": _finite(distance),
            "folder": None if self.folder is None else str(self.folder),
        }


def learn_again(config: Config, which: Which, output: Path | None) -> RebuildReport | None:
    """Rebuild a version, and write it to `output` if that is given; return None when a signal has stopped it.

    Raises:
        SettingsError: there is no such version, it cannot be rebuilt, or `output` cannot be written.
        DependencyError: the broker or a disk cannot be reached.
    """
    from anabranch.learner.assembly import rebuild_version  # with torch

    versions, number = stored_versions(config), version_number(config, which)
    with state_errors(f"version {number} cannot be read"):
        published = versions.manifest(number)
    if output is not None and output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise SettingsError(f"{output} exists and is not an empty folder; name another one")

    def checkpoints(schema: str) -> Checkpoints:
        storage = storage_to_read(config.pipeline.storage, "checkpoints")
        return Checkpoints(config.state_dir / "checkpoints", schema, 0, storage)

    def keep(folder: Path, base: Path | None) -> None:
        assert output is not None
        with new_folder(output) as temporary:
            for path in folder.iterdir():
                if path.name != "verdict.json":  # it was not judged
                    shutil.copyfile(path, temporary / path.name)
            if base is not None:
                shutil.copyfile(base, temporary / EXPORTED_BASE)

    with stop_on_signals() as stop:
        spec = config.pipeline
        rebuilt = rebuild_version(spec, versions, checkpoints, number, stop, None if output is None else keep)
    return None if rebuilt is None else RebuildReport(rebuilt, published.files.get(WEIGHTS, ""), output)


def render_rebuild(report: RebuildReport) -> RenderableType:
    """Return the screen of `versions rebuild`."""
    rebuilt = report.rebuilt
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("version", str(rebuilt.manifest.number))
    checkpoint = rebuilt.start.checkpoint
    table.add_row("from", "the start of the stream" if checkpoint is None else f"checkpoint {checkpoint}")
    table.add_row("learned", f"{rebuilt.steps:,} steps")
    table.add_row("published", f"sha256 {report.published}")
    table.add_row("rebuilt", f"sha256 {rebuilt.manifest.files[WEIGHTS]}")
    for fact in _facts(rebuilt.distance) if rebuilt.distance is not None and not rebuilt.equal else ():
        table.add_row(*map(Text, fact))
    for reason in rebuilt.reasons:
        table.add_row("remark" if rebuilt.equal else "because", Text(reason))
    if report.folder is not None:
        table.add_row("written to", Text(str(report.folder)))
    return Group(table, _ending(rebuilt))


def _ending(rebuilt: Rebuilt) -> Text:
    if rebuilt.equal:
        return Text("equal bit for bit", style="green")
    if rebuilt.deterministic:
        why = "for the reasons above" if rebuilt.reasons else "although learner.deterministic promises it"
        return Text(f"NOT equal, {why}", style="red")
    return Text("not equal bit for bit, which only learner.deterministic promises", style="yellow")


def _facts(distance: Distance) -> Iterator[tuple[str, str]]:
    yield "tensors", f"{distance.different} of {distance.tensors} differ"
    yield "difference", f"{distance.max_abs:.3g} at most, {distance.relative:.3g} of the norm"
    if (worst := distance.worst) is not None:
        yield "worst tensor", f"{worst.name}: {worst.max_abs:.3g} at most, {worst.relative:.3g} of its norm"
    if distance.holdout:
        share = distance.other_predictions / distance.holdout
        yield "predictions", f"{distance.other_predictions} of {distance.holdout} held-out events differ ({share:.2%})"


def _finite(distance: dict[str, Any] | None) -> Any:
    """Return it with None in place of numbers that are not finite, which JSON does not have."""
    return msgspec.json.decode(msgspec.json.encode(distance))
