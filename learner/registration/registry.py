"""The registry of MLflow, whose client runs in a separate process: its answers are bounded in bytes and time."""

import contextlib
import logging
import os
import selectors
import subprocess
import sys
import threading
import time
from datetime import timedelta
from typing import NoReturn

import msgspec
from typing_extensions import override

from anabranch.core.durations import format_duration
from anabranch.core.errors import SettingsError
from learner.errors import RegistrationError, RegistrationRefusedError
from learner.registration.lineage import Registration
from learner.registration.messages import Answer, Call, Opening
from learner.registration.registrar import Registry
from learner.sections.mlflow_settings import MlflowSettings

_LONGEST_START = timedelta(seconds=60)
"""The client is imported meanwhile."""
_LONGEST_CALL = timedelta(minutes=2)
"""Of one call, which makes up to eight requests."""
_LONGEST_CLOSE = timedelta(seconds=1)
_MOST_BYTES = 65536
"""Of an answer."""


log = logging.getLogger(__name__)


class MlflowRegistry(Registry):
    """A registered model; see `mlflow_client.py`. A call that takes too long ends the process, and the next starts it.

    Used by one thread, except `close`.
    """

    def __init__(self, settings: MlflowSettings, name: str, source: str) -> None:
        """Start the process, which connects to nothing; `name` is the pipeline's, `source` a URL with `{number}` in it.

        Raises:
            SettingsError: the client is not installed, or it refuses `tracking_uri`.
        """
        self._location = settings.tracking_uri
        self._opening = Opening(settings.model_dump(mode="json"), name, source)
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False
        self._lock = threading.Lock()
        """Held during a call."""
        try:
            self._start()
        except RegistrationError as exc:  # on a busy machine; the first call starts it again
            log.warning("%s", exc)

    @override
    def register(self, version: Registration) -> str:
        result = self._call(Call("register", version=version))
        assert result is not None
        return result

    @override
    def move_alias(self, registered: str) -> None:
        self._call(Call("move_alias", [registered]))

    @override
    def tag(self, registered: str, key: str, value: str) -> None:
        self._call(Call("tag", [registered, key, value]))

    @override
    def close(self) -> None:
        self._is_closed = True
        if (process := self._process) is not None:
            process.kill()  # so that a call ends
        if self._lock.acquire(timeout=_LONGEST_CLOSE.total_seconds()):
            self._end()
            self._lock.release()

    def _start(self) -> None:
        # -P: a folder named learner in the working directory must not shadow this package.
        command = [sys.executable, "-P", "-m", "learner.registration.mlflow_client"]
        # A separate session: a terminal sends SIGINT to all of one, and this ends with stdin.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        self._ask(self._opening, _LONGEST_START)

    def _call(self, call: Call) -> str | None:
        with self._lock:
            if self._is_closed:
                raise RegistrationError(f"{self._named} is not used any more")
            if self._process is None:
                try:
                    self._start()
                except SettingsError as exc:
                    raise RegistrationError(str(exc)) from exc
            return self._ask(call, _LONGEST_CALL)

    def _ask(self, message: Opening | Call, longest: timedelta) -> str | None:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        try:
            process.stdin.write(msgspec.json.encode(message) + b"\n")
            process.stdin.flush()
            answer = msgspec.json.decode(self._line(process, longest), type=Answer)
        except (BrokenPipeError, msgspec.MsgspecError, EOFError) as exc:
            self._end()
            raise RegistrationError(
                f"{self._named} is not used for now: the process of its client has ended with code {process.returncode}"
            ) from exc
        if answer.kind:
            self._raise(answer)
        return answer.result

    def _line(self, process: subprocess.Popen[bytes], longest: timedelta) -> bytes:
        """Return the next line; EOFError where the process ends before, or the line is too long."""
        assert process.stdout is not None
        until, line = time.monotonic() + longest.total_seconds(), b""
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(until - time.monotonic()):
                    self._end()
                    raise RegistrationError(f"{self._named} does not answer within {format_duration(longest)}")
                piece = os.read(process.stdout.fileno(), _MOST_BYTES)
                line += piece
                if not piece or len(line) > _MOST_BYTES:
                    raise EOFError
        return line

    def _raise(self, answer: Answer) -> NoReturn:
        match answer.kind:
            case "refused":
                raise RegistrationRefusedError(answer.error)
            case "settings":
                self._end()
                raise SettingsError(answer.error)
            case _:
                raise RegistrationError(answer.error)

    def _end(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    @property
    def _named(self) -> str:
        return f"MLflow at {self._location}"
