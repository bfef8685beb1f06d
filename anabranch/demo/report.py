"""The demo's report: what `--report FILE` holds."""

import msgspec

from anabranch.demo.snapshot import DemoSnapshot


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
    versions_published: int
    swaps: int
    http_requests: int
    http_failures: int
    freshness_p50_seconds: float | None
    freshness_p99_seconds: float | None
    serving_freshness_p50_seconds: float | None
    """As serving reports it, of the last minute; those above are measured from outside."""
    serving_freshness_p99_seconds: float | None
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
        versions_published=learner.versions_published if learner else 0,
        swaps=serving.swaps.get("swapped", 0) if serving else 0,
        http_requests=figures.requests,
        http_failures=figures.failures,
        freshness_p50_seconds=figures.freshness_p50_seconds,
        freshness_p99_seconds=figures.freshness_p99_seconds,
        serving_freshness_p50_seconds=serving.freshness_p50_seconds if serving else None,
        serving_freshness_p99_seconds=serving.freshness_p99_seconds if serving else None,
        replay_rows=dict(learner.replay_rows) if learner else {},
        seconds=round(figures.seconds, 3),
    )


def to_json(report: DemoReport) -> bytes:
    """Return the report as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"


def summary(figures: DemoSnapshot) -> str:
    """Return the closing words, in a few lines."""
    outcomes = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in figures.outcomes.items() if count)
    swaps = figures.serving.swaps.get("swapped", 0) if figures.serving else 0
    baseline = f" (without replay: {percent(figures.accuracy('old', baseline=True))})" if figures.baseline else ""
    return (
        f"{figures.sent:,} events in {figures.seconds:.0f} s: {outcomes or 'none with an outcome'}\n"
        f"accuracy now {percent(figures.accuracy('now'))} (each new digit before it is learned; always the commonest "
        f"digit {percent(figures.simplest('now'))}), on old classes "
        f"{percent(figures.accuracy('old'))}{baseline}\n"
        f"{figures.requests:,} requests, {figures.failures} failed, answered by {swaps} versions in turn; "
        f"freshness p50 {seconds(figures.freshness_p50_seconds)}, p99 {seconds(figures.freshness_p99_seconds)}\n"
    )


def percent(fraction: float | None) -> str:
    """Return a fraction in percent; a dash when it is not known."""
    return "-" if fraction is None else f"{fraction:.0%}"


def seconds(value: float | None) -> str:
    """Return a duration in seconds, below a tenth in milliseconds; a dash when it is not known."""
    if value is None:
        return "-"
    return f"{value * 1000:.1f} ms" if value < 0.1 else f"{value:.2f} s"
