"""`anabranch plan`: computes the lines of a plan, and shows them."""

import shutil
from dataclasses import dataclass
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from anabranch.commands.plan.constants import Constants, Load
from anabranch.commands.plan.disk import DAY, DiskWrites, uploads, wear
from anabranch.commands.plan.lines import PlanSection, time
from anabranch.commands.plan.memory import TOTAL, device_memory, hit_rates, host_memory
from anabranch.commands.plan.speed import RATE, freshness, limited_by, saturation
from anabranch.commands.plan.store_size import PlannedStore, schema_row_bytes
from anabranch.config.loader import Config
from anabranch.config.pipeline import Pipeline
from anabranch.core.files import existing_folder, used_bytes
from anabranch.core.sizes import size_text
from anabranch.ingest.events.schema import Schema
from anabranch.learner.preflight.disk_space import DiskSpace, disk_space
from anabranch.replay.preflight import free_memory
from anabranch.runtime.lifecycle import Exit

_FULL_LOAD = 0.8
"""The part of the saturation rate above which bursts pile up."""


@dataclass(frozen=True)
class Machine:
    """What is there, in bytes."""

    free_memory: int
    free_disk: int
    """With what the pipeline has there already."""
    device_memory: int | None


class Plan(msgspec.Struct):
    """What a pipeline takes at a load."""

    load: Load
    constants: Constants
    sections: dict[str, PlanSection]
    """By what they are about: memory, device, tiers, first day, later day, uploads, freshness, saturation."""
    warnings: list[str]
    """One sentence for each promise that does not hold."""

    def document(self) -> dict[str, Any]:
        """Return it as JSON values."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found

    def unknown(self) -> list[str]:
        """Return the sections with a line that has no value, since a constant of it was not measured."""
        return [each.name for each in self.sections.values() if not all(line.is_known for line in each.lines)]

    def exit_code(self) -> Exit:
        """Return DONE where every promise holds, else UNHEALTHY."""
        return Exit.UNHEALTHY if self.warnings else Exit.DONE


def make_plan(config: Config, load: Load, constants: Constants) -> Plan:
    """Compute a plan from constants."""
    pipeline, store = config.pipeline, None
    if pipeline.learner.strategy.kind.replays:
        row = constants.row_bytes or schema_row_bytes(Schema(pipeline.events, pipeline.stream.labels))
        store = PlannedStore.of(pipeline, row)
    disk = DiskWrites(pipeline, constants, load, store)
    first = disk.between("disk writes, first day", 0.0, DAY)
    later = disk.between(f"disk writes, day {load.days:g}", (load.days - 1) * DAY, load.days * DAY)
    later.lines.extend(wear(later["total"], load))
    sections: dict[str, PlanSection | None] = {
        "memory": host_memory(pipeline, constants, store, load.rate * disk.checkpoint_seconds),
        "device": device_memory(pipeline, constants, store),
        "tiers": None if store is None else hit_rates(pipeline, store),
        "first day": first,
        "later day": later,
        "uploads": uploads(pipeline.storage, later),
        "freshness": freshness(pipeline, constants, load, disk.publish_seconds),
        "saturation": saturation(pipeline, constants, load, later),
    }
    there = {name: section for name, section in sections.items() if section is not None}
    space = disk_space(pipeline, constants.version_bytes or 0, constants.base_bytes)
    folder = existing_folder(config.state_dir)
    disk_bytes = shutil.disk_usage(folder).free + used_bytes(config.state_dir)
    machine = Machine(free_memory(), disk_bytes, constants.device_total_bytes)
    return Plan(load, constants, there, _broken_promises(pipeline, load, there, space, machine))


def render_plan(plan: Plan, *, explain: bool) -> RenderableType:
    """Return the plan as tables; with `explain`, each line with its formula."""
    parts: list[RenderableType] = []
    for section in plan.sections.values():
        if not (lines := [line for line in section.lines if line.is_known]):
            continue
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True, min_width=34)
        table.add_column(justify="right", no_wrap=True, min_width=14)
        table.add_column(overflow="fold", style="dim")
        for line in lines:
            table.add_row(Text(f"  {line.name}"), line.text, Text(line.formula if explain else ""))
        parts += [Text(section.name, style="bold"), table, Text()]
    parts += [Text(f"{each}", style="dim") for each in plan.constants.remarks]
    parts += [Text(f"warning: {sentence}.", style="yellow") for sentence in plan.warnings]
    unknown = plan.unknown()
    if unknown:
        parts.append(Text(f"not complete, since constants of it were not measured: {'; '.join(unknown)}", style="dim"))
    if not plan.warnings:
        parts.append(Text("nothing that was measured breaks a promise" if unknown else "every promise holds"))
    return Group(*parts)


def _broken_promises(
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
                f"{where} has {size_text(has)}, and the pipeline takes {size_text(needs)}: lower replay.device_bytes, "
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
        f"the disk is full {when}: all that is kept takes {size_text(space.total)}, and "
        f"{size_text(machine.free_disk)} are free; lower versions.keep, replay.disk.bytes or replay.capacity"
    )
