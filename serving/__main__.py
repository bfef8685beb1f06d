"""`python -m serving -c pipeline.toml`: the serving daemon. Exit codes are those of `anabranch.daemon.Exit`."""

import argparse
import sys
from pathlib import Path

from anabranch.intruders import refuse_intruders


def main(arguments: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m serving", description="Answer requests over HTTP from the newest version."
    )
    parser.add_argument("-c", "--config", type=Path, default=Path("pipeline.toml"), help="the pipeline's settings")
    parser.add_argument("--supervised", action="store_true", help="stop when stdin ends")
    options = parser.parse_args(arguments)
    refuse_intruders()
    from anabranch.daemon import run  # not before, since it imports packages whose place an intruder may have taken

    return run(lambda: serve_config(options.config, supervised=options.supervised))


def serve_config(path: Path, *, supervised: bool = False) -> None:
    """Serve what `path` describes until a signal, or with `supervised` the end of stdin, stops it."""
    from anabranch.config import load_config
    from anabranch.daemon import configure_logging, stop_on_signals, stop_with_parent

    config = load_config(path)
    configure_logging()
    with stop_on_signals() as stop:
        if supervised:
            stop_with_parent(stop)
        from ingest.schema import Schema  # not before: torch takes seconds, in which a signal is to be noticed
        from serving.served import Deployment, pick_device
        from serving.server import serve

        pipeline = config.pipeline
        deployment = Deployment(
            name=pipeline.name,
            schema=Schema(pipeline.events),
            model=pipeline.model,
            folder=config.folder,
            state_dir=config.state_dir,
            device=pick_device(pipeline.serving.device),
        )
        serve(deployment, pipeline.serving, stop)


if __name__ == "__main__":
    sys.exit(main())
