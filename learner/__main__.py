"""`python -m learner -c pipeline.toml`: the learner by itself. Exit codes are those of `anabranch.daemon.Exit`."""

import argparse
import sys
from pathlib import Path

from anabranch.intruders import refuse_intruders


def main(arguments: list[str] | None = None) -> int:
    """Learn until SIGTERM or SIGINT, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m learner", description="Learn from the stream and publish versions."
    )
    parser.add_argument("-c", "--config", type=Path, default=Path("pipeline.toml"), help="the pipeline's settings")
    parser.add_argument("--supervised", action="store_true", help="stop when stdin ends")
    options = parser.parse_args(arguments)
    refuse_intruders()
    from anabranch.daemon import run  # not before, since it imports packages whose place an intruder may have taken

    return run(lambda: learn_config(options.config, supervised=options.supervised))


def learn_config(path: Path, *, supervised: bool = False) -> None:
    """Learn what `path` describes until a signal, or with `supervised` the end of stdin, stops it."""
    from anabranch.config import load_config
    from anabranch.daemon import configure_logging, stop_on_signals, stop_with_parent

    config = load_config(path)
    configure_logging()
    with stop_on_signals() as stop:
        if supervised:
            stop_with_parent(stop)
        from learner.session import Deployment, learn  # not before: torch takes seconds, and a signal is to be noticed

        pipeline = config.pipeline
        deployment = Deployment(
            stream=pipeline.stream,
            events=pipeline.events,
            model=pipeline.model,
            learner=pipeline.learner,
            replay=pipeline.replay,
            versions=pipeline.versions,
            cuts=pipeline.cuts,
            gate=pipeline.gate,
            seed=pipeline.seed,
            folder=config.folder,
            state_dir=config.state_dir,
            read_token=pipeline.serving.tokens.read.get_secret_value(),
        )
        learn(deployment, stop)


if __name__ == "__main__":
    sys.exit(main())
