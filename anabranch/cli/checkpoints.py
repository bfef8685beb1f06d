"""`anabranch checkpoints`: the commands that show what a restart of the learner can resume from."""

from typing import Annotated

import typer

from anabranch.cli.common import PIPELINE, AsJson, ConfigPath, run_command, show

checkpoints = typer.Typer(
    help="Show the checkpoints that a restart of the learner can resume from.",
    epilog="Example: anabranch checkpoints ls",
    no_args_is_help=True,
)


@checkpoints.command("ls", epilog="Example: anabranch checkpoints ls")
def checkpoints_ls(config: ConfigPath = PIPELINE, as_json: AsJson = False) -> int:
    """List the checkpoints, the newest first."""

    def start() -> None:
        from anabranch.commands.checkpoints import list_checkpoints, render_checkpoints
        from anabranch.config.loader import load_config

        listed = list_checkpoints(load_config(config))
        show([one.document() for one in listed] if as_json else None, lambda: render_checkpoints(listed))

    return run_command(start)


@checkpoints.command("show", epilog="Example: anabranch checkpoints show latest")
def checkpoints_show(
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="Its number, or latest.")] = "latest",
    config: ConfigPath = PIPELINE,
    as_json: AsJson = False,
) -> int:
    """Show one checkpoint, and check its files against their digests."""

    def start() -> None:
        from anabranch.commands.checkpoints import render_checkpoint, show_checkpoint
        from anabranch.config.loader import load_config

        one = show_checkpoint(load_config(config), checkpoint)
        show(one.document() if as_json else None, lambda: render_checkpoint(one))

    return run_command(start)
