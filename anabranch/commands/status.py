"""`anabranch status`: one screen of the reports of learner and serving."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from anabranch.command import AsJson, command, output
from anabranch.commands.versions.fleet import fleet_lines, fleet_of
from anabranch.config.loader import Config
from anabranch.core.die_with_parent import lives
from anabranch.core.sizes import size_text
from anabranch.core.start_report import StartReport, read_start
from anabranch.learner.device.reading import DeviceReport
from anabranch.learner.settings.search import shown
from anabranch.learner.status.report import (
    LAG_STALE,
    BackfillReport,
    BaselineReport,
    CanaryReport,
    ClassReport,
    DeviceSharingReport,
    InputReport,
    LabelReport,
    LearnerReport,
    LiveReport,
    SearchReport,
    SliceReport,
    StorageReport,
    UndoReport,
    no_better,
    served_text,
    worst_first,
)
from anabranch.learner.status.report import read_report as read_learner
from anabranch.runtime.console import PlainConsole
from anabranch.runtime.lifecycle import Exit, stop_on_signals
from anabranch.serving.fleet.overview import Fleet
from anabranch.serving.reporting.health import SILENT, judge
from anabranch.serving.reporting.report import AnswersReport, ServingReport, ShadowReport
from anabranch.serving.reporting.report import read_report as read_serving

_BAR_COLUMNS = 40
_FEWEST_OF_CLASS = 10
"""Events of a class that may be named the worst."""
_MOST_SLICES = 5
_UNITS: Mapping[str, Callable[[float], str]] = {
    "_seconds": lambda seconds: _duration(seconds),
    "_bytes": size_text,
    "_ratio": lambda part: f"{part:.1%}",
}
"""How a number is shown, by the end of its name."""


@command("anabranch status --watch")
def status(
    config: Config,
    as_json: AsJson = False,
    watch: Annotated[bool, typer.Option("--watch", help="Update the screen every second, until Ctrl-C.")] = False,
    exit_code: Annotated[
        bool,
        typer.Option(
            "--exit-code", help="Exit with 0 when healthy, 4 when unhealthy, 5 when a part does not run, or starts."
        ),
    ] = False,
) -> Exit | None:
    """Show pipeline health, lag, throughput, accuracy and the served version."""
    if watch and not as_json:
        watch_status(config)
    state = read_status(config)
    if as_json:
        typer.echo(state.to_json(), nl=False)
    elif not watch:
        output(None, lambda: render(state))
    return state.exit_code() if exit_code else None


@dataclass(frozen=True)
class Status:
    """The reports of a pipeline's parts at one time; None where a part has never run in this state directory."""

    name: str
    state_dir: str
    now: float
    learner: LearnerReport | None
    serving: ServingReport | None
    fleet: Fleet | None = None
    """The servers of all hosts; None without `[storage]`."""
    starts: Mapping[str, StartReport | None] = field(default_factory=dict)
    """What each part that lives, `learner` or `serving`, said of its start, which may be over."""

    @property
    def reports(self) -> "dict[str, LearnerReport | ServingReport | None]":
        """The reports of both parts, by the name of the part."""
        return {"learner": self.learner, "serving": self.serving}

    def condition(self, part: str) -> str:
        """Return `running`, `silent`, `starting` or `not running`."""
        report, start = self.reports[part], self.starts.get(part)
        if start is not None and (report is None or start.pid == report.pid):
            # In a container the process before may have had the same pid.
            is_alive = report is not None and report.time >= start.started
        else:
            is_alive = report is not None and lives(report.pid)
        if report is None or not is_alive:
            return "not running" if start is None else "starting"
        return "running" if self.now - report.time < SILENT.total_seconds() else "silent"

    def exit_code(self) -> Exit:
        """Return DONE when both parts run without a problem, else NOT_RUNNING or UNHEALTHY.

        In a fleet, a part that has never run on this host is another host's.
        """
        both = self.reports
        here = [part for part in both if both[part] or self.starts.get(part)] if self.fleet is not None else []
        conditions = {self.condition(part) for part in here or both}
        if conditions & {"starting", "not running"}:
            return Exit.NOT_RUNNING
        healthy = conditions == {"running"} and not any(report and report.problems for report in both.values())
        return Exit.DONE if healthy else Exit.UNHEALTHY

    def to_json(self) -> bytes:
        """Return both reports, and whether they are of living processes, as one indented JSON object."""
        document: dict[str, object] = {
            "name": self.name,
            "state_dir": self.state_dir,
            **{part: self._part(part) for part in self.reports},
        }
        if self.fleet is not None:
            document["fleet"] = self.fleet.document()
        return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"

    def _part(self, part: str) -> dict[str, object]:
        report, condition = self.reports[part], self.condition(part)
        return {
            "condition": condition,
            "age_seconds": None if report is None else round(self.now - report.time, 3),
            "report": report,
            **({"start": self.starts[part]} if condition == "starting" else {}),
        }


