"""`anabranch replay stats`."""

from anabranch.command import AsJson, command, output
from anabranch.config.loader import Config


@command("anabranch replay stats --json")
def stats(config: Config, as_json: AsJson = False) -> None:
    """Show what the newest checkpoint holds: events by tier, class and age, how they are kept, what is erased."""
    from anabranch.commands.replay.contents import read_stats, render_stats

    found = read_stats(config)
    output(found.document() if as_json else None, lambda: render_stats(found))
