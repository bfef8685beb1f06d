"""Starts the ranks of a learner under torch's elastic agent, which is what torchrun runs.

When a rank dies, all ranks of this host end, and the launcher starts all again, a few times; they resume from the
newest checkpoint. It also restarts them when a host is lost or comes, and when a rank runs out of memory where it
cannot repeat the step: the ranks of its host then take smaller micro-batches.

The agent runs in a thread. On a signal the launcher writes into the pipe that is stdin of every rank: rank 0 stops in
order and stops the other ranks. When the pipe ends without a byte, the launcher was killed or another rank has died,
and the rank ends at once, whatever it waits for: NCCL's kernels wait without end for a rank that is gone, and no signal
handler of Python runs meanwhile.
"""

import json
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from torch.numa.binding import AffinityMode, NumaOptions
from typing_extensions import override

from learner.config import LearnerSettings
from learner.distributed.hosts import Hosts, MembershipChange
from learner.distributed.membership import MembershipRound
from learner.distributed.process_group import RankAssignment, RendezvousAddress

_RESTARTS = 3
_IN_A_ROW = timedelta(minutes=10)
"""A round that lasted so long resets the count of deaths in a row."""
_NOWHERE = "127.0.0.1"
"""A placeholder for the agent's rendezvous address: ranks connect elsewhere."""
_POLL_SECONDS = 0.1
_BEYOND_STOP_TIMEOUT = timedelta(seconds=3)
_NOTICE_TIMEOUT = timedelta(seconds=1)
"""How long ranks may take to notice by themselves that others are gone, and to log it."""
_EXIT_TIMEOUT = timedelta(seconds=10)
"""How long ranks may take to end once the pipe has."""
_STOP_BYTES = 4096
_RENDEZVOUS = "rendezvous"
_RANK_SETTINGS = "rank_settings.json"
_LOGS = "logs"
_ROWS = "rows-"
"""Prefix of the files in which ranks write how many events may fit."""
OUTCOME = "outcome"
REFUSED = frozenset({2, 3})
"""Exit codes that starting again cannot fix."""

log = logging.getLogger(__name__)


class _RoundResult(NamedTuple):
    """How a round ended on this host."""

    code: int | None
    """The exit code of rank 0, or of a rank that refused to start; None: there is none, or ranks died."""
    change: MembershipChange
    """Why the round ended, if not by a rank of this host."""
    over: bool
    """Whether all ranks have ended."""
    rows: int | None
    """Events that may fit, after a rank ran out of memory; None when none did."""


def launch(settings: LearnerSettings, hosts: Hosts, command: Sequence[str], stop: threading.Event) -> int | None:
    """Run the ranks of this host, each as `command --group FOLDER`, until they end by themselves or `stop` is set.

    Returns:
        The exit code that a rank left in the folder; None when none did, or ranks died too often.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // settings.replicas)))
    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
    deaths, died_in, rows = 0, None, None
    while (current_round := hosts.next_round(stop)) is not None:
        # Does not count if another host was gone (the cause), or ran out of memory (it takes fewer events now).
        deaths += died_in is not None and _all_there(died_in, current_round) and died_in.name not in hosts.ran_out
        if deaths > _RESTARTS:
            log.error("ranks have died %d times in a row", deaths)
            hosts.round_ended(ran_out=False)
            return None
        began, died_in = time.monotonic(), None
        end = _run(settings, hosts, _rank_settings(settings, current_round, rows), command, stop)
        if stop.is_set() or end.code in REFUSED or not end.over:
            return end.code
        hosts.round_ended(ran_out=end.rows is not None)
        rows = end.rows or rows
        if not hosts.leads or end.rows is not None:
            continue
        if time.monotonic() - began >= _IN_A_ROW.total_seconds():
            deaths = 0
        if end.change is MembershipChange.LOST:
            continue
        if end.code is None:
            died_in = current_round
        elif end.change is MembershipChange.NONE:
            return end.code
    return 0


def _all_there(before: MembershipRound, now: MembershipRound) -> bool:
    """Return whether all launchers of the earlier round are in this one."""
    earlier, later = ({host.id for host in one.assignments.values()} for one in (before, now))
    return earlier <= later


def _run(
    settings: LearnerSettings,
    hosts: Hosts,
    rank_settings: Mapping[str, Any],
    command: Sequence[str],
    stop: threading.Event,
) -> _RoundResult:
    """Run the ranks of this host for one round, and return how it ended."""
    change, stop_timeout = MembershipChange.NONE, settings.stop_timeout
    with tempfile.TemporaryDirectory(prefix="anabranch-") as name:
        folder = Path(name)
        (folder / _RANK_SETTINGS).write_text(json.dumps(rank_settings))
        with _Lifeline() as lifeline:
            agent = _Agent(settings.replicas, (*command, "--group", name), stop_timeout, folder / _LOGS)
            agent.start()
            # A rank that refuses ends all: others may wait for it, and would be started again.
            while agent.runs and read_outcome(folder) not in REFUSED and not stop.wait(_POLL_SECONDS):
                change = hosts.poll()
                if change is not MembershipChange.NONE:
                    break
            if stop.is_set():
                hosts.leave()
            gone = agent.rank_died.is_set() or change in (MembershipChange.LOST, MembershipChange.DIED)
            if not gone:
                lifeline.send_stop()
            agent.join((_NOTICE_TIMEOUT if gone else stop_timeout + _BEYOND_STOP_TIMEOUT).total_seconds())
        agent.join(_EXIT_TIMEOUT.total_seconds())  # ranks that were left ended with the pipe
        code = None if agent.is_alive() else read_outcome(folder)
        code = code if code or not agent.failed else None
        return _RoundResult(code, change, not agent.is_alive(), _read_rows(folder))


def _rank_settings(settings: LearnerSettings, current_round: MembershipRound, rows: int | None) -> dict[str, Any]:
    """Return the settings of this host's ranks in a round."""
    absent = [host for host in range(settings.hosts) if host not in current_round.assignments]
    return {
        "name": current_round.name,
        "size": current_round.size,
        "first": current_round.assignments[settings.host_rank].first,
        "absent": absent,
        "readers": [assignment.reads_at for assignment in current_round.assignments.values() if assignment.reads_at],
        "rows": rows,
    }


