"""The command line. What a command needs is imported when it runs, so that `--help` loads neither torch nor Kafka."""

import functools
import sys
from collections.abc import Sequence
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from anabranch.cli.checkpoints import checkpoints
from anabranch.cli.common import PIPELINE, AsJson, ConfigPath, run_command, say, show
from anabranch.cli.config import config
from anabranch.cli.dead_letters import dead_letters
from anabranch.cli.event_files import backtest, predict
from anabranch.cli.plan import plan
from anabranch.cli.replay import replay
from anabranch.cli.search import search
from anabranch.cli.undo import undo
from anabranch.cli.versions import versions
from anabranch.core.logs import LogFormat, LogLevel, LogSettings, configure_logging, log_arguments
from anabranch.runtime.lifecycle import Exit

if TYPE_CHECKING:
    from anabranch.commands.produce import Produced

_HELP: dict[str, Any] = {"help_option_names": ["-h", "--help"]}

app = typer.Typer(
    name="anabranch",
    help="Keeps a PyTorch model learning from a Kafka stream while it serves it.",
    epilog="Begin with: anabranch demo",
    no_args_is_help=True,
    # Tracebacks with the values of variables would print secrets.
    pretty_exceptions_enable=False,
    context_settings=_HELP,
)
UsageError: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "UsageError")
"""Click's, from wherever typer has it: some versions have their own copy."""


@functools.cache
def command_tree() -> Any:
    """Return the root command. Typer would print `<bool>` as the value of each flag, which takes none."""
    root: Any = typer.main.get_command(app)
    waiting = [root]
    while waiting:
        command = waiting.pop()
        waiting += getattr(command, "commands", {}).values()
        help_option = command.get_help_option(typer.Context(command, **_HELP))
        for parameter in (*command.params, help_option):
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
    return root


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 done, 1 a bug, 2 bad settings or input, 3 something is unreachable."""
    try:
        code = command_tree().main(arguments, "anabranch", standalone_mode=False)
    except UsageError as exc:
        where = exc.ctx.command_path if exc.ctx else "anabranch"
        sentence = exc.format_message().rstrip(".")
        if sentence:  # empty when there was no argument: the help has been printed
            sys.stderr.write(f'{where}: {sentence[:1].lower()}{sentence[1:]} (see "{where} --help")\n')
        return Exit.SETTINGS
    return int(code or Exit.DONE)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(installed_version("anabranch"))
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log at level debug.")] = False,
    log_level: Annotated[
        LogLevel, typer.Option(metavar="LEVEL", help="Write log lines from this level on: debug, info, warning, error.")
    ] = "info",
    log_format: Annotated[
        LogFormat, typer.Option(metavar="FORMAT", help="Format of log lines: text, or json, one object a line.")
    ] = "text",
) -> None:
    configure_logging(LogSettings("debug" if verbose else log_level, log_format))


@app.command(epilog="Example: anabranch demo --events 20000 --headless --report report.json")
def demo(
    events: Annotated[int | None, typer.Option(min=1, help="Stop after N events.", metavar="N")] = None,
    headless: Annotated[bool, typer.Option("--headless", help="Plain lines instead of a panel.")] = False,
    report: Annotated[Path | None, typer.Option(help="Write a JSON report at the end.", metavar="FILE")] = None,
    bootstrap: Annotated[
        str | None,
        typer.Option(
            help="Use this Kafka broker; the demo creates topics there and deletes them.", metavar="HOST:PORT"
        ),
    ] = None,
    no_baseline: Annotated[
        bool, typer.Option("--no-baseline", help="Do not run the baseline that learns without replay.")
    ] = False,
    rate: Annotated[float, typer.Option(min=1, help="Events a second.")] = 600.0,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of serving; by default 8000 or a free one.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the stream.")] = 0,
) -> int:
    """Run the whole pipeline on this machine: broker, stream, learner, serving, requests. Nothing else is needed."""

    def start() -> Exit:
        from anabranch.demo.run import Options, run_demo

        return run_demo(Options(events, headless, report, bootstrap, not no_baseline, rate, port=port, seed=seed))

    sys.stderr.write("anabranch demo: starting\n")
    return run_command(start)


@app.command(epilog="Example: anabranch up -c digits/pipeline.toml")
def up(config: ConfigPath = PIPELINE) -> int:
    """Run learner and serving in the foreground until Ctrl-C; a part that dies is started again."""

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

        return Exit(learner_main(["-c", str(config), *log_arguments()]))

    return run_command(start)


@app.command(epilog="Example: anabranch serve -c digits/pipeline.toml")
def serve(config: ConfigPath = PIPELINE) -> int:
    """Run serving alone; SIGTERM stops it after it has answered all accepted requests."""

    def start() -> Exit:
        from serving.__main__ import main as serving_main

        return Exit(serving_main(["-c", str(config), *log_arguments()]))

    return run_command(start)


@app.command(epilog="Example: anabranch produce events.jsonl --create-topic --rate 1000")
def produce(
    source: Annotated[
        Path, typer.Argument(metavar="FILE", help="JSON lines, CSV (both also as .gz) or Parquet; - is stdin.")
    ],
    config: ConfigPath = PIPELINE,
    topic: Annotated[str | None, typer.Option(help="Topic; by default the pipeline's first.")] = None,
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="Events a second; by default as fast as possible.")
    ] = None,
    create_topic: Annotated[
        bool, typer.Option("--create-topic", help="Create the topic and the dead-letter topic if they do not exist.")
    ] = False,
    partitions: Annotated[int, typer.Option(min=1, help="Partitions of a created topic.")] = 2,
    format_: Annotated[
        Literal["jsonl", "csv", "parquet"] | None,
        typer.Option(
            "--format", metavar="FORMAT", help="jsonl, csv or parquet; by default from the suffix, else jsonl."
        ),
    ] = None,
    delimiter: Annotated[
        str | None, typer.Option(metavar="CHARACTER", help="Between the cells of CSV; by default a comma.")
    ] = None,
    on_error: Annotated[
        Literal["stop", "skip"],
        typer.Option(
            metavar="WHAT",
            help="At an event that the pipeline cannot use: stop, or skip and report it; by default stop.",
        ),
    ] = "stop",
    unchecked: Annotated[
        bool, typer.Option("--unchecked", help="Send events without checking that the pipeline can use them.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Send events to the topic, and print the last offset per partition in the format of trained_through."""

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
        _report_produced(produced, as_json=as_json)
        if produced.interrupted:
            raise KeyboardInterrupt

    return run_command(start)


