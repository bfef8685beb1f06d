"""Starts the ranks of a learner under torch's elastic agent, which is what torchrun runs.

The agent starts all ranks again when one dies, a few times; they go on from the newest cut. It runs in a thread: a
signal is for the launcher, which then writes into the pipe that is stdin of every rank: rank 0 stops in order, and
tells the others. Where the pipe ends without a word the launcher was killed, and all ranks end at once, as it did:
whoever starts it again finds none of them in the way.
"""

import logging
import os
import tempfile
import threading
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

_RESTARTS = 3
_NOWHERE = "127.0.0.1"
"""The agent wants an address at which ranks may meet; they meet at a file."""
_LOOK_SECONDS = 0.1
_BEYOND_STOP_TIMEOUT = timedelta(seconds=3)
_ENOUGH = 4096
MEETING = "meeting"
OUTCOME = "outcome"
REFUSED = frozenset({2, 3})
"""Exit codes that starting again cannot mend."""

log = logging.getLogger(__name__)


def launch(ranks: int, command: Sequence[str], stop: threading.Event, stop_timeout: timedelta) -> int | None:
    """Run N ranks of `command --group FOLDER` until they end by themselves, or `stop` is set.

    Returns:
        The exit code that a rank left in the folder; None when none did, or ranks died too often.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="anabranch-") as folder, _Lifeline() as lifeline:
        agent = _Agent(ranks, (*command, "--group", folder), stop_timeout)
        agent.start()
        while agent.is_alive() and not stop.wait(_LOOK_SECONDS) and read_outcome(Path(folder)) not in REFUSED:
            pass  # a rank that refuses to go on ends all: others may wait for it, and would be started again
        lifeline.say_stop()
        agent.join((stop_timeout + _BEYOND_STOP_TIMEOUT).total_seconds())
        code = None if agent.is_alive() else read_outcome(Path(folder))
        return code if code or not agent.failed else None


def write_outcome(folder: Path, code: int) -> None:
    """Leave an exit code for the launcher: the agent tells only whether all ranks ended with 0."""
    (folder / OUTCOME).write_text(str(code))


def read_outcome(folder: Path) -> int | None:
    """Return the exit code that was left last; None: there is none."""
    try:
        return int((folder / OUTCOME).read_text())
    except FileNotFoundError:
        return None


def stop_with_launcher(stop: threading.Event) -> None:
    """Set `stop` when the launcher says so, and end this process when it is gone. Called by every rank."""

    def watch() -> None:
        if not os.read(0, 1):
            os._exit(1)
        stop.set()

    threading.Thread(target=watch, name="stop-with-launcher", daemon=True).start()


class _Lifeline:
    """A pipe that takes the place of stdin, for children to read."""

    def __enter__(self) -> "_Lifeline":
        self._before = os.dup(0)
        reading, self._writing = os.pipe()
        os.dup2(reading, 0)
        os.close(reading)
        return self

    def say_stop(self) -> None:
        """Leave a byte for each rank, those included that the agent may start yet."""
        os.write(self._writing, bytes(_ENOUGH))

    def __exit__(self, *_: object) -> None:
        os.close(self._writing)
        os.dup2(self._before, 0)
        os.close(self._before)


class _Rendezvous(RendezvousHandler):
    """Where the agents of all hosts would meet, of which there is one.

    Torch's own listens on every interface, and unpickles what it is told there.
    """

    def get_backend(self) -> str:
        """Name it."""
        return "anabranch"

    def next_rendezvous(self) -> RendezvousInfo:
        """Be the first and only one."""
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(_NOWHERE, 0))

    def is_closed(self) -> bool:
        """Never."""
        return False

    def set_closed(self) -> None:
        """Nothing to close."""

    def num_nodes_waiting(self) -> int:
        """Nobody."""
        return 0

    def get_run_id(self) -> str:
        """Tell this launcher from others."""
        return f"anabranch-{os.getpid()}"

    def shutdown(self) -> bool:
        """Nothing to end."""
        return True


class _Agent(threading.Thread):
    """Torch's agent for one host."""

    def __init__(self, ranks: int, command: Sequence[str], stop_timeout: timedelta) -> None:
        super().__init__(name="ranks", daemon=True)
        program, *arguments = command
        spec = WorkerSpec(
            role="rank",
            local_world_size=ranks,
            rdzv_handler=_Rendezvous(),
            entrypoint=program,
            args=tuple(arguments),
            max_restarts=_RESTARTS,
            master_addr=_NOWHERE,
        )
        self._agent = LocalElasticAgent(
            spec, DefaultLogsSpecs(), shutdown_timeout=int(stop_timeout.total_seconds()) + 1
        )
        self.failed = True

    def run(self) -> None:
        """Start the ranks, and again when one dies; end when all have ended well, or died too often."""
        result = self._agent.run()
        self.failed = result.is_failed()
        for rank, failure in result.failures.items():
            log.error("rank %d ended with %d after the last of %d starts", rank, failure.exitcode, _RESTARTS + 1)
