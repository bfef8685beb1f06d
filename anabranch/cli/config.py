"""`anabranch config`: the commands that check and show settings."""

import typer

from anabranch.cli.common import PIPELINE, AsJson, ConfigPath, run_command, say, show
from anabranch.runtime.lifecycle import Exit

config = typer.Typer(
    help="Check the settings, or show what they resolve to.",
    epilog="Example: anabranch config check",
    no_args_is_help=True,
)


@config.command("check", epilog="Example: anabranch config check -c digits/pipeline.toml")
def config_check(path: ConfigPath = PIPELINE, as_json: AsJson = False) -> int:
    """Check the settings, and print every fault. Exits with 2 when there is one."""

    def start() -> Exit:
        from anabranch.commands.config import check_config

        checked = check_config(path)
        if as_json:
            show(checked, lambda: None)
        elif checked["valid"]:
            say(f"{checked['config']} is valid")
        for fault in () if as_json else checked["faults"]:
            say(fault["message"])
        return Exit.DONE if checked["valid"] else Exit.SETTINGS

    return run_command(start)


@config.command("show", epilog="Example: anabranch config show --json")
def config_show(path: ConfigPath = PIPELINE, as_json: AsJson = False) -> int:
    """Print all settings as TOML, with defaults and overrides from the environment. Secrets are hidden."""

    def start() -> None:
        from anabranch.commands.config import render_toml, resolved_config

        document = resolved_config(path)
        if as_json:
            show(document, lambda: None)
        else:
            say(render_toml(document).rstrip("\n"))

    return run_command(start)
