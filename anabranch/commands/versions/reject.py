"""`anabranch versions reject`."""

from anabranch.command import AsJson, DryRun, Yes, command
from anabranch.commands.versions.rollout import carry_out
from anabranch.commands.versions.show import VersionArgument, parse_which
from anabranch.config.loader import Config


@command("anabranch versions reject 4711 --dry-run")
def reject(
    version: VersionArgument,
    config: Config,
    yes: Yes = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Never serve this version again. When it is served now, serve the newest other one that may be served."""
    carry_out(config, "reject", parse_which(version), yes=yes, dry_run=dry_run, as_json=as_json)
