"""`python -m anabranch.serving` on the pipeline file of a running learner."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
import psutil

from anabranch.serving.reporting.report import ServingReport, read_report
from benchmarks.harness.pipeline import BrokenRunError

_PATIENCE_SECONDS = 60.0
_POLL_SECONDS = 0.05


class ServingProcess:
    """Serves the versions below `folder/var`, with one thread of torch; killed when the context ends.

    `program`: arguments of the Python, before those of serving.
    """

    def __init__(
        self,
        folder: Path,
        cores: set[int] | None = None,
        variables: Mapping[str, str] | None = None,
        program: Sequence[str] = ("-m", "anabranch.serving"),
    ) -> None:
        self._state_dir = folder / "var"
        self._log = folder / "serving.log"
        with self._log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, *program, "-c", str(folder / "pipeline.toml"), "--supervised"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                cwd=folder,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})},
            )
        if cores is not None and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(self.process.pid, cores)

    def __enter__(self) -> "ServingProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()

    def wait(self) -> ServingReport:
        """Wait until a version is served; raises BrokenRunError after a minute, or if the process ends."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            report = read_report(self._state_dir)
            if report is not None and report.pid == self.process.pid and report.ready:
                return report
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise BrokenRunError(
                    f"serving is not ready; its log ends with: {self._log.read_text(errors='replace')[-2000:]}"
                )
            time.sleep(_POLL_SECONDS)

    def busy_seconds(self) -> float:
        """Return its CPU time so far."""
        times = psutil.Process(self.process.pid).cpu_times()
        return float(times.user + times.system)


def binary_request(rows: int, features: int) -> tuple[bytes, dict[str, str]]:
    """Return body and headers of a request for `rows` rows of the feature `x`, as binary data both ways."""
    numbers = np.random.default_rng(0).random((rows, features), np.float32).tobytes()
    tensor = {"name": "x", "datatype": "FP32", "shape": [rows, features]}
    document = {
        "inputs": [{**tensor, "parameters": {"binary_data_size": len(numbers)}}],
        "parameters": {"binary_data_output": True},
    }
    head = json.dumps(document).encode()
    headers = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(len(head))}
    return head + numbers, headers


def json_request(row: list[float]) -> tuple[bytes, dict[str, str]]:
    """Return body and headers of a request for one row of the feature `x`, as JSON."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, len(row)], "data": row}
    return json.dumps({"inputs": [tensor]}).encode(), {"Content-Type": "application/json"}