def read_assignment(folder: Path, settings: LearnerSettings) -> RankAssignment:
    """Return the assignment of this rank; torch's agent sets its number on this host as `RANK`."""
    rank_settings = json.loads((folder / _RANK_SETTINGS).read_text())
    rendezvous: Path | RendezvousAddress = folder / _RENDEZVOUS
    if settings.hosts > 1:
        assert settings.rendezvous is not None
        assert settings.interface is not None
        rendezvous = RendezvousAddress(settings.rendezvous, rank_settings["name"], settings.interface)
    first = int(rank_settings["first"])
    absent, readers = (tuple(rank_settings[name]) for name in ("absent", "readers"))
    return RankAssignment(
        first + int(os.environ["RANK"]),
        rank_settings["size"],
        rendezvous,
        first,
        absent,
        readers,
        rank_settings["rows"],
    )


def leave_rows(folder: Path, rows: int) -> None:
    """Write for the launcher how many events may fit, after a rank ran out of memory."""
    (folder / f"{_ROWS}{os.environ['RANK']}").write_text(str(rows))


def _read_rows(folder: Path) -> int | None:
    """Return the smallest number that a rank wrote with `leave_rows`; None when none did."""
    return min((int(path.read_text()) for path in folder.glob(f"{_ROWS}*")), default=None)


def write_outcome(folder: Path, code: int) -> None:
    """Write an exit code for the launcher: the agent reports only whether all ranks ended with 0."""
    (folder / OUTCOME).write_text(str(code))


def read_outcome(folder: Path) -> int | None:
    """Return the exit code that was written last; None when there is none."""
    try:
        return int((folder / OUTCOME).read_text())
    except FileNotFoundError:
        return None


def stop_with_launcher(stop: threading.Event) -> None:
    """Set `stop` when the launcher sends a byte, and end this process when the pipe ends. Called by every rank."""

    def watch() -> None:
        if not os.read(0, 1):
            os._exit(1)
        stop.set()

    threading.Thread(target=watch, name="stop-with-launcher", daemon=True).start()


class _Lifeline:
    """A pipe that replaces stdin, for children to read."""

    def __enter__(self) -> "_Lifeline":
        self._before = os.dup(0)
        reading, self._writing = os.pipe()
        os.dup2(reading, 0)
        os.close(reading)
        return self

    def send_stop(self) -> None:
        """Write a byte for each rank, including ranks that the agent may still start."""
        os.write(self._writing, bytes(_STOP_BYTES))

    def __exit__(self, *_: object) -> None:
        os.close(self._writing)
        os.dup2(self._before, 0)
        os.close(self._before)


class _Rendezvous(RendezvousHandler):
    """The agent's rendezvous, of one host alone: the launchers connect the hosts.

    Torch's own rendezvous listens on every interface, and unpickles the data it receives there.
    """

    def get_backend(self) -> str:
        """Return the name of this rendezvous."""
        return "anabranch"

    def next_rendezvous(self) -> RendezvousInfo:
        """Return a rendezvous with one agent, of rank 0."""
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(_NOWHERE, 0))

    def is_closed(self) -> bool:
        """Return False: it is never closed."""
        return False

    def set_closed(self) -> None:
        """Do nothing."""

    def num_nodes_waiting(self) -> int:
        """Return 0: no other agent ever waits."""
        return 0

    def get_run_id(self) -> str:
        """Return a name that is unique to this launcher."""
        return f"anabranch-{os.getpid()}"

    def shutdown(self) -> bool:
        """Return True: there is nothing to shut down."""
        return True


class _WatchingAgent(LocalElasticAgent):
    """Torch's agent, which sets an event as soon as a rank has died; after that it waits half a minute for the rest."""

    def __init__(self, rank_died: threading.Event, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._rank_died = rank_died

    @override
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        if any(handler.proc.poll() for handler in handlers.values()):
            self._rank_died.set()
        result: RunResult = super()._monitor_workers(worker_group)
        return result


class _Agent(threading.Thread):
    """Torch's agent for one host."""

    def __init__(self, ranks: int, command: Sequence[str], stop_timeout: timedelta, logs: Path) -> None:
        """Take `logs`, the folder in which the agent makes one folder per rank and never deletes it."""
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
            numa_options=numa_options(),
        )
        self.rank_died = threading.Event()
        self._agent = _WatchingAgent(
            self.rank_died,
            spec,
            DefaultLogsSpecs(str(logs)),
            shutdown_timeout=int(stop_timeout.total_seconds()) + 1,
        )
        self.failed = True

    @property
    def runs(self) -> bool:
        """Whether all ranks that have ended have ended well, and some have not."""
        return self.is_alive() and not self.rank_died.is_set()

    def run(self) -> None:
        """Start the ranks; end when all have ended well, or one has died."""
        result = self._agent.run()
        self.failed = result.is_failed()
        for rank, failure in result.failures.items():
            log.error("rank %d of this host ended with %d", rank, failure.exitcode)


def numa_options() -> NumaOptions | None:
    """Return options that bind each rank to the processors near its GPU, where there are GPUs and `numactl`."""
    if not (torch.cuda.is_available() and shutil.which("numactl")):
        return None
    return NumaOptions(AffinityMode.NODE, should_fall_back_if_binding_fails=True)
