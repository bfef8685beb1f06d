"""`python -m serving -c pipeline.toml`: the serving daemon. Exit codes are those of `anabranch.daemon.Exit`."""

import sys
import threading
from typing import TYPE_CHECKING

from anabranch.entry import enter

if TYPE_CHECKING:
    from anabranch.config import Config


def main(arguments: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT, and return the exit code."""
    return enter("serving", "Answer requests over HTTP from the newest version.", serve_config, arguments)


def serve_config(config: "Config", stop: threading.Event) -> None:
    """Serve what the config describes until `stop` is set."""
    from ingest.schema import Schema
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
        stream_priority=pipeline.share.stream_priority,
    )
    serve(deployment, pipeline.serving, stop)


if __name__ == "__main__":
    sys.exit(main())
