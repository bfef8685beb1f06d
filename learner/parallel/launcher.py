"""Starts the ranks of a learner under torch's elastic agent, which is what torchrun runs.

When a rank dies, all end, and the launcher starts all again, a few times; they resume from the newest checkpoint. It
also restarts them when a rank runs out of memory where it cannot repeat the step: all then take smaller micro-batches.

The agent runs in a thread. On a signal the launcher writes into the pipe that is stdin of every rank: rank 0 stops in
order and stops the other ranks. When the pipe ends without a byte, the launcher was killed or another rank has died,
and the rank ends at once, whatever it waits for: NCCL's kernels wait without end for a rank that is gone, and no signal
handler of Python runs meanwhile.
"""

import logging
import os
import shutil
import threading
import time
from collections.abc import Sequence
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

from anabranch.core.temporary_files import temporary_folder
from anabranch.learner.parallel.process_group import RankAssignment
from anabranch.learner.settings.learner import LearnerSettings

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
_LOGS = "logs"
_ROWS = "rows"
"""The file with the largest micro-batch of the ranks; `rows-<rank>` is what a rank wrote."""
OUTCOME = "outcome"
REFUSED = frozenset({2, 3})
"""Exit codes that starting again cannot fix."""

log = logging.getLogger(__name__)


class _RoundResult(NamedTuple):
    """How a round ended."""

    code: int | None
    """The exit code of rank 0, or of a rank that refused to start; None: there is none, or ranks died."""
    over: bool
    """Whether all ranks have ended."""
    rows: int | None
    """Events that may fit, after a rank ran out of memory; None when none did."""


def launch(settings: LearnerSettings, command: Sequence[str], stop: threading.Event) -> int | None:
    """Run the ranks, each as `command --group FOLDER`, until they end by themselves or `stop` is set.

    Returns:
        The exit code that a rank left in the folder; None when none did, or ranks died too often.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // settings.replicas)))
    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
    deaths, rows = 0, None
    while not stop.is_set():
        began = time.monotonic()
        end = _run(settings, rows, command, stop)
        if stop.is_set() or end.code in REFUSED or not end.over:
            return end.code
        if end.rows is not None:
            rows = end.rows
            continue
        if end.code is not None:
            return end.code
        deaths = 1 if time.monotonic() - began >= _IN_A_ROW.total_seconds() else deaths + 1
        if deaths > _RESTARTS:
            log.error("ranks have died %d times in a row", deaths)
            return None
    return 0


def _run(settings: LearnerSettings, rows: int | None, command: Sequence[str], stop: threading.Event) -> _RoundResult:
    """Run the ranks for one round, with micro-batches of `rows` events at most, and return how it ended."""
    stop_timeout = settings.stop_timeout
    with temporary_folder("anabranch-ranks-") as folder:
        if rows is not None:
            (folder / _ROWS).write_text(str(rows))
        with _Lifeline() as lifeline:
            agent = _Agent(settings.replicas, (*command, "--group", str(folder)), stop_timeout, folder / _LOGS)
            agent.start()
            # A rank that refuses ends all: others may wait for it, and would be started again.
            while agent.runs and read_outcome(folder) not in REFUSED and not stop.wait(_POLL_SECONDS):
                pass
            gone = agent.rank_died.is_set()
            if not gone:
                lifeline.send_stop()
            agent.join((_NOTICE_TIMEOUT if gone else stop_timeout + _BEYOND_STOP_TIMEOUT).total_seconds())
        agent.join(_EXIT_TIMEOUT.total_seconds())  # ranks that were left ended with the pipe
        code = None if agent.is_alive() else read_outcome(folder)
        code = code if code or not agent.failed else None
        return _RoundResult(code, not agent.is_alive(), _read_rows(folder))


def read_assignment(folder: Path, settings: LearnerSettings) -> RankAssignment:
    """Return the assignment of this rank; torch's agent sets its number as `RANK`."""
    rows = int(path.read_text()) if (path := folder / _ROWS).exists() else None
    return RankAssignment(int(os.environ["RANK"]), settings.replicas, folder / _RENDEZVOUS, rows=rows)


def leave_rows(folder: Path, rows: int) -> None:
    """Write for the launcher how many events may fit, after a rank ran out of memory."""
    (folder / f"{_ROWS}-{os.environ['RANK']}").write_text(str(rows))


def _read_rows(folder: Path) -> int | None:
    """Return the smallest number that a rank wrote with `leave_rows`; None when none did."""
    texts = (path.read_text() for path in folder.glob(f"{_ROWS}-*"))
    return min((int(text) for text in texts if text), default=None)  # empty: the rank was killed before it wrote


def write_outcome(folder: Path, code: int) -> None:
    """Write an exit code for the launcher: the agent reports only whether all ranks ended with 0."""
    (folder / OUTCOME).write_text(str(code))


def read_outcome(folder: Path) -> int | None:
    """Return the exit code that was written last; None when there is none, or a rank is about to write it."""
    try:
        text = (folder / OUTCOME).read_text()
    except FileNotFoundError:
        return None
    return int(text) if text else None


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
    """The agent's rendezvous, of one host alone: those of torch listen on every interface."""

    @override
    def get_backend(self) -> str:
        return "anabranch"

    @override
    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(_NOWHERE, 0))

    @override
    def is_closed(self) -> bool:
        return False

    @override
    def set_closed(self) -> None:
        pass

    @override
    def num_nodes_waiting(self) -> int:
        return 0

    @override
    def get_run_id(self) -> str:
        return f"anabranch-{os.getpid()}"

    @override
    def shutdown(self) -> bool:
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
    """Torch's agent in a thread."""

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
