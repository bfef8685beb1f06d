"""`anabranch replay sample`."""

import json
from typing import Annotated

import typer

from anabranch.command import AsJson, command, output
from anabranch.config.loader import Config


@command("anabranch replay sample 5 --where label=3")
def sample(
    config: Config,
    count: Annotated[int, typer.Argument(min=1, metavar="N", help="How many events.")] = 10,
    where: Annotated[
        list[str] | None,
        typer.Option(metavar="WHAT=VALUE", help="Only events with this label, key, topic or partition; repeatable."),
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Sample the same events again.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print stored events of the newest checkpoint, sampled uniformly, one JSON object a line; --json prints a list."""
    from anabranch.commands.replay.contents import read_sample

    events = read_sample(config, count, where or [], seed)
    if as_json:
        output(list(events), lambda: None)
    for event in () if as_json else events:
        typer.echo(json.dumps(event))
