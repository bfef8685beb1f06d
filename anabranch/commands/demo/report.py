"""What the demo prints: a line while it runs, the closing words, and the report of `--report FILE`."""

import msgspec

from anabranch.commands.demo.snapshot import DemoSnapshot
from anabranch.learner.status.report import MeasureReport


class DemoReport(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to the events that were sent, and how well the served model did."""

    events_produced: int
    events_trained: int
    events_stored_only: int
    events_held_out: int
    events_dead_lettered: int
    events_skipped: int
    accuracy_now: float | None
    accuracy_old: float | None
    accuracy_old_without_replay: float | None
    measures: dict[str, MeasureReport]
    """Those of the task, each with its interval and what one answer for all events has."""
    versions_published: int
    swaps: int
    http_requests: int
    http_failures: int
    freshness_p50_seconds: float | None
    """Of the last minute, as serving reports it, as is that below."""
    freshness_p99_seconds: float | None
    replay_rows: dict[str, int]
    seconds: float


def make_report(figures: DemoSnapshot) -> DemoReport:
    """Return the report of the figures at the end."""
    outcomes, learner, serving = figures.outcomes, figures.learner, figures.serving
    return DemoReport(
        events_produced=figures.sent,
        events_trained=outcomes.get("trained", 0),
        events_stored_only=outcomes.get("stored_only", 0),
        events_held_out=outcomes.get("held_out", 0),
        events_dead_lettered=outcomes.get("dead_lettered", 0),
        events_skipped=outcomes.get("skipped", 0),
        accuracy_now=figures.accuracy("now"),
        accuracy_old=figures.accuracy("old"),
        accuracy_old_without_replay=figures.accuracy("old", baseline=True),
        measures=learner.measures if learner else {},
        versions_published=learner.versions_published if learner else 0,
        swaps=serving.swaps.get("swapped", 0) if serving else 0,
        http_requests=figures.requests,
        http_failures=figures.failures,
        freshness_p50_seconds=serving.freshness_p50_seconds if serving else None,
        freshness_p99_seconds=serving.freshness_p99_seconds if serving else None,
        replay_rows=dict(learner.replay_rows) if learner else {},
        seconds=round(figures.seconds, 3),
    )


def to_json(report: DemoReport) -> bytes:
    """Return the report as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"


def plain_line(figures: DemoSnapshot) -> str:
    """Return what happens now in one line, and what is unhealthy."""
    version = figures.serving.version if figures.serving else None
    line = (
        f"{figures.seconds:4.0f} s  {figures.sent:,} events, class {figures.phase}  "
        f"accuracy now {percent(figures.accuracy('now'))}{_against(figures, 'now')}, "
        f"old {percent(figures.accuracy('old'))}{_against(figures, 'old')}  "
        f"version {'-' if version is None else version}, {_freshness(figures)}  "
        f"{figures.requests:,} requests, {figures.failures} failed"
    )
    return "; ".join([line, *_gate(figures), *figures.problems])


def summary(figures: DemoSnapshot) -> str:
    """Return the closing words, in a few lines."""
    outcomes = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in figures.outcomes.items() if count)
    swaps = figures.serving.swaps.get("swapped", 0) if figures.serving else 0
    return (
        f"{figures.sent:,} events in {figures.seconds:.0f} s: {outcomes or 'none with an outcome'}\n"
        f"accuracy now {percent(figures.accuracy('now'))}{_against(figures, 'now')}, of each new digit before it is "
        f"learned; on old classes {percent(figures.accuracy('old'))}{_against(figures, 'old')}\n"
        f"{_measure(figures)}"
        f"{figures.requests:,} requests, {figures.failures} failed, answered by {swaps} versions in turn; "
        f"{_freshness(figures)}\n"
    )


def _against(figures: DemoSnapshot, window: str) -> str:
    """Return what an accuracy is to be compared with, in brackets."""
    known = {"no replay": figures.accuracy(window, baseline=True), **figures.rules(window)}
    others = [f"{name} {percent(value)}" for name, value in known.items() if value is not None]
    return f" ({', '.join(others)})" if others else ""


def _measure(figures: DemoSnapshot) -> str:
    """Return a line with the measure that judges versions, else the first of the task, on held-out events."""
    measures = figures.learner.measures if figures.learner else {}
    known = {name: each for name, each in measures.items() if "held_out" in each.value}
    if figures.learner is None or not known:
        return ""
    name = figures.learner.measure if figures.learner.measure in known else next(iter(known))
    value, constant = known[name].value["held_out"], known[name].constant.get("held_out")
    baseline = "" if constant is None else f", where one answer for all has {constant:.3g}"
    return f"{name.replace('_', ' ')} {value:.3g} on held-out events{baseline}\n"


def _freshness(figures: DemoSnapshot) -> str:
    """Return how long events take from their append to the first version that has learned them."""
    serving = figures.serving
    half, most = (serving.freshness_p50_seconds, serving.freshness_p99_seconds) if serving else (None, None)
    return f"freshness p50 {seconds(half)}, p99 {seconds(most)}"


def _gate(figures: DemoSnapshot) -> list[str]:
    """Return what the quality gate decided about the newest version, where it failed or labels are wrong."""
    learner = figures.learner
    reasons = learner.held_reasons if learner else []
    if not figures.poisoned and not reasons:
        return []
    if learner is None or learner.version is None or learner.verdict is None:
        verdict = "nothing judged yet"
    else:
        verdict = f"version {learner.version} " + (f"FAIL: {reasons[0]}" if reasons else learner.verdict)
    poisoned = "the producer sends wrong labels on purpose; " if figures.poisoned else ""
    return [f"gate: {poisoned}{verdict}"]


def percent(fraction: float | None) -> str:
    """Return a fraction in percent; a dash when it is not known."""
    return "-" if fraction is None else f"{fraction:.0%}"


def seconds(value: float | None) -> str:
    """Return a duration in seconds, below a tenth in milliseconds; a dash when it is not known."""
    if value is None:
        return "-"
    return f"{value * 1000:.1f} ms" if value < 0.1 else f"{value:.2f} s"
