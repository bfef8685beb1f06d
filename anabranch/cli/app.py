"""The command line. What a command needs is imported when it runs, so that `--help` loads neither torch nor Kafka."""

import sys
from collections.abc import Sequence
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from anabranch.cli.common import PIPELINE, ConfigPath, run_command, show
from anabranch.cli.replay import replay
from anabranch.cli.versions import add_orders
from anabranch.runtime.lifecycle import Exit

app = typer.Typer(
    name="anabranch",
    help="Keeps a PyTorch model learning from a Kafka stream while it serves it.",
    epilog="Begin with: anabranch demo",
    no_args_is_help=True,
    add_completion=False,
    # Tracebacks with the values of variables would print secrets.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
UsageError: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "UsageError")
"""Click's, from wherever typer has it: some versions carry a copy of their own."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 done, 1 a bug, 2 bad settings or input, 3 something is unreachable."""
    command = typer.main.get_command(app)
    try:
        code = command.main(arguments, "anabranch", standalone_mode=False)
    except UsageError as exc:
        where = exc.ctx.command_path if exc.ctx else "anabranch"
        sentence = exc.format_message().rstrip(".")
        if sentence:  # without any argument the help has been printed, and nothing is left to say
            sys.stderr.write(f'{where}: {sentence[:1].lower()}{sentence[1:]} (see "{where} --help")\n')
        return Exit.SETTINGS
    return int(code or Exit.DONE)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(installed_version("anabranch"))
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command(epilog="Example: anabranch demo --events 20000 --headless --report report.json")
def demo(
    events: Annotated[int | None, typer.Option(min=1, help="End after so many events.", metavar="N")] = None,
    headless: Annotated[bool, typer.Option("--headless", help="Plain lines instead of a panel.")] = False,
    report: Annotated[Path | None, typer.Option(help="Write a JSON report at the end.", metavar="FILE")] = None,
    bootstrap: Annotated[
        str | None, typer.Option(help="Use this Kafka broker; topics are made there, and removed.", metavar="HOST:PORT")
    ] = None,
    no_baseline: Annotated[
        bool, typer.Option("--no-baseline", help="Leave out the baseline that learns without replay.")
    ] = False,
    rate: Annotated[float, typer.Option(min=1, help="Events a second.")] = 600.0,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of serving; by default 8000 or a free one.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the stream.")] = 0,
) -> int:
    """Show the whole pipeline on this machine: broker, stream, learner, serving, requests. Nothing else is needed."""

    def start() -> Exit:
        from anabranch.demo.run import Options, run_demo

        return run_demo(Options(events, headless, report, bootstrap, not no_baseline, rate, port=port, seed=seed))

    sys.stderr.write("anabranch demo: starting\n")
    return run_command(start)


@app.command(epilog="Example: anabranch up -c digits/pipeline.toml")
def up(config: ConfigPath = PIPELINE) -> int:
    """Run learner and serving; a part that dies is started again."""

    def start() -> Exit:
        from anabranch.config.loader import load_config
        from anabranch.runtime.lifecycle import stop_on_signals
        from anabranch.runtime.supervisor import Supervisor, pipeline_parts

        parts = pipeline_parts(load_config(config))
        with stop_on_signals() as stop:
            return Supervisor(parts).run(stop)

    return run_command(start)


@app.command(epilog="Example: anabranch learn -c digits/pipeline.toml")
def learn(config: ConfigPath = PIPELINE) -> int:
    """Run the learner alone; SIGTERM stops it within learner.stop_timeout."""

    def start() -> Exit:
        from learner.__main__ import main as learner_main

        return Exit(learner_main(["-c", str(config)]))

    return run_command(start)


@app.command(epilog="Example: anabranch serve -c digits/pipeline.toml")
def serve(config: ConfigPath = PIPELINE) -> int:
    """Run serving alone; SIGTERM stops it once the requests that it has are answered."""

    def start() -> Exit:
        from serving.__main__ import main as serving_main

        return Exit(serving_main(["-c", str(config)]))

    return run_command(start)


