"""`anabranch versions`: the versions of a state directory, and which of them serving may serve. Loads no torch."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from anabranch.command import AsJson, command, output
from anabranch.config.loader import Config
from anabranch.core.errors import SettingsError
from anabranch.core.sizes import size_text
from anabranch.ingest.events.schema import Schema
from anabranch.learner.errors import VersionError
from anabranch.learner.model.answer_rule import AnswerRule
from anabranch.learner.object_storage.bucket_storage import storage_to_read
from anabranch.learner.status.report import ServedReport, read_report, served_text, worst_first
from anabranch.learner.stream.trained_through import format_trained_through
from anabranch.learner.versions.format import Manifest, RegistryState, Verdict, Versions
from anabranch.serving.rollout.eligibility import Requirements, refusal, requirements_of

STYLES = {"pass": "green", "fail": "red", "inconclusive": "yellow"}

Which = int | str
"""A number, `latest` or `served`."""


def parse_which(text: str) -> Which:
    """Read `N`, `latest` or `served`."""
    if text in ("latest", "served"):
        return text
    if not text.isdecimal():
        raise SettingsError(f'"{text}" is no version: write a number, latest or served')
    return int(text)


VersionArgument = Annotated[str, typer.Argument(metavar="VERSION", help="Its number, latest or served.")]


@command("anabranch versions show latest")
def show(version: VersionArgument, config: Config, as_json: AsJson = False) -> None:
    """Show one version: manifest, verdict, a check of its files, and why serving refuses it."""
    one = show_version(config, parse_which(version))
    learner = read_report(config.state_dir)
    live = {} if learner is None or learner.live is None else learner.live.served
    served = live.get(str(one.number))
    document = {**one.document(), **({} if served is None else {"served": msgspec.to_builtins(served)})}
    output(document if as_json else None, lambda: render_one(one, served))


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


def show_version(config: Config, which: Which) -> Listed:
    """Return one version, after a check of its files' digests.

    Raises:
        SettingsError: there is no such version.
    """
    versions, number = stored_versions(config), version_number(config, which)
    listed = read_version(versions, number, versions.state(), read_requirements(config))
    if listed.manifest is None:
        return listed
    try:
        versions.contents(listed.manifest)
    except (VersionError, OSError) as exc:
        return Listed(number, listed.manifest, listed.verdict, listed.bytes, listed.marks, str(exc))
    return listed


def version_number(config: Config, which: Which) -> int:
    """Return the number of a version that is there; raises SettingsError when there is no such version."""
    return number_in(stored_versions(config), which)


def number_in(versions: Versions, which: Which) -> int:
    """Return the number of a version in a directory; raises SettingsError when there is no such version."""
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


def render_one(one: Listed, served: ServedReport | None = None) -> RenderableType:
    """Return the screen of `versions show`; `served`: what it has answered, by the labels that came later."""
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
        table.add_row("learned", trained_text(manifest) or "nothing")
        if judged := judged_by(manifest):
            name, value, constant = judged
            baseline = "" if constant is None else f"; one answer for all events has {constant:.4g} at best"
            table.add_row("judged by", f"{name} {value:.4g} on held-out events{baseline}")
        table.add_row("metrics", metrics_text(manifest) or "none")
        if manifest.rule is not None:
            table.add_row("answers", answers_text(manifest.rule))
        table.add_row("model", Text(f"{model.factory} with {model.args}, task {model.task}"))
        table.add_row("schema", manifest.schema)
        if manifest.base is not None:
            table.add_row("base", manifest.base)
        for name, digest in manifest.files.items():
            table.add_row("file", f"{name}, sha256 {digest}")
    if served is not None:
        table.add_row("as served", f"{served_text(served) or 'not measured yet'} ({served.rows:,} labels)")
    table.add_row("size", size_text(one.bytes))
    verdict = one.verdict
    if verdict is None:
        table.add_row("verdict", "none yet")
    else:
        table.add_row("verdict", Text(verdict.verdict, style=STYLES[verdict.verdict]))
        for reason in verdict.reasons:
            table.add_row("", Text(reason))
        for name, value in verdict.numbers.items():
            table.add_row("", f"{name} {value:.4g}")
        for number, (name, each) in enumerate(worst_first(verdict.slices)):
            table.add_row("" if number else "slices", Text(f"{name} {each.words()}", "red" if each.worse else ""))
    ending = Text(f"refused: {one.refused}", style="red") if one.refused else Text("whole; serving may take it")
    return Group(table, ending)


def answers_text(rule: AnswerRule) -> str:
    """Return what a version answers, with the figures of its calibration."""
    names = sorted(name for name in rule.calibration.figures if not name.endswith("_before"))
    pairs = [(name, *(rule.calibration.figures[name + end] for end in ("_before", ""))) for name in names]
    return "; ".join(
        [rule.sentence, *(f"{name} {before:.4g} before, {after:.4g} after" for name, before, after in pairs)]
    )


def read_requirements(config: Config) -> Requirements:
    """Return what a pipeline requires of a version that it serves."""
    return requirements_of(Schema(config.pipeline.events), config.pipeline.model)


def read_version(versions: Versions, number: int, state: RegistryState, requirements: Requirements) -> Listed:
    """Return one version; its files' digests are not checked."""
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


def trained_text(manifest: Manifest) -> str:
    """Return the offsets that a version is trained through."""
    return format_trained_through(manifest.trained_through)


def judged_by(manifest: Manifest) -> tuple[str, float, float | None] | None:
    """Return the measure by which the gate judged a version, its value on held-out events, and that of one answer for
    all of them, where it is known; None where too few events were held out. The task's score is of the old ones."""
    metric = manifest.measure if manifest.measure in manifest.metrics else "old"
    if metric not in manifest.metrics:
        return None
    constant, value = manifest.constant.get(metric), manifest.metrics[metric]
    if metric == "old":  # errors are negated there
        constant, value = None if constant is None else abs(constant), abs(value)
    return manifest.measure or "score", value, constant


def metrics_text(manifest: Manifest) -> str:
    """Return the metrics of a version on one line."""
    return ", ".join(f"{name} {value:.4g}" for name, value in manifest.metrics.items())
