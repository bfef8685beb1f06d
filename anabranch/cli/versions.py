"""The commands by which a person says which version is served."""

from typing import Annotated

import typer

from anabranch.cli.common import PIPELINE, ConfigPath, run_command, say

_Number = Annotated[int, typer.Argument(metavar="VERSION", min=0, help="Its number.")]
_NumberOrServed = Annotated[
    int | None, typer.Argument(metavar="VERSION", min=0, help="Its number; by default the served one.")
]
_AsJson = Annotated[bool, typer.Option("--json", help="Print what is served then as a JSON object.")]


def add_orders(versions: typer.Typer) -> None:
    """Add the commands to the group `versions`."""
    versions.command("promote", epilog="Example: anabranch versions promote 4711")(_promote)
    versions.command("rollback", epilog="Example: anabranch versions rollback")(_rollback)
    versions.command("pin", epilog="Example: anabranch versions pin 4711")(_pin)
    versions.command("unpin", epilog="Example: anabranch versions unpin")(_unpin)


def _promote(version: _Number, config: ConfigPath = PIPELINE, as_json: _AsJson = False) -> int:
    """Serve this version whatever its verdict, until a newer one passes the gate; those newer now are not taken."""
    return _order(config, "promote", version, as_json=as_json)


def _rollback(version: _NumberOrServed = None, config: ConfigPath = PIPELINE, as_json: _AsJson = False) -> int:
    """Serve what was served before, and never take this version again, nor those that are newer now."""
    return _order(config, "rollback", version, as_json=as_json)


def _pin(version: _NumberOrServed = None, config: ConfigPath = PIPELINE, as_json: _AsJson = False) -> int:
    """Serve exactly this version until it is unpinned."""
    return _order(config, "pin", version, as_json=as_json)


def _unpin(config: ConfigPath = PIPELINE, as_json: _AsJson = False) -> int:
    """Serve the newest version that may be served again."""
    return _order(config, "unpin", None, as_json=as_json)


def _order(config: ConfigPath, action: str, version: int | None, *, as_json: bool) -> int:
    def start() -> None:
        from anabranch.commands.rollout import apply_command
        from anabranch.config.loader import load_config

        obeyed = apply_command(load_config(config), action, version)
        if as_json:
            import json

            typer.echo(json.dumps(obeyed.document()))
        else:
            say(obeyed.sentence())

    return run_command(start)