def _report_produced(produced: "Produced", *, as_json: bool) -> None:
    if as_json:
        document = {
            "topic": produced.topic,
            "events": produced.events,
            "last_offsets": produced.offsets(),
            "skipped": produced.skipped,
            "unknown_fields": produced.unknown_fields,
            "columns_left_out": produced.columns_left_out,
        }
        show(document, lambda: None)
        return
    if produced.columns_left_out:
        typer.echo(f"left out columns that are not in [schema]: {', '.join(produced.columns_left_out)}", err=True)
    if produced.unknown_fields:
        typer.echo(f"{produced.unknown_fields:,} events have fields that the schema does not know", err=True)
    if produced.skipped:
        typer.echo(f"left out {produced.skipped:,} events that the pipeline cannot use", err=True)
    typer.echo(f"sent {produced.events:,} events to {produced.topic}; the last offsets:", err=True)
    typer.echo(produced.offsets())


@app.command(epilog="Example: anabranch init digits && cd digits")
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write into; created if it does not exist.")],
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that exist.")] = False,
    subject: Annotated[
        str | None,
        typer.Option(
            metavar="SUBJECT", help="Subject of a Schema Registry that the fields come from, instead of the example."
        ),
    ] = None,
    registry: Annotated[
        str, typer.Option(metavar="URL", help="Address of the registry; credentials come from the environment.")
    ] = "http://localhost:8081",
    history: Annotated[
        str | None,
        typer.Option(
            metavar="GLOB",
            help="Parquet files that the fields come from, by path or URL, instead of the example.",
        ),
    ] = None,
    label: Annotated[
        str | None, typer.Option(metavar="FIELD", help="With --subject or --history: the field to predict.")
    ] = None,
    classes: Annotated[
        str | None,
        typer.Option(metavar="N|A,B", help="With --subject: the number of classes of the label, or their names."),
    ] = None,
    key: Annotated[
        str | None, typer.Option(metavar="FIELD", help="With --subject: the field that names whom an event is about.")
    ] = None,
) -> int:
    """Write an example pipeline, or one for a subject of a Schema Registry, or for Parquet files."""

    def start() -> None:
        if subject is not None:
            import os
            import shlex

            from anabranch.commands.subject.pipeline import SubjectOptions, write_subject

            options = SubjectOptions(subject, registry, label, classes, key)
            paths = write_subject(folder, options, os.environ, force=force)
            after = f'set stream.bootstrap_servers, then run "anabranch doctor -c {shlex.quote(str(paths[0]))}"'
            typer.echo(f"wrote {', '.join(path.name for path in paths)} to {folder}; {after}")
            return
        from anabranch.commands.init import NEXT_OF_HISTORY, next_commands, write_example, write_history

        remarks: list[str] = []
        if history is None and label is None:
            paths, commands = write_example(folder, force=force), next_commands(folder)
        else:
            paths, remarks = write_history(folder, history, label, force=force)
            commands = next_commands(folder, NEXT_OF_HISTORY)
        for remark in remarks:
            say(remark)
        typer.echo(f"wrote {', '.join(path.name for path in paths)} to {folder}; next:\n\n{commands}")

    return run_command(start, private=False)


