"""`python -m learner -c pipeline.toml`: the learner by itself. Exit codes are those of `anabranch.daemon.Exit`."""

import sys
import threading
from typing import TYPE_CHECKING

from anabranch.entry import enter

if TYPE_CHECKING:
    from anabranch.config import Config


def main(arguments: list[str] | None = None) -> int:
    """Learn until SIGTERM or SIGINT, and return the exit code."""
    return enter("learner", "Learn from the stream, and publish versions.", learn_config, arguments)


def learn_config(config: "Config", stop: threading.Event) -> None:
    """Learn what the config describes until `stop` is set."""
    from learner.session import Deployment, learn

    pipeline = config.pipeline
    deployment = Deployment(
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
    )
    learn(deployment, stop)


if __name__ == "__main__":
    sys.exit(main())
