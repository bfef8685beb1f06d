"""`anabranch undo`."""

import sys
from typing import Annotated

import typer

from anabranch.cli.common import PIPELINE, AsJson, ConfigPath, DryRun, Yes, confirm, run_command, say, show


def undo(
    config: ConfigPath = PIPELINE,
    offsets: Annotated[
        list[str] | None,
        typer.Option(metavar="RANGE", help="Undo these offsets, such as payments[3]@100..200; repeatable."),
    ] = None,
    key: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="Undo the messages with an event of this \\[schema.key]; repeatable."),
    ] = None,
    producer: Annotated[
        list[str] | None,
        typer.Option(metavar="HEADER=VALUE", help="Undo the messages with this header; repeatable."),
    ] = None,
    since: Annotated[
        str, typer.Option(metavar="TIME", help="Undo only what came from then on, such as 2026-07-03T14:00 (UTC).")
    ] = "",
    until: Annotated[str, typer.Option(metavar="TIME", help="Undo only what came before then.")] = "",
    timeout: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="How long to wait until the learner has gone back.")
    ] = 60.0,
    yes: Yes = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> int:
    """Undo events: serve the newest version without them, and learn again without them from the checkpoint before."""

    def start() -> None:
        from datetime import timedelta

        from anabranch.commands.undo.carry_out import carry_out
        from anabranch.commands.undo.plan import plan_undo
        from anabranch.commands.undo.selection import Selection
        from anabranch.config.loader import load_config
        from anabranch.runtime.private_state import private_state

        loaded = load_config(config)
        plan = plan_undo(loaded, Selection(offsets or [], key or [], producer or [], since, until), _show_progress)
        if dry_run:
            show(plan.document() if as_json else None, lambda: "\n".join(plan.sentences()))
            return
        confirm("undo", "\n".join(plan.sentences()), yes=yes)
        with private_state(loaded):
            result = carry_out(loaded, plan, timedelta(seconds=timeout))
        if as_json:
            show(result.document(), lambda: None)
        else:
            for sentence in result.sentences():
                say(sentence)

    return run_command(start)


def _show_progress(read: int, total: int) -> None:
    """Show how far the stream is searched, where a person is there to see it."""
    if sys.stderr.isatty():
        end = "\n" if read == total else ""
        sys.stderr.write(f"\rreading the stream: {read:,} of {total:,} offsets{end}")
        sys.stderr.flush()
