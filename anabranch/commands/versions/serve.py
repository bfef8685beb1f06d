"""`anabranch versions serve`."""

from typing import Annotated

import typer

from anabranch.command import AsJson, DryRun, Yes, command
from anabranch.commands.versions.rollout import carry_out
from anabranch.commands.versions.show import VersionArgument, parse_which
from anabranch.config.loader import Config


@command("anabranch versions serve 4711 --pin")
def serve(
    version: VersionArgument,
    config: Config,
    pinned: Annotated[bool, typer.Option("--pin", help="Serve no other version until versions unpin.")] = False,
    yes: Yes = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Serve this version whatever its verdict, until a newer one passes the gate. Versions newer now are not served."""
    carry_out(config, "pin" if pinned else "promote", parse_which(version), yes=yes, dry_run=dry_run, as_json=as_json)