def read_status(config: Config) -> Status:
    """Read the newest reports of a pipeline's parts."""
    state_dir = config.state_dir
    starts = {part: read_start(state_dir, part) for part in ("learner", "serving")}  # before the reports that end them
    reports = read_learner(state_dir), read_serving(state_dir)
    return Status(config.pipeline.name, str(state_dir), time.time(), *reports, fleet_of(config), starts)


def render(status: Status) -> RenderableType:
    """Return the screen."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("pipeline", f"{status.name}, state in {status.state_dir}")
    if status.serving is not None and status.condition("serving") == "running":
        silent = status.condition("learner") != "running"
        table.add_row("health", Text(judge(status.learner, status.serving, silent=silent).sentence))
    for part, report in status.reports.items():
        table.add_row(part, _condition(status, part))
        for sentence in report.problems if report else ():
            table.add_row("", Text(sentence, style="yellow"))
        for sentence in report.warnings if report else ():
            table.add_row("", Text(f"warning: {sentence}"))
    return Group(
        table,
        *([Text(), _learner(status.learner, status.now)] if status.learner else []),
        *([Text(), _serving(status.serving)] if status.serving else []),
        *([Text(), _fleet(status.fleet)] if status.fleet else []),
    )


def _condition(status: Status, part: str) -> Text:
    condition, report = status.condition(part), status.reports[part]
    style = {"running": "green", "silent": "yellow", "starting": "cyan"}.get(condition, "dim")
    text = Text(condition, style=style)
    if condition == "starting" and (start := status.starts[part]) is not None:
        began = f"  pid {start.pid}, for {_age(status.now - start.started)}: {start.doing}"
        return text.append(began, style="default")
    if report is None:
        return text
    age = status.now - report.time
    if condition == "running":
        return text.append(f"  pid {report.pid}, for {_age(report.time - report.started)}", style="default")
    return text.append(f"  pid {report.pid}, last report {_age(age)} ago", style="default")


def _learner(report: LearnerReport, now: float) -> RenderableType:
    table = _section()
    rates, history = report.rates, report.backfill
    if history is not None:
        table.add_row("history", _history(history))
    without = f"; {report.without_graphs}" if report.without_graphs else ""
    table.add_row("steps", f"{report.steps:,} ({_rate(rates, 'steps')}){without}")
    replayed = f"{_rate(rates, 'rows_replay')} replayed, ratio {report.replay_ratio:.3g}"
    table.add_row("events", f"{_rate(rates, 'rows_new')} new, {replayed}")
    if report.error:
        table.add_row("absolute error", _pairs({k: f"{v:.4g}" for k, v in report.error.items()}))
    else:
        table.add_row("accuracy", _pairs({k: f"{v:.1%}" for k, v in report.accuracy.items()}) or "not known yet")
    if report.measures:
        table.add_row("measures", _measures(report))
    for number, baseline in enumerate(report.baselines.values()):
        table.add_row("" if number else "baselines", _baseline(report, baseline))
    if report.newest_classes:
        table.add_row("worst class", _worst_class(report.newest_classes))
    if report.slices:
        table.add_row("worst slices", _worst_slices(report.slices))
    if report.loss:
        table.add_row("loss", _pairs({k: f"{v:.4g}" for k, v in report.loss.items()}))
    if report.forgetting is not None:
        table.add_row("forgetting", f"{report.forgetting:.1%}" if not report.error else f"{report.forgetting:.4g}")
    if report.drifts:
        table.add_row("drifts", f"{report.drifts:,}, the last at step {report.drift_step or 0:,}")
    if report.inputs is not None and report.inputs.psi:
        table.add_row("inputs", _inputs(report.inputs))
    if report.search is not None:
        table.add_row("search", _search(report.search))
    table.add_row("outcomes", _pairs({k: f"{v:,}" for k, v in report.outcomes.items()}) or "none")
    table.add_row("lag", _lag(report, now))
    if report.behind:
        table.add_row("behind", Text(f"by {_duration(report.lag_seconds)}", style="yellow"))
    if any(report.skipped.values()):
        table.add_row("skipped", _pairs({k: f"{v:,}" for k, v in report.skipped.items() if v}))
    for name, partition in report.partitions.items():
        if partition.history:
            continue
        waiting = f", {partition.waiting:,} wait for labels" if partition.waiting else ""
        table.add_row(name, f"lag {partition.pending:,}, trained through {partition.trained_through:,}{waiting}")
    if report.labels is not None:
        table.add_row("late labels", _labels(report.labels))
    if report.live is not None:
        table.add_row("served answers", _live(report.live, report.measure))
    last = next(reversed(report.replay_rows), None)  # which holds all; tiers before it are caches
    tiers = {
        tier if tier == last else f"{tier} cache": f"{rows:,} ({size_text(report.replay_bytes.get(tier, 0))})"
        for tier, rows in report.replay_rows.items()
    }
    table.add_row("replay", _pairs(tiers) or "empty")
    if report.replay_lost:
        table.add_row("", Text(f"{report.replay_lost:,} events were lost by a tier", style="yellow"))
    table.add_row("held out", f"{report.holdout_rows:,}")
    if report.device_sharing is not None:
        table.add_row("device sharing", _sharing(report.device_sharing))
    for device in report.device.devices if report.device else ():
        table.add_row("device", _device(device, report.device.joules_per_event if report.device else None))
    made = "" if report.checkpoint_time is None else f", made {_age(time.time() - report.checkpoint_time)} ago"
    table.add_row("checkpoint", "none yet" if report.checkpoint is None else f"{report.checkpoint}{made}")
    if report.storage is not None:
        table.add_row("object store", _storage(report.storage))
    if report.undo is not None:
        table.add_row("undo", _undo(report.undo))
    newest = "none yet" if report.version is None else str(report.version)
    table.add_row("version", f"{newest}, {report.versions_published:,} published, {report.publish_skipped:,} skipped")
    table.add_row("gate", _gate(report))
    if report.answers:
        table.add_row("answers", report.answers)
    if report.canary is not None:
        table.add_row("canary", _canary(report.canary))
    for name, numbers in report.extensions.items():
        table.add_row(Text(name.replace("_", " ")), Text(_numbers(numbers)))
    return table


def _inputs(inputs: InputReport) -> str:
    """Say which features differ most from the events before; those that have drifted have a warning."""
    largest = sorted(inputs.psi, key=lambda name: -inputs.psi[name])[:3]
    psi = _pairs({name: f"{inputs.psi[name]:.2f}" for name in largest})
    return f"{_count(len(inputs.drifted), 'drift')}; the largest PSI: {psi}"


def _worst_class(classes: Mapping[str, ClassReport]) -> str:
    """Say of which class the fewest were found; all are in the report."""
    enough = {name: each for name, each in classes.items() if each.support >= _FEWEST_OF_CLASS}
    if not enough:
        return f"none of the newest events has {_FEWEST_OF_CLASS} others of its class"
    name, worst = min(enough.items(), key=lambda item: item[1].recall or 0.0)
    right = "never answered" if not worst.answered else f"right in {worst.found:,} of {worst.answered:,} answers"
    return f"{name}: {worst.found:,} of the newest {worst.support:,} found ({worst.recall or 0.0:.1%}), {right}"


def _worst_slices(slices: Mapping[str, SliceReport]) -> Text:
    """Say how the newest version does in the worst slices, and which are not compared; all are in the report."""
    enough = {name: each for name, each in slices.items() if each.rows >= _FEWEST_OF_CLASS}
    lines = [f"{name} {each.words()}" for name, each in worst_first(enough)[:_MOST_SLICES]]
    few = [name for name, each in slices.items() if not each.compared]
    if few and len(few) < len(slices):
        lines.append(f"{_count(len(few), 'slice')} with too few events to compare: {', '.join(few[:_MOST_SLICES])}")
    return Text("\n".join(lines), style="yellow" if any(each.worse for each in slices.values()) else "")


def _baseline(report: LearnerReport, baseline: BaselineReport) -> Text:
    """Say what a baseline achieves and how the model compares, in yellow where it is no better."""
    shown = {name: f"{value:.4g}" if report.error else f"{value:.1%}" for name, value in baseline.scores.items()}
    text = Text(f"{baseline.rule}: {_pairs(shown) or 'not known yet'}")
    if baseline.comparison:
        text.append(f"; now the model is {baseline.comparison}", style="yellow" if baseline.worse else "")
    if worse := no_better(report, baseline):
        text.append(f"; it is no better in {' and '.join(worse)}", style="yellow")
    return text


def _measures(report: LearnerReport) -> str:
    """Return each measure with its 95 % interval and what one answer has, the one that decides first, and why."""
    names = sorted(report.measures, key=lambda name: name != report.measure)
    lines = [f"judged by {report.measure}: {report.measure_reason}"]
    for name in names:
        each = report.measures[name]
        values = {
            window.replace("_", " "): f"{value:.3g} ({each.lower[window]:.3g} to {each.upper[window]:.3g}"
            + (f"; constant {each.constant[window]:.3g})" if window in each.constant else ")")
            for window, value in each.value.items()
        }
        lines.append(f"{name}: {_pairs(values)}")
    return "\n".join(lines)


def _search(search: SearchReport) -> str:
    """Say what the model trains with, and how many challengers there are and were."""
    pinned = ", pinned" if search.pinned else f", {_count(len(search.challengers), 'challenger')}"
    ended = _pairs({outcome: f"{count:,}" for outcome, count in search.outcomes.items()})
    return f"{shown(search.values)}{pinned}{f'; ended: {ended}' if ended else ''}"


def _undo(undo: UndoReport) -> Text:
    """Say how far the stream is learned again without what was undone, in yellow until the end."""
    what = f"{undo.number}, {undo.offsets:,} offsets are skipped since checkpoint {undo.checkpoint}"
    if not undo.left:
        return Text(f"{what}; learned again")
    return Text(f"{what}; {undo.fraction:.1%} learned again, {_count(undo.left, 'offset')} left", style="yellow")


def _storage(storage: StorageReport) -> Text:
    """Say what the object store lacks, and for how long, in yellow; and how much was uploaded."""
    behind = {kind: f"for {_duration(lag)}" for kind, lag in storage.lag_seconds.items() if lag > 0}
    if behind:
        return Text(f"{storage.url} lacks the newest {_pairs(behind)}", style="yellow")
    return Text(f"{storage.url} has everything, {size_text(storage.uploaded_bytes)} uploaded")


def _labels(labels: LabelReport) -> str:
    """Say how many events wait, how those before ended, what became of labels, and how late these are."""
    waiting = f"{labels.waiting:,} events wait ({size_text(labels.bytes)} of {size_text(labels.bound)})"
    ended = _pairs({name: f"{count:,}" for name, count in labels.ended.items() if count})
    counts = _pairs({name: f"{count:,}" for name, count in labels.labels.items() if count})
    p50, p99 = labels.lag_p50_seconds, labels.lag_p99_seconds
    lag = "" if p50 is None or p99 is None else f"lag p50 {_duration(p50)}, p99 {_duration(p99)}"
    return "; ".join(
        part for part in (waiting, ended and f"ended: {ended}", counts and f"labels: {counts}", lag) if part
    )


def _live(live: LiveReport, measure: str) -> str:
    """Say what became of the answers that the learner read back, and how good those of each version were."""
    counts = _pairs({name: f"{count:,}" for name, count in live.answers.items() if count})
    part = "" if live.part == 1 else f"; {live.part:.2%} of the events are joined, by their identity"
    lines = [f"{counts or 'none yet'}; {live.waiting:,} events and answers wait{part}"]
    for version, each in live.served.items():
        name = "all" if version == "all" else f"version {version}"
        lines.append(f"{name}: {served_text(each, measure) or 'not measured yet'} ({each.rows:,} labels)")
    return "\n".join(lines)


def _history(history: BackfillReport) -> RenderableType:
    """Return the progress of the backfill: a bar, what it is made of, and where it is."""
    read = f"{history.rows_read:,} of {history.rows:,} rows"
    if history.done:
        return Text(f"read, {_count(history.rows_read, 'row')} of {_count(history.files, 'file')}")
    left = "" if history.seconds_left is None else f", {_age(history.seconds_left)} left"
    bar = Table.grid(padding=(0, 2))
    bar.add_row(
        ProgressBar(total=1.0, completed=history.fraction, width=_BAR_COLUMNS), Text(f"{history.fraction:.1%}{left}")
    )
    number = min(history.files_read + 1, history.files)
    where = f"file {number:,} of {history.files:,}{f': {history.file}' if history.file else ''}"
    return Group(bar, Text(f"{read}, {history.rate:,.0f}/s"), Text(where))


def _lag(report: LearnerReport, now: float) -> Text:
    """Say how many offsets wait, and how old that is: lag that is not of now is no lag of 0."""
    if report.lag_age_seconds is None:
        return Text("not known yet", style="yellow")
    pending, age = sum(each.pending for each in report.partitions.values()), now - report.time + report.lag_age_seconds
    lag = f"{_count(pending, 'offset')}, {_duration(report.lag_seconds)}"
    if age < LAG_STALE.total_seconds():
        return Text(f"{lag}, as of {_age(age)} ago")
    return Text(f"not known; {_age(age)} ago it was {lag}", style="yellow")


def _gate(report: LearnerReport) -> Text:
    """Say how the newest version was judged, and for how long none has passed."""
    if report.held_since is None:
        return Text(report.verdict or "nothing judged yet")
    age, why = _age(report.time - report.held_since), "; ".join(report.held_reasons)
    return Text(f"versions are held back, for {age}: {why}", style="yellow")


def _sharing(sharing: DeviceSharingReport) -> str:
    wait = "" if sharing.wait_p99_seconds is None else f", p99 {sharing.wait_p99_seconds * 1000:.1f} ms to yield"
    size = "" if sharing.micro_batch_size is None else f", micro-batches of {sharing.micro_batch_size:,}"
    return f"{sharing.policy}: {sharing.training:.0%} training, {_count(sharing.servers, 'server')}{wait}{size}"


def _device(device: DeviceReport, joules_per_event: float | None) -> Text:
    """Return the state of a device, in yellow with the first of its problems and warnings."""
    used, total, hot = device.memory_used, device.memory_total, device.temperatures.get("gpu")
    facts = [
        device.name,
        None if hot is None else f"{hot:.0f} °C",
        None if used is None or total is None else f"{used / 1e9:.1f} of {total / 1e9:.1f} GB",
        None if device.power is None else f"{device.power:.0f} W",
        None if joules_per_event is None else f"{joules_per_event:.3g} J an event",
    ]
    line = Text(", ".join(fact for fact in facts if fact))
    for sentence in (*device.problems, *device.warnings)[:1]:
        line = line.append(f": {sentence}", style="yellow")
    return line


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _serving(report: ServingReport) -> RenderableType:
    table = _section()
    table.add_row("address", report.address)
    if report.grpc_address:
        table.add_row("gRPC", report.grpc_address)
    pinned = "" if report.pinned is None else ", pinned"
    table.add_row("version", "waits for the first" if report.version is None else f"{report.version}{pinned}")
    table.add_row("learned", report.trained_through or "nothing")
    if report.freshness_p50_seconds is not None and report.freshness_p99_seconds is not None:
        p50, p99 = report.freshness_p50_seconds, report.freshness_p99_seconds
        table.add_row("freshness", f"p50 {_duration(p50)}, p99 {_duration(p99)} from append to served")
    table.add_row("swaps", _pairs({k: f"{v:,}" for k, v in report.swaps.items()}) or "none")
    if report.refused:
        number, reason = list(report.refused.items())[-1]
        table.add_row("refused", Text(f"{number}: {reason}", style="yellow"))
    if report.shadow is not None:
        table.add_row("shadow", _shadow(report.shadow))
    table.add_row("requests", _pairs({k: f"{v:,}" for k, v in report.requests.items()}) or "none")
    if report.request_p50_seconds is not None and report.request_p99_seconds is not None:
        p50, p99 = report.request_p50_seconds * 1000, report.request_p99_seconds * 1000
        table.add_row("latency", f"p50 {p50:.1f} ms, p99 {p99:.1f} ms")
    if report.stream is not None:
        table.add_row("stream", _stream(report.stream))
    if report.log is not None:
        counts = _pairs({k: f"{v:,}" for k, v in report.log.answers.items()}) or "nothing yet"
        table.add_row("log", f"-> {report.log.topic}: {counts}")
    return table


def _stream(report: AnswersReport) -> str:
    """Say what is answered through Kafka, and how fast."""
    counts = _pairs({k.replace("_", "-"): f"{v:,}" for k, v in report.messages.items()}) or "nothing yet"
    speed = f"{report.per_second:,.0f} a second, lag {report.lag:,}"
    if report.p50_seconds is not None and report.p99_seconds is not None:
        p50, p99 = map(_short_duration, (report.p50_seconds, report.p99_seconds))
        speed += f", p50 {p50}, p99 {p99} from append to answer"
    return f"{', '.join(report.topics)} -> {report.output}: {counts}, {speed}"


def _fleet(fleet: Fleet) -> RenderableType:
    table = _section()
    for name, text in fleet_lines(fleet):
        table.add_row(Text(name), text)  # a str would be markup
    return table


def _canary(canary: CanaryReport) -> Text:
    last = "" if canary.last is None else f"; {canary.last}"
    if canary.version is None:
        return Text(f"none, all servers may serve version {canary.stable}{last}")
    compared = f"{canary.rows:,} of {canary.required_rows:,} labelled events since"
    return Text(f"version {canary.version} against {canary.stable} on {', '.join(canary.servers)}, {compared}{last}")


def _numbers(numbers: Mapping[str, Any]) -> str:
    """Return numbers that an extension reports, in the unit that their name ends with."""
    shown = {}
    for name, value in numbers.items():
        unit = next((unit for unit in _UNITS if name.endswith(unit)), "")
        if isinstance(value, dict):
            found = _pairs({key: _number(one, unit) for key, one in value.items()}) or "none"
        else:
            found = _number(value, unit)
        shown[name.removesuffix(unit)] = found
    return "; ".join(f"{name.replace('_', ' ')} {found}" for name, found in shown.items())


def _number(value: Any, unit: str) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "not known" if value is None else str(value)
    return _UNITS[unit](value) if unit else f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def _shadow(shadow: ShadowReport) -> Text:
    """Say how far a version that is not served disagrees."""
    if shadow.failed is not None:
        return Text(shadow.failed, style="yellow")
    if shadow.disagreement is None:
        return Text(f"version {shadow.version}, nothing compared yet")
    return Text(f"version {shadow.version} disagrees by {shadow.disagreement:.3g}, over {shadow.rows:,} rows")


def _section() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True, min_width=8)
    table.add_column(overflow="fold")
    return table


def _pairs(values: dict[str, str]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in values.items())


def _rate(rates: dict[str, float], name: str) -> str:
    return f"{rates.get(name, 0.0):,.1f}/s"


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 60 else _age(seconds)


def _short_duration(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else _duration(seconds)


def _age(seconds: float) -> str:
    whole = int(seconds)
    if whole < 60:
        return f"{max(0.0, seconds):.1f} s"
    return str(timedelta(seconds=whole))


def watch_status(config: Config) -> None:
    """Show the screen until a signal comes, and update it every second."""
    with stop_on_signals() as stop, Live(console=PlainConsole(), auto_refresh=False) as live:
        while True:
            live.update(render(read_status(config)), refresh=True)
            if stop.wait(1.0):
                return
