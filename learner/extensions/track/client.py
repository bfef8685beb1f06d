"""`python -m anabranch.learner.extensions.track.client`: a tracker's own client, in a separate process.

Such a client bounds neither its time nor its memory, and may hang or crash. `process.py` starts this, and ends it where
a call takes too long. Each line of stdin is a call, each line of stdout its answer. It ends with stdin, as when the
learner ends.
"""

import os
import queue
import resource
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

import msgspec

from anabranch.learner.errors import TrackerError
from anabranch.learner.extensions.track.mlflow_client import MlflowClient
from anabranch.learner.extensions.track.process import ERRORS, Answer, Call, Opening
from anabranch.learner.extensions.track.run_clients import (
    TensorboardClient,
    TrackerClient,
    TrackioClient,
    WandbClient,
    brief,
)
from anabranch.learner.settings.track import TrackerKind

CLIENTS: Mapping[TrackerKind, Callable[[Opening], TrackerClient]] = {
    "tensorboard": TensorboardClient,
    "wandb": WandbClient,
    "mlflow": MlflowClient,
    "trackio": TrackioClient,
}


def main() -> NoReturn:
    """Answer calls until stdin ends."""
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin.buffer:
            lines.put(line)
        os._exit(0)  # perhaps during a request

    # What the client prints is no answer.
    answers = os.fdopen(os.dup(1), "wb", 0)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    threading.Thread(target=read, name="stdin", daemon=True).start()
    client: TrackerClient | None = None
    while True:
        call = msgspec.json.decode(lines.get(), type=Opening | Call)
        try:
            if isinstance(call, Opening):
                client = CLIENTS[call.settings["kind"]](call)
                if client.longest_answers is not None:
                    _bound_memory(client.longest_answers)
                answer = Answer()
            else:
                assert client is not None
                answer = Answer(_result(client, call))
        except tuple(ERRORS.values()) as exc:
            answer = Answer(error=str(exc), kind=type(exc).__name__)
        answers.write(msgspec.json.encode(answer) + b"\n")


def _result(client: TrackerClient, call: Call) -> str | None:
    """Call a method; a tracker raises anything, which is a TrackerError here."""
    try:
        result: str | None = getattr(client, call.method)(*call.arguments())
    except tuple(ERRORS.values()):
        raise
    except Exception as exc:
        raise TrackerError(f"curves cannot be sent to [track]: {brief(exc)}") from exc
    return result


def _bound_memory(most_bytes: int) -> None:
    """Let this process take no more than some memory beyond that which it has, where the system can bound it."""
    if sys.platform == "linux":
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        most = taken + most_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


if __name__ == "__main__":
    main()