@app.command(epilog="Example: anabranch produce events.jsonl --create-topic --rate 1000")
def produce(
    source: Annotated[
        Path, typer.Argument(metavar="FILE", help="JSON lines, CSV (both also as .gz) or Parquet; - is stdin.")
    ],
    config: ConfigPath = PIPELINE,
    topic: Annotated[str | None, typer.Option(help="Topic; by default the pipeline's first.")] = None,
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="Events a second; by default as fast as it goes.")
    ] = None,
    create_topic: Annotated[
        bool, typer.Option("--create-topic", help="Make the topic and the dead-letter topic where they are missing.")
    ] = False,
    partitions: Annotated[int, typer.Option(min=1, help="Partitions of a topic that is made.")] = 2,
    format_: Annotated[
        Literal["jsonl", "csv", "parquet"] | None,
        typer.Option(
            "--format", metavar="FORMAT", help="jsonl, csv or parquet; by default as the suffix says, else jsonl."
        ),
    ] = None,
    delimiter: Annotated[
        str | None, typer.Option(metavar="CHARACTER", help="Between the cells of CSV; by default a comma.")
    ] = None,
    on_error: Annotated[
        Literal["stop", "skip"],
        typer.Option(
            metavar="WHAT",
            help="At an event that the pipeline cannot use: stop, or skip it and say so; by default stop.",
        ),
    ] = "stop",
    unchecked: Annotated[
        bool, typer.Option("--unchecked", help="Send events as they are, also such as the pipeline cannot use.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> int:
    """Send events to the topic, and print the last offset of each partition, as replies write trained_through."""

    def start() -> None:
        from anabranch.commands.produce import produce
        from anabranch.config.loader import load_config

        produced = produce(
            load_config(config),
            source,
            topic=topic,
            rate=rate,
            partitions=partitions if create_topic else None,
            checked=not unchecked,
            kind=format_,
            delimiter=delimiter,
            on_error=on_error,
        )
        if as_json:
            import json

            document = {
                "topic": produced.topic,
                "events": produced.events,
                "last_offsets": produced.offsets(),
                "skipped": produced.skipped,
                "unknown_fields": produced.unknown_fields,
                "columns_left_out": produced.columns_left_out,
            }
            typer.echo(json.dumps(document))
        else:
            if produced.columns_left_out:
                typer.echo(
                    f"left out columns that are not in [schema]: {', '.join(produced.columns_left_out)}", err=True
                )
            if produced.unknown_fields:
                typer.echo(f"{produced.unknown_fields:,} events have fields that the schema does not know", err=True)
            if produced.skipped:
                typer.echo(f"left out {produced.skipped:,} events that the pipeline cannot use", err=True)
            typer.echo(f"sent {produced.events:,} events to {produced.topic}; the last offsets:", err=True)
            typer.echo(produced.offsets())
        if produced.interrupted:
            raise KeyboardInterrupt

    return run_command(start)


@app.command(epilog="Example: anabranch init digits && cd digits")
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write into; made if need be.")],
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that exist.")] = False,
) -> int:
    """Write an example pipeline: pipeline.toml, my_model.py and a few events."""

    def start() -> None:
        from anabranch.commands.init import next_commands, write_example

        paths = write_example(folder, force=force)
        typer.echo(f"wrote {', '.join(path.name for path in paths)} to {folder}; next:\n\n{next_commands(folder)}")

    return run_command(start)


@app.command(epilog="Example: anabranch status --watch")
def status(
    config: ConfigPath = PIPELINE,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Look again every second, until Ctrl-C.")] = False,
) -> int:
    """Show how the pipeline is: lag, rates, accuracy, replay, version, requests, and what is unhealthy."""

    def start() -> None:
        from anabranch.commands.status import read_status, render, watch_status
        from anabranch.config.loader import load_config

        pipeline = load_config(config)
        if as_json:
            typer.echo(read_status(pipeline).to_json(), nl=False)
        elif watch:
            watch_status(pipeline)
        else:
            show(None, lambda: render(read_status(pipeline)))

    return run_command(start)


@app.command(epilog="Example: anabranch doctor -c digits/pipeline.toml")
def doctor(
    config: ConfigPath = PIPELINE,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as a JSON list.")] = False,
    timeout: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="Time that each check may take.")] = 30.0,
) -> int:
    """Look for what keeps the pipeline from running, and say how to fix it; nothing is changed."""

    def start() -> Exit:
        from anabranch.doctor.runner import report

        return report(config.absolute(), timeout, as_json=as_json)

    return run_command(start)


versions = typer.Typer(
    help="Look at the versions that the learner has published, and say which is served.",
    epilog="Example: anabranch versions ls",
    no_args_is_help=True,
)
app.add_typer(versions, name="versions")
app.add_typer(replay, name="replay")


@versions.command("ls", epilog="Example: anabranch versions ls -n 5")
def versions_ls(
    config: ConfigPath = PIPELINE,
    limit: Annotated[int | None, typer.Option("-n", min=1, help="Only the newest N.", metavar="N")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print them as a JSON list.")] = False,
) -> int:
    """List the versions, the newest first: what they have learned, and what was made of them."""

    def start() -> None:
        from anabranch.commands.versions import list_versions, render_list
        from anabranch.config.loader import load_config

        listed = list_versions(load_config(config), limit)
        show([one.document() for one in listed] if as_json else None, lambda: render_list(listed))

    return run_command(start)


@versions.command("show", epilog="Example: anabranch versions show latest")
def versionsshow(
    which: Annotated[str, typer.Argument(metavar="VERSION", help="Its number, latest or served.")],
    config: ConfigPath = PIPELINE,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as a JSON object.")] = False,
) -> int:
    """Show one version: its manifest and verdict, whether its files are whole, and why serving does not take it."""

    def start() -> None:
        from anabranch.commands.versions import parse_which, render_one, show_version
        from anabranch.config.loader import load_config

        one = show_version(load_config(config), parse_which(which))
        show(one.document() if as_json else None, lambda: render_one(one))

    return run_command(start)


add_orders(versions)
