"""`python -m learner -c pipeline.toml`: the learner by itself. Exit codes are those of `anabranch.daemon.Exit`.

With `learner.replicas` it launches so many ranks of itself, each of which is told the folder where they meet.
"""

import argparse
import logging
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from anabranch.entry import enter

if TYPE_CHECKING:
    from anabranch.config import Config
    from learner.session import Deployment

log = logging.getLogger("learner")


def main(arguments: list[str] | None = None) -> int:
    """Learn until SIGTERM or SIGINT, and return the exit code."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--group", type=Path)
    options, others = parser.parse_known_args(sys.argv[1:] if arguments is None else arguments)
    if options.group is not None:
        return _rank(options.group, others)
    codes: list[int | None] = []

    def learn_or_launch(config: "Config", stop: threading.Event) -> None:
        if config.pipeline.learner.replicas == 1:
            codes.append(0)
            learn_config(config, stop)
        else:
            codes.append(_launch(config, stop))

    code = enter("learner", "Learn from the stream, and publish versions.", learn_or_launch, others)
    return code or (codes[0] if codes and codes[0] is not None else 1)


def learn_config(config: "Config", stop: threading.Event) -> None:
    """Learn what the config describes until `stop` is set."""
    from learner.session import learn

    learn(_deployment(config), stop)


def _launch(config: "Config", stop: threading.Event) -> int | None:
    """Run all ranks; return the exit code that rank 0 has told."""
    from learner.launcher import launch

    settings = config.pipeline.learner
    command = (sys.executable, "-P", "-m", "learner", "-c", str(config.path))
    return launch(settings.replicas, command, stop, settings.stop_timeout)


def _rank(group: Path, arguments: list[str]) -> int:
    """Be the rank that the agent's environment says, and return the exit code by which the agent restarts or not."""
    from learner.launcher import MEETING, REFUSED, stop_with_launcher, write_outcome
    from learner.replicas import Place

    rank, starts = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
    place = Place(rank, int(os.environ["WORLD_SIZE"]), group / f"{MEETING}-{starts}")

    def learn_in_group(config: "Config", stop: threading.Event) -> None:
        from learner.errors import RankLostError
        from learner.replica import follow_leader
        from learner.session import learn

        stop_with_launcher(stop)
        try:
            (learn if rank == 0 else follow_leader)(_deployment(config), stop, place)
        except RankLostError as exc:
            log.error("rank %d ends: %s", rank, exc)  # noqa: TRY400 the sentence says all
            sys.exit(1)

    code = enter("learner", "One rank of a learner.", learn_in_group, arguments)
    if rank == 0 or code in REFUSED:
        write_outcome(group, code)
    return 0 if code in REFUSED else code


def _deployment(config: "Config") -> "Deployment":
    from learner.session import Deployment
    from learner.sharing import Terms

    pipeline = config.pipeline
    return Deployment(
        name=pipeline.name,
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
        share=Terms(
            *(pipeline.share, pipeline.serving.slo, pipeline.serving.timeout), fixed=pipeline.learner.deterministic
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
