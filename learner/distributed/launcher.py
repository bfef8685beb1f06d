"""Starts the ranks of a learner under torch's elastic agent, which is what torchrun runs.

When a rank dies the agent ends the others of this host, and all are started again, a few times; they go on from the
newest checkpoint. So are they when a host is gone, or comes, and when a rank runs out of memory: those of its host then
take fewer events at once. The agent runs in a thread: a signal is for the launcher, which then writes into the pipe
that is stdin of every rank: rank 0 stops in order, and tells the others. Where the pipe ends without a word the
launcher was killed, and all ranks end at once, as it did: whoever starts it again finds none of them in the way.
"""

import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from learner.config import LearnerSettings
from learner.distributed.membership import Round
from learner.distributed.process_group import Meeting, Place
from learner.distributed.rendezvous import Change, Hosts

_RESTARTS = 3
_IN_A_ROW = timedelta(minutes=10)
"""Ranks that have lived for so long have not died in a row with those before them."""
_NOWHERE = "127.0.0.1"
"""The agent wants an address at which ranks may meet; they meet elsewhere."""
_LOOK_SECONDS = 0.1
_BEYOND_STOP_TIMEOUT = timedelta(seconds=3)
_PATIENCE = timedelta(seconds=10)
"""In which ranks see for themselves that others are gone."""
_ENOUGH = 4096
_MEETING = "meeting"
_SEAT = "seat.json"
_LOGS = "logs"
_ROWS = "rows-"
"""What the files begin with in which ranks leave word of how many events may fit."""
OUTCOME = "outcome"
REFUSED = frozenset({2, 3})
"""Exit codes that starting again cannot fix."""

log = logging.getLogger(__name__)


class _End(NamedTuple):
    """How a round ended on this host."""

    code: int | None
    """Which rank 0 left, or one that refused; None: there is none, or ranks died."""
    change: Change
    """What ended it, if not a rank."""
    over: bool
    """Whether no rank is left."""
    rows: int | None
    """Events that may fit where a rank ran out of memory; None: none did."""


def launch(settings: LearnerSettings, hosts: Hosts, command: Sequence[str], stop: threading.Event) -> int | None:
    """Run the ranks of this host, each as `command --group FOLDER`, until they end by themselves or `stop` is set.

    Returns:
        The exit code that a rank left in the folder; None when none did, or ranks died too often.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // settings.replicas)))
    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
    deaths, died_in, rows = 0, None, None
    while (dealt := hosts.gather(stop)) is not None:
        # Where another host was gone by then they died of that; where one ran out of memory it takes fewer events now.
        deaths += died_in is not None and _all_there(died_in, dealt) and died_in.name not in hosts.ran_out
        if deaths > _RESTARTS:
            log.error("ranks have died %d times in a row", deaths)
            hosts.over(ran_out=False)
            return None
        began, died_in = time.monotonic(), None
        end = _run(settings, hosts, _seat(settings, dealt, rows), command, stop)
        if stop.is_set() or end.code in REFUSED or not end.over:
            return end.code
        hosts.over(ran_out=end.rows is not None)
        rows = end.rows or rows
        if not hosts.leads or end.rows is not None:
            continue
        if time.monotonic() - began >= _IN_A_ROW.total_seconds():
            deaths = 0
        if end.change is Change.LOST:
            continue
        if end.code is None:
            died_in = dealt
        elif end.change is Change.NONE:
            return end.code
    return 0


def _all_there(before: Round, now: Round) -> bool:
    """Whether the launchers that had a seat have one again."""
    return {seat.id for seat in before.seats.values()} <= {seat.id for seat in now.seats.values()}


def _run(
    settings: LearnerSettings, hosts: Hosts, seat: Mapping[str, Any], command: Sequence[str], stop: threading.Event
) -> _End:
    """Run the ranks of this host for one round."""
    change, stop_timeout = Change.NONE, settings.stop_timeout
    with tempfile.TemporaryDirectory(prefix="anabranch-") as name:
        folder = Path(name)
        (folder / _SEAT).write_text(json.dumps(seat))
        with _Lifeline() as lifeline:
            agent = _Agent(settings.replicas, (*command, "--group", name), stop_timeout, folder / _LOGS)
            agent.start()
            # A rank that refuses to go on ends all: others may wait for it, and would be started again.
            while agent.is_alive() and read_outcome(folder) not in REFUSED and not stop.wait(_LOOK_SECONDS):
                change = hosts.change()
                if change is not Change.NONE:
                    break
            if stop.is_set():
                hosts.leave()
            gone = change in (Change.LOST, Change.DIED)
            if not gone:
                lifeline.say_stop()
            patience = _PATIENCE if gone else stop_timeout + _BEYOND_STOP_TIMEOUT
            agent.join(patience.total_seconds())
        agent.join(_PATIENCE.total_seconds())  # what was left of them ended with the pipe
        code = None if agent.is_alive() else read_outcome(folder)
        code = code if code or not agent.failed else None
        return _End(code, change, not agent.is_alive(), _left_rows(folder))


def _seat(settings: LearnerSettings, dealt: Round, rows: int | None) -> dict[str, Any]:
    """Return what the ranks of this host are to know of their place among all."""
    absent = [host for host in range(settings.hosts) if host not in dealt.seats]
    return {
        "name": dealt.name,
        "size": dealt.size,
        "first": dealt.seats[settings.host_rank].first,
        "absent": absent,
        "readers": [each.reads_at for each in dealt.seats.values() if each.reads_at],
        "rows": rows,
    }


def take_place(folder: Path, settings: LearnerSettings) -> Place:
    """Return the place of this rank, which torch's agent tells its number on this host."""
    seat = json.loads((folder / _SEAT).read_text())
    meeting: Path | Meeting = folder / _MEETING
    if settings.hosts > 1:
        assert settings.rendezvous is not None
        assert settings.interface is not None
        meeting = Meeting(settings.rendezvous, seat["name"], settings.interface)
    first = int(seat["first"])
    absent, readers = (tuple(seat[name]) for name in ("absent", "readers"))
    return Place(first + int(os.environ["RANK"]), seat["size"], meeting, first, absent, readers, seat["rows"])


def leave_rows(folder: Path, rows: int) -> None:
    """Leave word for the launcher of how many events may fit, where so many more did not."""
    (folder / f"{_ROWS}{os.environ['RANK']}").write_text(str(rows))


def _left_rows(folder: Path) -> int | None:
    """Return what ranks left, the least; None: nothing."""
    return min((int(path.read_text()) for path in folder.glob(f"{_ROWS}*")), default=None)


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
    """Where the agents of all hosts would meet: each knows of none but itself, since the launchers meet.

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

    def __init__(self, ranks: int, command: Sequence[str], stop_timeout: timedelta, logs: Path) -> None:
        """`logs`: where the agent makes folders for each rank, which it never deletes."""
        super().__init__(name="ranks", daemon=True)
        program, *arguments = command
        spec = WorkerSpec(
            role="rank",
            local_world_size=ranks,
            rdzv_handler=_Rendezvous(),
            entrypoint=program,
            args=tuple(arguments),
            max_restarts=0,
            master_addr=_NOWHERE,
        )
        self._agent = LocalElasticAgent(
            spec, DefaultLogsSpecs(str(logs)), shutdown_timeout=int(stop_timeout.total_seconds()) + 1
        )
        self.failed = True

    def run(self) -> None:
        """Start the ranks; end when all have ended well, or one has died."""
        result = self._agent.run()
        self.failed = result.is_failed()
        for rank, failure in result.failures.items():
            log.error("rank %d of this host ended with %d", rank, failure.exitcode)
