"""`anabranch checkpoints ls`."""

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from anabranch.command import AsJson, command, output
from anabranch.commands.checkpoints.show import CheckpointSummary, stored_checkpoints, summary_of
from anabranch.commands.versions.show import format_time
from anabranch.config.loader import Config
from anabranch.core.sizes import size_text


@command("anabranch checkpoints ls")
def ls(config: Config, as_json: AsJson = False) -> None:
    """List the checkpoints, the newest first."""
    listed = list_checkpoints(config)
    output([one.document() for one in listed] if as_json else None, lambda: render_checkpoints(listed))


def list_checkpoints(config: Config) -> list[CheckpointSummary]:
    """Return all checkpoints, the newest first; their files' digests are not checked."""
    checkpoints = stored_checkpoints(config)
    return [summary_of(checkpoints, number) for number in reversed(checkpoints.numbers())]


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
        table.add_row(str(one.number), *facts, size_text(one.bytes), Text("unusable" if one.problem else ""))
    return table
