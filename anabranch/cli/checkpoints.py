"""`anabranch checkpoints`: the commands that show and choose what a restart of the learner resumes from."""

from pathlib import Path
from typing import Annotated

import typer

from anabranch.cli.common import PIPELINE, AsJson, ConfigPath, DryRun, Yes, confirm, run_command, say, show

checkpoints = typer.Typer(
    help="Show the checkpoints that a restart of the learner can resume from, and go back to an older one.",
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


@checkpoints.command("restore", epilog="Example: anabranch checkpoints restore 41 --dry-run")
def checkpoints_restore(
    checkpoint: Annotated[int, typer.Argument(min=0, metavar="NUMBER", help="The number of the checkpoint.")],
    config: ConfigPath = PIPELINE,
    yes: Yes = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> int:
    """Make the learner resume from an older checkpoint at its next start; stop it first. Newer ones are set aside."""

    def start() -> None:
        from anabranch.commands.checkpoints import plan_restore, restore_checkpoint
        from anabranch.config.loader import load_config
        from anabranch.runtime.private_state import private_state

        loaded = load_config(config)
        plan, storage = plan_restore(loaded, checkpoint), loaded.pipeline.storage
        renamed = storage is None or storage.mode == "mirror"
        if not dry_run and plan.set_aside:
            confirm("checkpoints restore", "\n".join(plan.sentences(done=False, renamed=renamed)), yes=yes)
            with private_state(loaded):
                plan = restore_checkpoint(loaded, checkpoint)
        if as_json:
            show(plan.document(), lambda: None)
            return
        for sentence in plan.sentences(done=not dry_run, renamed=renamed):
            say(sentence)

    return run_command(start)


@checkpoints.command("backup", epilog="Example: anabranch checkpoints backup /backup/$(date +%F)")
def checkpoints_backup(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to create; it may exist if it is empty.")],
    config: ConfigPath = PIPELINE,
    as_json: AsJson = False,
) -> int:
    """Copy all that belongs to the state directory into a new one, also while the learner runs."""

    def start() -> None:
        from anabranch.commands.backup import back_up
        from anabranch.config.loader import load_config

        backup = back_up(load_config(config), folder)
        if as_json:
            show(backup.document(), lambda: None)
            return
        for sentence in backup.sentences():
            say(sentence)

    return run_command(start)
