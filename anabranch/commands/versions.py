"""`anabranch versions`: the versions of a state directory, and which of them serving may serve. Loads no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from anabranch.config.loader import Config
from anabranch.core.errors import SettingsError
from ingest.events.schema import Schema
from learner.errors import VersionError
from learner.object_storage.bucket_storage import storage_to_read
from learner.state_dir.trained_through import format_trained_through
from learner.state_dir.version import Manifest, RegistryState, Verdict, Versions
from serving.rollout.eligibility import Requirements, refusal, requirements_of

_NARROW = ("version", "time", "step", "verdict", "now", "state")
_WIDEST = 10_000
_STYLES = {"pass": "green", "fail": "red", "inconclusive": "yellow"}

Which = int | str
"""A number, `latest` or `served`."""


@dataclass(frozen=True)
class Listed:
    """One version of the directory; `refused` says why serving does not serve it."""

    number: int
    manifest: Manifest | None
    verdict: Verdict | None
    bytes: int
    marks: list[str]
    """Of served, previous, pinned, promoted, rolled back."""
    refused: str | None

    def document(self) -> dict[str, Any]:
        """Return it as JSON values."""
        manifest = self.manifest
        fields: dict[str, Any] = msgspec.to_builtins(manifest) if manifest else {"number": self.number}
        return {
            **fields,
            "trained_through": format_trained_through(manifest.trained_through) if manifest else None,
            "verdict": msgspec.to_builtins(self.verdict),
            "bytes": self.bytes,
            "marks": self.marks,
            "refused": self.refused,
        }


def list_versions(config: Config, limit: int | None) -> list[Listed]:
    """Return the newest `limit` versions, the newest first; their files' digests are not checked.

    Raises:
        VersionError: `state.json` cannot be read.
    """
    versions = stored_versions(config)
    requirements, state = _requirements(config), versions.state()
    newest = versions.numbers()[::-1]
    listed = [_read(versions, number, state, requirements) for number in newest[:limit]]
    still = versions.numbers()
    return [one for one in listed if one.number in still]  # the learner deletes old ones meanwhile


def show_version(config: Config, which: Which) -> Listed:
    """Return one version, after a check of its files' digests.

    Raises:
        SettingsError: there is no such version.
    """
    versions, number = stored_versions(config), version_number(config, which)
    listed = _read(versions, number, versions.state(), _requirements(config))
    if listed.manifest is None:
        return listed
    try:
        versions.contents(listed.manifest)
    except (VersionError, OSError) as exc:
        return Listed(number, listed.manifest, listed.verdict, listed.bytes, listed.marks, str(exc))
    return listed


def version_number(config: Config, which: Which) -> int:
    """Return the number of a version that is there; raises SettingsError when there is no such version."""
    versions = stored_versions(config)
    state, numbers = versions.state(), versions.numbers()
    if which == "served" and state.serving is None:
        raise SettingsError(f"serving has taken no version of {versions.location} yet")
    if not numbers:
        raise SettingsError(f"no version has been published yet in {versions.location}")
    number = state.serving if which == "served" else numbers[-1] if which == "latest" else which
    if not isinstance(number, int) or number not in numbers:
        there = f"there are {numbers[0]} to {numbers[-1]}"
        raise SettingsError(f"there is no version {number} in {versions.location}; {there}")
    return number


def stored_versions(config: Config) -> Versions:
    """Return the versions of a pipeline, for reading."""
    return Versions(config.state_dir / "versions", storage_to_read(config.pipeline.storage, "versions"))


def parse_which(text: str) -> Which:
    """Read `N`, `latest` or `served`."""
    if text in ("latest", "served"):
        return text
    if not text.isdecimal():
        raise SettingsError(f'"{text}" is no version: write a number, latest or served')
    return int(text)


def render_list(listed: list[Listed]) -> RenderableType:
    """Return the table of `versions ls`; in a narrow terminal it leaves out the columns that do not fit."""
    if not listed:
        return Text("there is no version yet")
    return _VersionTable(listed)


class _VersionTable:
    """Shows all columns where they fit on one line each, else those of `_NARROW`."""

    def __init__(self, listed: list[Listed]) -> None:
        self._rows = [_row(one) for one in listed]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = self._table([name for name in self._rows[0] if name != "now"])
        fits = Measurement.get(console, options.update_width(_WIDEST), wide).maximum <= options.max_width
        yield wide if fits else self._table(_NARROW)

    def _table(self, columns: Sequence[str]) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        for name in columns:
            right = name in ("version", "step", "parent", "size")
            table.add_column(
                name, justify="right" if right else "left", no_wrap=name not in ("metrics", "state", "trained through")
            )
        for row in self._rows:
            table.add_row(*(row[name] for name in columns))
        return table


def _row(one: Listed) -> dict[str, RenderableType]:
    """Return the cells of a version by the names of their columns."""
    manifest = one.manifest
    verdict = one.verdict.verdict if one.verdict else "none"
    return {
        "version": str(one.number),
        "time": format_time(manifest.time) if manifest else "",
        "step": f"{manifest.step:,}" if manifest else "",
        "verdict": Text(verdict, style=_STYLES.get(verdict, "dim")),
        "parent": "" if manifest is None or manifest.parent is None else str(manifest.parent),
        "trained through": _trained(manifest) if manifest else "",
        "size": _size(one.bytes),
        "metrics": _metrics(manifest) if manifest else "",
        "now": f"{manifest.metrics['now']:.4g}" if manifest and "now" in manifest.metrics else "",
        "state": Text(", ".join([*one.marks, *(["refused"] if one.refused else [])])),
    }


def render_one(one: Listed) -> RenderableType:
    """Return the screen of `versions show`."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("version", ", ".join([str(one.number), *one.marks]))
    manifest = one.manifest
    if manifest is not None:
        model = manifest.model
        table.add_row("time", format_time(manifest.time))
        table.add_row("step", f"{manifest.step:,}, by the learner of generation {manifest.generation}")
        table.add_row("parent", "none" if manifest.parent is None else str(manifest.parent))
        table.add_row("learned", _trained(manifest) or "nothing")
        table.add_row("metrics", _metrics(manifest) or "none")
        table.add_row("model", Text(f"{model.factory} with {model.args}, task {model.task}"))
        table.add_row("schema", manifest.schema)
        if manifest.base is not None:
            table.add_row("base", manifest.base)
        for name, digest in manifest.files.items():
            table.add_row("file", f"{name}, sha256 {digest}")
    table.add_row("size", _size(one.bytes))
    verdict = one.verdict
    if verdict is None:
        table.add_row("verdict", "none yet")
    else:
        table.add_row("verdict", Text(verdict.verdict, style=_STYLES[verdict.verdict]))
        for reason in verdict.reasons:
            table.add_row("", Text(reason))
        for name, value in verdict.numbers.items():
            table.add_row("", f"{name} {value:.4g}")
    ending = Text(f"refused: {one.refused}", style="red") if one.refused else Text("whole; serving may take it")
    return Group(table, ending)


