"""`anabranch versions ls`."""

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from anabranch.command import AsJson, command, output
from anabranch.commands.versions.show import (
    STYLES,
    Listed,
    format_time,
    judged_by,
    read_requirements,
    read_version,
    stored_versions,
    trained_text,
)
from anabranch.config.loader import Config
from anabranch.core.sizes import size_text

_SHORT = "judged"
"""The measure, in few columns: its name is that of the newest version."""
_WIDEST = 10_000


@command("anabranch versions ls --limit 5")
def ls(
    config: Config,
    limit: Annotated[int | None, typer.Option("--limit", "-n", min=1, help="Only the newest N.", metavar="N")] = None,
    as_json: AsJson = False,
) -> None:
    """List the versions, the newest first, with verdict, step, and the measure by which they were judged."""
    listed = list_versions(config, limit)
    output([one.document() for one in listed] if as_json else None, lambda: render_list(listed))


def list_versions(config: Config, limit: int | None) -> list[Listed]:
    """Return the newest `limit` versions, the newest first; their files' digests are not checked.

    Raises:
        VersionError: `state.json` cannot be read.
    """
    versions = stored_versions(config)
    requirements, state = read_requirements(config), versions.state()
    newest = versions.numbers()[::-1]
    listed = [read_version(versions, number, state, requirements) for number in newest[:limit]]
    still = versions.numbers()
    return [one for one in listed if one.number in still]  # the learner deletes old ones meanwhile


def render_list(listed: list[Listed]) -> RenderableType:
    """Return the table of `versions ls`; in a narrow terminal it leaves out the columns that do not fit."""
    if not listed:
        return Text("there is no version yet")
    return _VersionTable(listed)


class _VersionTable:
    """Shows all columns where they fit on one line each, else fewer."""

    def __init__(self, listed: list[Listed]) -> None:
        self._rows = [_row(one) for one in listed]
        judged = [judged_by(one.manifest) for one in listed if one.manifest]
        self._short = f"{next((found[0] for found in judged if found), 'score')} (constant)"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = self._table([name for name in self._rows[0] if name != _SHORT])
        fits = Measurement.get(console, options.update_width(_WIDEST), wide).maximum <= options.max_width
        yield wide if fits else self._table(("version", "time", "step", "verdict", _SHORT, "state"))

    def _table(self, columns: Sequence[str]) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        for name in columns:
            right = name in ("version", "step", "parent", "size")
            folds = name in ("measure", _SHORT, "state", "trained through")
            header = self._short if name == _SHORT else name
            table.add_column(header, justify="right" if right else "left", no_wrap=not folds)
        for row in self._rows:
            table.add_row(*(row[name] for name in columns))
        return table


def _row(one: Listed) -> dict[str, RenderableType]:
    """Return the cells of a version by the names of their columns."""
    manifest = one.manifest
    verdict = one.verdict.verdict if one.verdict else "none"
    name, value, constant = (manifest and judged_by(manifest)) or ("", None, None)
    return {
        "version": str(one.number),
        "time": format_time(manifest.time) if manifest else "",
        "step": f"{manifest.step:,}" if manifest else "",
        "verdict": Text(verdict, style=STYLES.get(verdict, "dim")),
        "parent": "" if manifest is None or manifest.parent is None else str(manifest.parent),
        "trained through": trained_text(manifest) if manifest else "",
        "size": size_text(one.bytes),
        "measure": ""
        if value is None
        else f"{name} {value:.3g}{'' if constant is None else f', constant {constant:.3g}'}",
        _SHORT: "" if value is None else f"{value:.3g}{'' if constant is None else f' ({constant:.3g})'}",
        "state": Text(", ".join([*one.marks, *(["refused"] if one.refused else [])])),
    }
