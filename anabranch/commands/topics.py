"""`anabranch topics`."""

from typing import Annotated

import typer

from anabranch.command import AsJson, DryRun, command, output, say
from anabranch.config.loader import Config
from anabranch.ingest.kafka.producer import create_topics, partition_counts
from anabranch.ingest.settings.stream import StreamSettings
from anabranch.serving.settings import ServingSettings


@command("anabranch topics create --partitions 6")
def create(
    config: Config,
    partitions: Annotated[
        int, typer.Option(min=1, metavar="N", help="Partitions of each topic that is created, but of dead letters.")
    ] = 2,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Create the topics of the pipeline that do not exist: of events, labels, answers, their log and dead letters."""
    stream = config.pipeline.stream
    needed = needed_topics(stream, config.pipeline.serving, partitions)
    if dry_run:
        there = partition_counts(stream, needed)
        made = [name for name in needed if name not in there]
    else:
        made = create_topics(stream, needed)
    kept = [name for name in needed if name not in made]
    verb = "would create" if dry_run else "created"
    sentences = [f"{verb} {name} with {needed[name]} partition{'' if needed[name] == 1 else 's'}" for name in made]
    sentences += [f"{name} exists" for name in kept]
    if as_json:
        output({"created": {name: needed[name] for name in made}, "existed": kept, "dry_run": dry_run}, lambda: None)
    else:
        say(*sentences)


def needed_topics(stream: StreamSettings, serving: ServingSettings, partitions: int) -> dict[str, int]:
    """Return the partitions of every topic that a pipeline needs, by name; dead letters need one."""
    answers, log = serving.stream, serving.log
    answered = () if answers is None else (*answers.topics, answers.output)
    logged = () if log is None else (log.topic,)
    needed = dict.fromkeys((*stream.all_topics, *answered, *logged), partitions)
    if stream.dead_letter_topic is not None:
        needed.setdefault(stream.dead_letter_topic, 1)
    return needed