def _requirements(config: Config) -> Requirements:
    return requirements_of(Schema(config.pipeline.events), config.pipeline.model)


def _read(versions: Versions, number: int, state: RegistryState, requirements: Requirements) -> Listed:
    marks = {"served": state.serving, "previous": state.previous, "pinned": state.pinned, "promoted": state.promoted}
    found = [mark for mark, marked in marks.items() if marked == number]
    found += ["rolled back"] if number in state.rolled_back else []
    manifest, verdict, refused = None, None, None
    try:
        manifest = versions.manifest(number)
        verdict = versions.verdict(number)
    except (VersionError, OSError) as exc:
        refused = str(exc)
    else:
        refused = refusal(manifest, verdict, state, requirements)
    return Listed(number, manifest, verdict, _bytes(versions, number), found, refused)


def _bytes(versions: Versions, number: int) -> int:
    try:
        return versions.size_bytes(number)
    except FileNotFoundError:
        return 0


def format_time(seconds: float) -> str:
    """Return a time in seconds since 1970 as text, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def _trained(manifest: Manifest) -> str:
    return format_trained_through(manifest.trained_through)


def _metrics(manifest: Manifest) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in manifest.metrics.items())


def _size(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size >= 100_000 else f"{size / 1e3:,.1f} kB"
