"""`anabranch versions rollback`."""

from anabranch.command import AsJson, DryRun, Yes, command
from anabranch.commands.versions.rollout import carry_out
from anabranch.config.loader import Config


@command("anabranch versions rollback --dry-run")
def rollback(
    config: Config,
    yes: Yes = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Return to the version that was served before, until a newer one passes the gate. Newer ones are not served."""
    carry_out(config, "rollback", None, yes=yes, dry_run=dry_run, as_json=as_json)
