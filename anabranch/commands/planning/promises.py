"""The promises that a plan breaks."""

from dataclasses import dataclass

from anabranch.commands.planning.constants import Load
from anabranch.commands.planning.disk import DAY
from anabranch.commands.planning.lines import PlanSection, size, time
from anabranch.commands.planning.memory import TOTAL
from anabranch.commands.planning.speed import RATE, limited_by
from anabranch.config.model import Pipeline
from anabranch.doctor.storage.space import DiskSpace

_FULL_LOAD = 0.8
"""The part of the saturation rate above which bursts pile up."""


@dataclass(frozen=True)
class Machine:
    """What is there, in bytes."""

    free_memory: int
    free_disk: int
    """With what the pipeline has there already."""
    device_memory: int | None


def broken_promises(
    pipeline: Pipeline,
    load: Load,
    sections: dict[str, PlanSection],
    space: DiskSpace,
    machine: Machine,
) -> list[str]:
    """Return one sentence for each promise that does not hold."""
    rate = sections["saturation"].value(RATE)
    found = []
    if rate is not None and load.rate >= rate:
        found.append(
            f"{load.rate:,.0f} events a second are above saturation, {rate:,.0f}: lag grows without bound. "
            f"It is limited by: {limited_by(sections['saturation'])}"
        )
    elif rate is not None and load.rate > _FULL_LOAD * rate:
        found.append(
            f"{load.rate:,.0f} events a second are {load.rate / rate:.0%} of saturation: after a burst or a restart "
            "the learner catches up slowly"
        )
    for name, has in (("memory", machine.free_memory), ("device", machine.device_memory)):
        needs = sections[name].value(TOTAL) if name in sections else None
        if needs is not None and has is not None and needs > has:
            where = "the host" if name == "memory" else "the device"
            found.append(
                f"{where} has {size(has)}, and the pipeline takes {size(needs)}: lower replay.device_bytes, "
                "replay.capacity or stream.buffer_bytes"
            )
    found += _retention(pipeline, load, rate)
    if space.total > machine.free_disk:
        found.append(_disk(space, machine, sections))
    requests = sections["saturation"].value("requests")
    if requests is not None and load.requests_per_second > requests:
        found.append(
            f"{load.requests_per_second:,.0f} requests a second are more than the {requests:,.0f} that "
            f"{pipeline.serving.workers} serving processes answer one after another: raise serving.workers"
        )
    return found


def _retention(pipeline: Pipeline, load: Load, rate: float | None) -> list[str]:
    """Return whether the topic loses events that a restart reads again.

    The oldest checkpoint is `keep` intervals old; events since then, and those that wait for labels, are read again
    while new ones come.
    """
    if load.retention_seconds is None:
        return []
    kept, every = pipeline.checkpoints.keep, pipeline.checkpoints.every.total_seconds()
    back = kept * every + (pipeline.stream.labels.wait.total_seconds() if pipeline.stream.labels else 0.0)
    if rate is not None and rate > load.rate:
        back *= rate / (rate - load.rate)
    if back <= load.retention_seconds:
        return []
    sentence = (
        f"the topic keeps events for {time(load.retention_seconds)}, but a restart from the oldest of {kept} "
        f"checkpoints reads back {time(back)}, until it has caught up: lengthen the retention, or lower "
        "checkpoints.every"
    )
    return [sentence]


def _disk(space: DiskSpace, machine: Machine, sections: dict[str, PlanSection]) -> str:
    """Say when the disk is full: files grow by what is written, until all is there that is kept."""
    day = sections["first day"].value("total")
    left = machine.free_disk - space.file
    when = "at the start" if left <= 0 or not day else f"within {time(left / day * DAY)}"
    return (
        f"the disk is full {when}: all that is kept takes {size(space.total)}, and {size(machine.free_disk)} are free; "
        "lower versions.keep, replay.disk.bytes or replay.capacity"
    )
