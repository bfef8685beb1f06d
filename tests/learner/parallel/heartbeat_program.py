"""A rank that only takes part in the heartbeat: `FOLDER`, under torchrun, or `FOLDER RANK SIZE`.

It writes its process id to `FOLDER/joined-<rank>`, and waits in C, where no signal reaches it, as ranks wait for a
kernel of NCCL. With `SEES_STOP` it waits until a rank was stopped instead, and writes to `FOLDER/stopped-<rank>`
whether it was another one. `FOLDER/stop-<rank>` stops it. `SILENT_SECONDS` and `JOIN_SECONDS` are its time-outs.
"""

import ctypes
import os
import signal
import sys
import threading
from datetime import timedelta
from pathlib import Path

import torch

from anabranch.learner.parallel import torchrun
from anabranch.learner.parallel.process_group import RankAssignment, join_group
from anabranch.learner.settings.learner import LearnerSettings


def stop_by(file, stop):
    while not stop.wait(0.02):
        if file.exists():
            stop.set()


def main():
    torch.set_num_threads(1)
    folder, stop = Path(sys.argv[1]), threading.Event()
    heartbeat = torchrun.RankHeartbeat(stop)
    if len(sys.argv) > 2:
        torchrun.SILENT = timedelta(seconds=float(os.environ.get("SILENT_SECONDS", "100")))
        torchrun.JOIN_TIMEOUT = timedelta(seconds=float(os.environ.get("JOIN_SECONDS", "100")))
        os.environ["RANK"] = sys.argv[2]
        assignment = RankAssignment(int(sys.argv[2]), int(sys.argv[3]), folder / "rendezvous", heartbeat=heartbeat)
    else:
        started = torchrun.TorchrunRank.of(os.environ)
        store = started.connect()
        torchrun.agree(store, started.rank, started.size, {"seed": "1"})
        torchrun.use_interface_to(started.master, os.environ, started.hosts)
        assignment = RankAssignment(started.rank, started.size, store, started.first, heartbeat=heartbeat)
    sees_stop = "SEES_STOP" in os.environ
    if sees_stop:
        stops = folder / f"stop-{assignment.rank}"
        threading.Thread(target=stop_by, args=(stops, stop), daemon=True).start()
    else:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # for threads from now on too
    with join_group(assignment, LearnerSettings(device="cpu", replicas=assignment.size)):
        joining = folder / f"joining-{assignment.rank}"
        joining.write_text(str(os.getpid()))
        joining.rename(folder / f"joined-{assignment.rank}")
        if sees_stop:
            stop.wait()
        else:
            ctypes.CDLL(None).pause()
    (folder / f"stopped-{assignment.rank}").write_text(str(heartbeat.stopped_by_another))


if __name__ == "__main__":
    main()
