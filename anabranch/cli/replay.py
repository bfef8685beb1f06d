"""`anabranch replay`: the commands that read the replay store and erase events."""

from typing import Annotated

import typer

from anabranch.cli.common import PIPELINE, AsJson, ConfigPath, DryRun, Yes, confirm, run_command, say, show

replay = typer.Typer(
    help="Show what the replay store holds, and erase events from it.",
    epilog="Example: anabranch replay stats",
    no_args_is_help=True,
)


@replay.command("stats", epilog="Example: anabranch replay stats --json")
def replay_stats(
    config: ConfigPath = PIPELINE,
    as_json: AsJson = False,
) -> int:
    """Show what the newest checkpoint holds: events by tier, class and age, how they are kept and sampled, what is
    erased."""

    def start() -> None:
        from anabranch.commands.replay_store import read_stats, render_stats
        from anabranch.config.loader import load_config

        stats = read_stats(load_config(config))
        show(stats.document() if as_json else None, lambda: render_stats(stats))

    return run_command(start)


@replay.command("sample", epilog="Example: anabranch replay sample 5 --where label=3")
def replay_sample(
    count: Annotated[int, typer.Argument(min=1, metavar="N", help="How many events.")] = 10,
    config: ConfigPath = PIPELINE,
    where: Annotated[
        list[str] | None,
        typer.Option(metavar="WHAT=VALUE", help="Only events with this label, key, topic or partition; repeatable."),
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Sample the same events again.")] = None,
    as_json: AsJson = False,
) -> int:
    """Print stored events of the newest checkpoint, sampled uniformly, one JSON object a line; --json prints a list."""

    def start() -> None:
        import json

        from anabranch.commands.replay_store import read_sample
        from anabranch.config.loader import load_config

        events = read_sample(load_config(config), count, where or [], seed)
        if as_json:
            show(list(events), lambda: None)
            return
        for event in events:
            typer.echo(json.dumps(event))

    return run_command(start)


@replay.command("erase", epilog="Example: anabranch replay erase --key customer-17")
def replay_erase(
    config: ConfigPath = PIPELINE,
    key: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="Erase the events of this \\[schema.key] so far; repeatable."),
    ] = None,
    offsets: Annotated[
        list[str] | None,
        typer.Option(metavar="RANGE", help="Erase these offsets, such as events[3]@100..200; repeatable."),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="How long to wait until the learner has erased them.")
    ] = 15.0,
    yes: Yes = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> int:
    """Erase events: they leave store, holdout set and checkpoints, and do not come back. Weights are not unlearned."""
    if not key and not offsets:
        raise typer.BadParameter("name what to erase by --key or --offsets")

    def start() -> None:
        from datetime import timedelta

        from anabranch.commands.erase import erase_events, plan_erasure, planned_sentences
        from anabranch.config.loader import load_config
        from anabranch.runtime.private_state import private_state

        loaded = load_config(config)
        planned = planned_sentences(plan_erasure(loaded, key or [], offsets or []))
        if dry_run:
            show({"preview": planned} if as_json else None, lambda: "\n".join(planned))
            return
        confirm("replay erase", "\n".join(planned), yes=yes)
        with private_state(loaded):
            answer = erase_events(loaded, key or [], offsets or [], timedelta(seconds=timeout))
        if as_json:
            show(answer.document(), lambda: None)
        else:
            for sentence in answer.sentences():
                say(sentence)

    return run_command(start)
