"""Freshness, and the rate at which a pipeline saturates."""

from anabranch.commands.planning.constants import Constants, Load
from anabranch.commands.planning.disk import DAY, GROWING, TOTAL
from anabranch.commands.planning.lines import Line, PlanSection, summed, written
from anabranch.config.model import Pipeline

MEAN, P99 = "mean", "99 of 100 within"
RATE, BY = "the pipeline", "by"
_BOUNDS = ("disk", "cores")
"""Parts that may do less than in the calibration."""
_NEAR = 1.15
"""A part whose rate is less than this times the pipeline's is what limits it."""


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
    lines = [Line("ingest", constants.ingest_rate, "1/s", "one process alone, on synthetic messages")]
    if step is not None and rows:
        busy = max(1e-9, step / rows - (stall or 0.0))
        formula = f"{rows:,.0f} events / {written(step, 's')}, without waiting for replay"
        lines.append(Line("steps", 1 / busy, "1/s", formula))
    for name, each in (("replay", stall), ("checkpoints", paused)):
        if each:
            lines.append(Line(name, 1 / each, "1/s", f"1 / {written(each, 's')} that steps wait for it, of an event"))
    total, growing = day.value(TOTAL), sum(day.value(name) or 0.0 for name in GROWING)
    if constants.disk_bytes_per_second and total and growing:
        left = max(0.0, constants.disk_bytes_per_second - (total - growing) / DAY)
        formula = f"{written(left, 'bytes')} a second besides the rest, if {written(growing, 'bytes/day')} grew with it"
        lines.append(Line("disk", load.rate * left / (growing / DAY), "1/s", formula))
    lines += _cores(constants, load)
    measured = constants.saturation_rate
    bounds = [line.value for line in lines if line.name in _BOUNDS and line.value is not None]
    rate = None if measured is None else min(measured, *bounds, measured)
    formula = f"all parts together in the {constants.source}; least: {_limit(lines, rate)}"
    result = [*lines, Line(RATE, rate, "1/s", formula)]
    if (each := constants.request_seconds) is not None:
        formula = f"{pipeline.serving.workers} processes / {written(each, 's')}, requests of one row one after another"
        result.append(Line("requests", pipeline.serving.workers / each, "1/s", formula))
    return PlanSection("rate at which it saturates", result)


def _cores(constants: Constants, load: Load) -> list[Line]:
    """Return what the cores can do if none is ever idle; nothing where the CPU time was not measured."""
    cores, each = load.cores or constants.cores, constants.cpu_seconds_per_event
    if not cores or not sum(each.values()):
        return []
    times = " + ".join(f"{written(value, 's')} of {name}" for name, value in each.items())
    return [Line("cores", cores / sum(each.values()), "1/s", f"{cores:g} cores / ({times}) of CPU time, of an event")]


def limited_by(section: PlanSection) -> str:
    """Return the part that limits the rate."""
    return _limit([line for line in section.lines if line.name not in (RATE, "requests")], section.value(RATE))


def _limit(lines: list[Line], rate: float | None) -> str:
    known = {line.name: line.value for line in lines if line.value is not None}
    if rate is None or not known:
        return "not measured"
    if known.get("ingest", rate * 2) < rate * _NEAR:
        return "ingest"
    return min(known, key=lambda name: known[name])
