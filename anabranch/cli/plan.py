"""`anabranch plan`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from anabranch.cli.common import PIPELINE, AsJson, run_command, show
from anabranch.runtime.lifecycle import Exit

EventBytes = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Bytes of an event in its message; by default what its fields take."),
]
Cores = Annotated[float | None, typer.Option(min=0.01, metavar="N", help="Cores that others leave to the pipeline.")]
DriveTbw = Annotated[
    float | None, typer.Option(min=0.001, metavar="TB", help="Terabytes that may be written to the drive.")
]
NoCalibrate = Annotated[
    bool,
    typer.Option(
        "--no-calibrate", help="Plan from the model's size alone, without running the pipeline on synthetic events."
    ),
]


def plan(
    pipeline: Annotated[Path, typer.Argument(metavar="FILE", help="The pipeline's file.")] = PIPELINE,
    rate: Annotated[float, typer.Option(min=0.001, metavar="N", help="Events a second.")] = 1000.0,
    event_bytes: EventBytes = None,
    events_per_message: Annotated[
        int, typer.Option(min=1, metavar="N", help="Events of a message, of the formats rows and arrow.")
    ] = 1,
    days: Annotated[float, typer.Option(min=1, metavar="N", help="The day to plan for, besides the first one.")] = 30.0,
    requests_per_second: Annotated[
        float, typer.Option(min=0, metavar="N", help="Requests of one row a second to serving.")
    ] = 0.0,
    retention: Annotated[
        str | None, typer.Option(metavar="TIME", help="How long the topic keeps events, such as 7d.")
    ] = None,
    cores: Cores = None,
    drive_tbw: DriveTbw = None,
    no_calibrate: NoCalibrate = False,
    seconds: Annotated[float, typer.Option(min=2, metavar="S", help="Time of the calibration.")] = 60.0,
    from_run: Annotated[
        bool, typer.Option("--from-run", help="Take constants of the reports in state_dir instead of a calibration.")
    ] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Print the formula of each line.")] = False,
    as_json: AsJson = False,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 4 when the plan breaks a promise.")] = False,
) -> int:
    """Foresee memory, disk writes, freshness and the rate at which a pipeline saturates, before it runs."""

    def start() -> Exit | None:
        from anabranch.commands.planning.constants import Load
        from anabranch.commands.planning.plan import plan_pipeline, render_plan
        from anabranch.config.loader import load_config
        from anabranch.core.durations import parse_duration
        from anabranch.core.errors import SettingsError

        try:
            kept = None if retention is None else parse_duration(retention).total_seconds()
        except ValueError as exc:
            raise SettingsError(f"--retention {retention}: {exc}") from exc
        load = Load(
            rate=rate,
            event_bytes=event_bytes,
            events_per_message=events_per_message,
            days=days,
            requests_per_second=requests_per_second,
            cores=cores,
            drive_tbw=drive_tbw,
            retention_seconds=kept,
        )
        found = plan_pipeline(
            load_config(pipeline),
            load,
            seconds=None if no_calibrate else seconds,
            from_run=from_run,
            say=lambda sentence: sys.stderr.write(f"anabranch plan: {sentence}\n"),
        )
        show(found.document() if as_json else None, lambda: render_plan(found, explain=explain))
        return found.exit_code() if exit_code else None

    return run_command(start)
