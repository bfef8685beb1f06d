"""`anabranch search`: the commands that show a search, and control it."""

from typing import Annotated

import typer

from anabranch.cli.common import PIPELINE, AsJson, ConfigPath, run_command, say, show

search = typer.Typer(
    help="Show the challengers of \\[search], and decide which settings the model takes.",
    epilog="Example: anabranch search status",
    no_args_is_help=True,
)


@search.command("status", epilog="Example: anabranch search status --json")
def search_status(config: ConfigPath = PIPELINE, as_json: AsJson = False) -> int:
    """Show the model's settings, the challengers that train, and how the last ones ended."""

    def start() -> None:
        from anabranch.commands.search_control.challengers import read_search, render_search
        from anabranch.config.loader import load_config

        report = read_search(load_config(config))
        if as_json:
            import msgspec

            show(msgspec.to_builtins(report), lambda: None)
        else:
            show(None, lambda: render_search(report))

    return run_command(start)


@search.command("promote", epilog="Example: anabranch search promote 7")
def search_promote(
    number: Annotated[int, typer.Argument(min=1, metavar="N", help="Number of the challenger.")],
    config: ConfigPath = PIPELINE,
) -> int:
    """Let the model take the settings of a challenger, and keep its own weights."""

    def start() -> None:
        from anabranch.commands.search_control.challengers import promote
        from anabranch.config.loader import load_config

        say(promote(load_config(config), number))

    return run_command(start)


@search.command("pin", epilog="Example: anabranch search pin learner.optimizer.lr=0.003")
def search_pin(
    values: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings to take first; by default none change.")
    ] = None,
    config: ConfigPath = PIPELINE,
) -> int:
    """Keep the model's settings as they are: challengers end, and none begins until unpin."""

    def start() -> None:
        from anabranch.commands.search_control.challengers import pin
        from anabranch.config.loader import load_config

        say(pin(load_config(config), values or []))

    return run_command(start)


@search.command("unpin", epilog="Example: anabranch search unpin")
def search_unpin(config: ConfigPath = PIPELINE) -> int:
    """Search again."""

    def start() -> None:
        from anabranch.commands.search_control.challengers import unpin
        from anabranch.config.loader import load_config

        say(unpin(load_config(config)))

    return run_command(start)
