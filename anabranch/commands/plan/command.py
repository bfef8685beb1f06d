"""`anabranch plan`."""

from datetime import timedelta
from typing import Annotated

import typer

from anabranch.command import AsJson, command, output, time_option
from anabranch.config.loader import Config
from anabranch.runtime.lifecycle import Exit


@command("anabranch plan --rate 5000 --retention 7d")
def plan(
    config: Config,
    rate: Annotated[float, typer.Option(min=0.001, metavar="N", help="Events a second.")] = 1000.0,
    days: Annotated[float, typer.Option(min=1, metavar="N", help="The day to plan for, besides the first one.")] = 30.0,
    requests_per_second: Annotated[
        float, typer.Option(min=0, metavar="N", help="Requests of one row a second to serving.")
    ] = 0.0,
    retention: Annotated[
        timedelta | None, time_option("How long the topic keeps events, such as 7d.", default="")
    ] = None,
    drive_tbw: Annotated[
        float | None, typer.Option(min=0.001, metavar="TB", help="Terabytes that may be written to the drive.")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Print the formula of each line.")] = False,
    as_json: AsJson = False,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 4 when the plan breaks a promise.")] = False,
) -> Exit | None:
    """Estimate memory, disk writes, freshness and maximum throughput, from a run in state_dir or the model alone."""
    from anabranch.commands.plan.constants import Load
    from anabranch.commands.plan.estimate import make_plan, render_plan
    from anabranch.commands.plan.run_constants import measured_constants

    load = Load(
        rate=rate,
        days=days,
        requests_per_second=requests_per_second,
        drive_tbw=drive_tbw,
        retention_seconds=None if retention is None else retention.total_seconds(),
    )
    found = make_plan(config, load, measured_constants(config))
    output(found.document() if as_json else None, lambda: render_plan(found, explain=explain))
    return found.exit_code() if exit_code else None
