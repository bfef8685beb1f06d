"""A Kafka-protocol broker as a child process, for the demo and for tests; its data is gone when it stops."""

import contextlib
import importlib.resources
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Self

from anabranch.core.errors import SettingsError
from anabranch.ingest.errors import BrokerError
from anabranch.ingest.settings.stream import StreamSettings

_POLL_SECONDS = 0.02
_START_SECONDS = 20.0
_ATTEMPTS = 3


class EmbeddedBroker:
    """Listens on a port of loopback; ready when `start` returns. Its child dies with this process in any case.

    It answers a fetch with all that it has and ignores the limits of the request: it is for backlogs that fit into
    memory, and for those over 100 MB a reader needs a higher `receive.message.max.bytes`.
    """

    def __init__(self, port: int = 0) -> None:
        """Take the port; 0 is any that is free."""
        self._port = port
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.bootstrap = ""
        """`HOST:PORT`, once it is started."""

    def start(self) -> None:
        """Start it, and wait until it answers.

        Raises:
            SettingsError: the package that holds the broker is not installed.
            BrokerError: it does not come up, or its port is in use.
        """
        binary = _binary()
        if self._port and free_port(self._port) != self._port:
            raise BrokerError(
                f"port {self._port} is in use: select another one by --port, or any free one by --port 0, "
                "and set stream.bootstrap_servers to it"
            )
        for attempt in range(_ATTEMPTS):
            try:
                self._start_once(binary)
            except BrokerError:
                self.stop()
                # Another program may have taken the port meanwhile.
                if attempt == _ATTEMPTS - 1:
                    raise
            else:
                return

    def stop(self) -> None:
        """Stop it and remove its files; does nothing when it is not running."""
        if self._process is not None:
            # The end of stdin would do as well; a signal need not wait for it to be read.
            self._process.terminate()
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()
            self._process = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start_once(self, binary: Path) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="anabranch-broker-"))
        port = self._port or free_port()
        self.bootstrap = f"127.0.0.1:{port}"
        command = [str(binary), "start", "--only", "kafka", "--kafka-port", str(port)]
        command += ["--data-dir", str(self._folder / "data")]
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "anabranch.core.die_with_parent", "--remove", str(self._folder), *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._wait_until_ready(port)

    def _wait_until_ready(self, port: int) -> None:
        # Imported here so that the command line starts without a Kafka client.
        from anabranch.ingest.kafka.producer import partition_counts

        assert self._process is not None
        assert self._folder is not None
        deadline = time.monotonic() + _START_SECONDS
        while not _listens(port):
            if self._process.poll() is not None or time.monotonic() > deadline:
                said = (self._folder / "log").read_text(errors="replace").strip()
                raise BrokerError(
                    f"the embedded broker did not start on {self.bootstrap}; it said: {said or 'nothing'}"
                )
            time.sleep(_POLL_SECONDS)
        partition_counts(StreamSettings(bootstrap_servers=self.bootstrap, topics=("any",)), ["any"])


def free_port(preferred: int = 0) -> int:
    """Return `preferred` when it is free on loopback, else a port that is free now."""
    with socket.socket() as probe:
        # As servers do, so that a port whose connections have just been closed counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", preferred))
        except OSError:
            return free_port()
        port: int = probe.getsockname()[1]
        return port


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def _binary() -> Path:
    if importlib.util.find_spec("noida_db") is None:
        raise SettingsError("the embedded broker is not installed: pip install 'anabranch[embedded]'")
    binary = Path(str(importlib.resources.files("noida_db") / "noida-db"))
    if not os.access(binary, os.X_OK):
        binary.chmod(0o755)
    return binary
