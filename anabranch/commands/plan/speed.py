"""Freshness, and the rate at which a pipeline saturates."""

from anabranch.commands.plan.constants import Constants, Load
from anabranch.commands.plan.disk import DAY, GROWING, TOTAL
from anabranch.commands.plan.lines import Line, PlanSection, summed, written
from anabranch.config.pipeline import Pipeline

MEAN, P99 = "mean", "99 of 100 within"
RATE = "the pipeline"
_FARTHEST = 100.0
"""How many times the highest rate that was seen or is planned for the rate of a part is said: a part that takes next to
none of the time or of the disk is no measure of more."""
_BUSY = 0.85
"""The part of the time for which steps and their stalls keep the loop busy, below which they do not limit it."""


def gathering_seconds(pipeline: Pipeline, rate: float) -> float:
    """Return how long the events of a step gather at most."""
    learner = pipeline.learner
    return min(learner.batch_size / rate, learner.max_delay.total_seconds())


def waits(pipeline: Pipeline, constants: Constants, rate: float, publish_seconds: float) -> tuple[float, float]:
    """Return how long an event waits until the version that has learned it is due: the mean, and the most."""
    gathering, step = gathering_seconds(pipeline, rate), constants.step_seconds or 0.0
    return (gathering + publish_seconds) / 2 + step, gathering + publish_seconds + step


def freshness(pipeline: Pipeline, constants: Constants, load: Load, publish_seconds: float) -> PlanSection:
    """Return the time from an event's append to the first answer of a version that has learned it."""
    saturated = constants.saturation_rate is not None and load.rate > constants.saturation_rate
    gathering, step = gathering_seconds(pipeline, load.rate), constants.step_seconds
    batch, delay = pipeline.learner.batch_size, written(pipeline.learner.max_delay.total_seconds(), "s")
    gathered = f"the shorter of {batch} events / {load.rate:,.0f} a second, and max_delay = {delay}"
    source = f"measured in the {constants.source}"
    lines = [
        Line("gathering a step", gathering / 2, "s", f"half of {gathered}"),
        Line("step", step, "s", source),
        Line("waiting for the next version", publish_seconds / 2, "s", f"half of {written(publish_seconds, 's')}"),
        Line("scoring, writing and loading it", constants.delivery_seconds, "s", source),
    ]
    mean = summed(MEAN, lines)
    most = [gathering, step, publish_seconds, constants.delivery_p99_seconds]
    known = [value for value in most if value is not None]
    late = sum(known) if len(known) == len(most) else None
    formula = "the same, with the whole time of gathering and between versions, and the slowest delivery measured"
    if saturated:
        formula = "none: the rate is above saturation, so that events pile up"
    return PlanSection(
        "freshness, from append to answer",
        [
            *lines,
            Line(MEAN, None if saturated else mean.value, "s", formula if saturated else mean.formula),
            Line(P99, None if saturated else late, "s", formula),
        ],
    )


def saturation(pipeline: Pipeline, constants: Constants, load: Load, day: PlanSection) -> PlanSection:
    """Return the rates that each part can do, and that of all together; `day` is what is written to the disk."""
    step, rows = constants.full_step_seconds, constants.full_step_rows
    stall, paused = constants.stall_seconds_per_event, constants.checkpoint_stall_seconds_per_event
    measured, lines = constants.saturation_rate, list[Line]()
    farthest = _FARTHEST * max(load.rate, measured or 0.0)

    def add(name: str, rate: float, formula: str) -> None:
        bounded = rate <= farthest
        lines.append(Line(name, rate if bounded else None, "1/s", formula, bounded))

    if step is not None and rows:
        busy = max(1e-9, step / rows - (stall or 0.0))
        formula = f"{rows:,.0f} events / {written(step, 's')}, without waiting for replay"
        add("steps", 1 / busy, formula)
    for name, each in (("replay", stall), ("checkpoints", paused)):
        if each:
            add(name, 1 / each, f"1 / {written(each, 's')} that steps wait for it, of an event")
    total, growing = day.value(TOTAL), sum(day.value(name) or 0.0 for name in GROWING)
    if constants.disk_bytes_per_second and total and growing:
        left = max(0.0, constants.disk_bytes_per_second - (total - growing) / DAY)
        formula = f"{written(left, 'bytes')} a second besides the rest, if {written(growing, 'bytes/day')} grew with it"
        add("disk", load.rate * left / (growing / DAY), formula)
    disk = next((line.value for line in lines if line.name == "disk" and line.value is not None), None)
    rate = measured if measured is None or disk is None else min(measured, disk)
    formula = f"new events while some waited in the {constants.source}; least: {_limit(lines, rate)}"
    result = [*lines, Line(RATE, rate, "1/s", formula)]
    if (each := constants.request_seconds) is not None:
        formula = f"{pipeline.serving.workers} processes / {written(each, 's')}, one request after another"
        result.append(Line("requests", pipeline.serving.workers / each, "1/s", formula))
    return PlanSection("rate at which it saturates", result)


def limited_by(section: PlanSection) -> str:
    """Return the part that limits the rate: not the steps where the loop was idle for a part of the time."""
    return _limit([line for line in section.lines if line.name not in (RATE, "requests")], section.value(RATE))


def _limit(lines: list[Line], rate: float | None) -> str:
    known = {line.name: line.value for line in lines if line.value is not None}
    if rate is None or not known:
        return "not measured"
    loop = sum(1 / value for name, value in known.items() if name != "disk")
    if rate * loop < _BUSY and known.get("disk", rate + 1) > rate:
        return "ingest, or work between steps"
    return min(known, key=lambda name: known[name])