@app.command(epilog="Example: anabranch status --watch")
def status(
    config: ConfigPath = PIPELINE,
    as_json: AsJson = False,
    watch: Annotated[bool, typer.Option("--watch", help="Update the screen every second, until Ctrl-C.")] = False,
    exit_code: Annotated[
        bool,
        typer.Option("--exit-code", help="Exit with 0 when healthy, 4 when unhealthy, 5 when a part is not running."),
    ] = False,
) -> int:
    """Show pipeline health, lag, throughput, accuracy and the served version."""

    def start() -> Exit | None:
        from anabranch.commands.status import read_status, render, watch_status
        from anabranch.config.loader import load_config

        pipeline = load_config(config)
        if watch and not as_json:
            watch_status(pipeline)
        state = read_status(pipeline)
        if as_json:
            typer.echo(state.to_json(), nl=False)
        elif not watch:
            show(None, lambda: render(state))
        return state.exit_code() if exit_code else None

    return run_command(start)


@app.command(epilog="Example: anabranch doctor -c digits/pipeline.toml")
def doctor(
    config: ConfigPath = PIPELINE,
    as_json: AsJson = False,
    timeout: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="Time limit of each check.")] = 30.0,
    device: Annotated[bool, typer.Option("--device", help="Try the model on its device even if in use.")] = False,
) -> int:
    """Check config, broker, model and machine, and suggest fixes. Read-only."""

    def start() -> Exit:
        from anabranch.doctor.runner import report

        return report(config.absolute(), timeout, as_json=as_json, on_device=device)

    return run_command(start)


app.command("plan", epilog="Example: anabranch plan pipeline.toml --rate 5000 --event-bytes 3000")(plan)
app.command("predict", epilog="Example: anabranch predict events.jsonl")(predict)
app.command("undo", epilog='Example: anabranch undo --offsets "payments[3]@100..200" --dry-run')(undo)
app.command("backtest", epilog="Example: anabranch backtest events.jsonl")(backtest)
_groups = {"config": config, "versions": versions, "checkpoints": checkpoints, "dead-letters": dead_letters}
for _name, _group in {**_groups, "replay": replay, "search": search}.items():
    app.add_typer(_group, name=_name)
