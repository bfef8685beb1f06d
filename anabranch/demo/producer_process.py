"""The demo's producer process, seen from the demo."""

import contextlib
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from anabranch.demo.freshness import Freshness
from anabranch.demo.producer import Acknowledged, Done, ProducerReport, Progress
from anabranch.runtime.lifecycle import Exit

_STOP_SECONDS = 10.0


@dataclass(frozen=True)
class StreamProgress:
    """What to send, and how fast."""

    events: int | None
    rate: float
    seed: int


class ProducerProcess:
    """Starts the producer and receives its reports, in its own thread. Its figures may be read at any time."""

    def __init__(
        self, config: Path, stream: StreamProgress, environment: Mapping[str, str], output: Path, freshness: Freshness
    ) -> None:
        self._stream = stream
        self._environment = environment
        self._output = output
        self._freshness = freshness
        self._command = [sys.executable, "-P", "-m", "anabranch.demo.producer", "-c", str(config)]
        self._command += ["--rate", str(stream.rate), "--seed", str(stream.seed)]
        if stream.events is not None:
            self._command += ["--events", str(stream.events)]
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._receive_all, name="producer-reports", daemon=True)
        self._recent: deque[tuple[float, int]] = deque(maxlen=25)
        self.sent = 0
        self.phase = 0
        self.poisoned = False
        self.classes_seen = 1
        self.done: Done | None = None

    @property
    def rate(self) -> float:
        """Messages a second, over the last few seconds."""
        recent = list(self._recent)
        if len(recent) < 2 or recent[-1][0] == recent[0][0]:
            return 0.0
        return (recent[-1][1] - recent[0][1]) / (recent[-1][0] - recent[0][0])

    def start(self) -> None:
        """Start the producer; it connects, and waits for `go`."""
        with self._output.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=self._environment,
                start_new_session=True,
            )
        self._thread.start()

    def go(self) -> None:
        """Begin to send."""
        assert self._process is not None
        assert self._process.stdin is not None
        # A producer that has just died is `failed`.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()

    def failed(self) -> Exit | None:
        """Return the exit code of a producer that ended before it had sent everything; None when all is well."""
        code = self._process.poll() if self._process is not None else None
        if code is None or code == Exit.DONE or self.done is not None:
            return None
        return Exit(code) if code in (Exit.SETTINGS, Exit.DEPENDENCY) else Exit.BUG

    def stop(self) -> None:
        """Let the producer finish the messages in flight, and stop it."""
        if self._process is None:
            return
        process = self._process
        assert process.stdin is not None
        try:
            process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_SECONDS)
        finally:
            process.kill()
            process.wait()
            self._thread.join()
            self._process = None

    def _receive_all(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        decoder = msgspec.json.Decoder(ProducerReport)
        with self._process.stdout as lines:
            for line in lines:
                self._receive(decoder.decode(line))

    def _receive(self, report: ProducerReport) -> None:
        match report:
            case Acknowledged(partition, offset, moment):
                self._freshness.sent(partition, offset, moment)
            case Progress(sent, phase, poisoned):
                self.sent, self.phase, self.poisoned = sent, phase, poisoned
                self.classes_seen = max(self.classes_seen, phase + 1)
                self._recent.append((time.monotonic(), sent))
            case Done(sent):
                self.sent, self.done = sent, report
