"""`anabranch dead-letters`: the commands for messages that the pipeline could not use."""

from typing import Annotated

import typer

from anabranch.cli.common import PIPELINE, AsJson, ConfigPath, DryRun, run_command, say, show

dead_letters = typer.Typer(
    help="List messages that the pipeline could not use, and send them again.",
    epilog="Example: anabranch dead-letters ls",
    no_args_is_help=True,
)


@dead_letters.command("ls", epilog="Example: anabranch dead-letters ls --limit 20")
def dead_letters_ls(
    config: ConfigPath = PIPELINE,
    limit: Annotated[int | None, typer.Option("--limit", "-n", min=1, metavar="N", help="Only the last N.")] = None,
    as_json: AsJson = False,
) -> int:
    """List dead letters: where each message came from, why it could not be used, and its value."""

    def start() -> None:
        from anabranch.commands.dead_letters import letter_document, list_letters, render_letters
        from anabranch.config.loader import load_config

        letters = list_letters(load_config(config), limit)
        show([letter_document(letter) for letter in letters] if as_json else None, lambda: render_letters(letters))

    return run_command(start)


@dead_letters.command("resend", epilog='Example: anabranch dead-letters resend --source "events[0]@4711"')
def dead_letters_resend(
    config: ConfigPath = PIPELINE,
    source: Annotated[
        list[str] | None,
        typer.Option(metavar="SOURCE", help="Send this message, such as events\\[0]@4711; repeatable."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Send all messages.")] = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> int:
    """Send messages of dead letters to their topics again, after the cause is fixed. A second run sends them twice."""
    if every == bool(source):
        raise typer.BadParameter("name messages by --source, or take all by --all")

    def start() -> None:
        from anabranch.commands.dead_letters import resend
        from anabranch.config.loader import load_config

        result = resend(load_config(config), None if every else source, dry_run=dry_run)
        if as_json:
            show(result.document(), lambda: None)
            return
        for sentence in result.sentences():
            say(sentence)

    return run_command(start)
