"""`anabranch versions unpin`."""

from anabranch.command import AsJson, DryRun, Yes, command
from anabranch.commands.versions.rollout import carry_out
from anabranch.config.loader import Config


@command("anabranch versions unpin")
def unpin(
    config: Config,
    yes: Yes = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Serve the newest version that may be served again."""
    carry_out(config, "unpin", None, yes=yes, dry_run=dry_run, as_json=as_json)
