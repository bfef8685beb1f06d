"""`anabranch plan`: computes the lines of a plan, and shows them."""

import shutil
from collections.abc import Callable
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from anabranch.commands.planning.calibrating.calibration import calibrate
from anabranch.commands.planning.constants import Constants, Load
from anabranch.commands.planning.disk import DAY, DiskWrites, uploads, wear
from anabranch.commands.planning.lines import PlanSection
from anabranch.commands.planning.memory import device_memory, hit_rates, host_memory
from anabranch.commands.planning.promises import Machine, broken_promises
from anabranch.commands.planning.run_constants import constants_of_model, constants_of_run
from anabranch.commands.planning.speed import freshness, saturation
from anabranch.commands.planning.store_size import PlannedStore, schema_row_bytes
from anabranch.config.loader import Config
from anabranch.core.files import existing_folder
from anabranch.doctor.probe import free_memory
from anabranch.doctor.state_dir_checks import used_bytes
from anabranch.doctor.storage.space import disk_space
from anabranch.runtime.lifecycle import Exit
from ingest.events.schema import Schema


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
        return [each.name for each in self.sections.values() if any(line.value is None for line in each.lines)]

    def exit_code(self) -> Exit:
        """Return DONE where every promise holds, else UNHEALTHY."""
        return Exit.UNHEALTHY if self.warnings else Exit.DONE


def plan_pipeline(
    config: Config, load: Load, *, seconds: float | None, from_run: bool, say: Callable[[str], object]
) -> Plan:
    """Measure the constants of a pipeline, and plan it.

    Args:
        config: the pipeline.
        load: what is to come.
        seconds: of the calibration; None: there is none.
        from_run: whether constants come from the reports in `state_dir` instead.
        say: receives what is done next.

    Raises:
        SettingsError: the pipeline does not work.
    """
    if from_run:
        constants = constants_of_run(config)
    elif seconds is not None:
        constants = calibrate(config, load, seconds, say)
    else:
        constants = constants_of_model(config)
    return make_plan(config, load, constants)


def make_plan(config: Config, load: Load, constants: Constants) -> Plan:
    """Compute a plan from constants."""
    pipeline, store = config.pipeline, None
    if pipeline.learner.strategy.replays:
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
    return Plan(load, constants, there, broken_promises(pipeline, load, there, space, machine))


def render_plan(plan: Plan, *, explain: bool) -> RenderableType:
    """Return the plan as tables; with `explain`, each line with its formula."""
    parts: list[RenderableType] = []
    for section in plan.sections.values():
        if not (lines := [line for line in section.lines if line.value is not None]):
            continue
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True, min_width=34)
        table.add_column(justify="right", no_wrap=True, min_width=14)
        table.add_column(overflow="fold", style="dim")
        for line in lines:
            table.add_row(Text(f"  {line.name}"), line.text, Text(line.formula if explain else ""))
        parts += [Text(section.name, style="bold"), table, Text()]
    parts += [Text(f"measured with a difference: {each}", style="dim") for each in plan.constants.differences]
    parts += [Text(f"warning: {sentence}.", style="yellow") for sentence in plan.warnings]
    unknown = plan.unknown()
    if unknown:
        parts.append(Text(f"not complete, since constants of it were not measured: {'; '.join(unknown)}", style="dim"))
    if not plan.warnings:
        parts.append(Text("nothing that was measured breaks a promise" if unknown else "every promise holds"))
    return Group(*parts)
