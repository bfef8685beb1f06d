"""A tracker, whose client runs in a separate process: its answers are bounded in bytes and time.

Both send each other lines of JSON: an `Opening`, then for each `Call` an `Answer`.
"""

import contextlib
import logging
import os
import selectors
import subprocess
import sys
import threading
import time
from datetime import timedelta
from typing import Any, Literal

import msgspec

from anabranch.core.durations import format_duration
from anabranch.core.errors import SettingsError
from anabranch.learner.errors import TrackerError, TrackerRefusedError
from anabranch.learner.settings.track import TrackSettings

_LONGEST_START = timedelta(seconds=60)
"""The client is imported meanwhile."""
_LONGEST_CALL = timedelta(minutes=2)
"""Of one call, which makes up to eight requests."""
_LONGEST_CLOSE = timedelta(seconds=1)
_MOST_BYTES = 65536
"""Of an answer."""


log = logging.getLogger(__name__)


class Registration(msgspec.Struct, frozen=True):
    """A version to register."""

    number: int
    identity: str
    """The same for the same version at each attempt, and for no other version of any pipeline."""
    step: int
    time: float
    """When it was published, in seconds since 1970."""
    tags: dict[str, str]
    metrics: dict[str, float]


class Point(msgspec.Struct, frozen=True):
    """The numbers of the learner at a step."""

    step: int
    time: float
    """In seconds since 1970."""
    values: dict[str, float]
    """By the name of the curve, such as `loss/now`."""


class TrackedRun(msgspec.Struct, frozen=True):
    """The run that gets the curves of one start of the learner."""

    project: str
    name: str
    """Unique within the project."""
    facts: dict[str, str]
    """What was started, by name."""
    folder: str
    """Where files of the tracker are."""


class Opening(msgspec.Struct, tag=True):
    """The first line: what the client is made with."""

    settings: dict[str, Any]
    run: TrackedRun
    model: str
    """The pipeline, by whose name versions are registered."""
    source: str
    """The URL of a version, with `{number}` in it."""


class Call(msgspec.Struct, tag=True):
    """A call of a method of the client."""

    method: Literal["log", "finish", "register", "move_alias", "tag"]
    texts: list[str] = []
    version: Registration | None = None
    points: list[Point] | None = None

    def arguments(self) -> list[Any]:
        """Return the arguments of the call."""
        return [*self.texts, *(each for each in (self.version, self.points) if each is not None)]


class Answer(msgspec.Struct):
    """What a method returned, or the sentence of its error."""

    result: str | None = None
    error: str = ""
    kind: str = ""
    """The class of the error, one of `ERRORS`; empty without one."""


ERRORS = {each.__name__: each for each in (SettingsError, TrackerError, TrackerRefusedError)}
"""What methods of the registry raise."""


class Tracker:
    """A tracker; see `client.py`. A call that takes too long ends the process, and the next starts it.

    Used by one thread, except `close`.
    """

    def __init__(self, settings: TrackSettings, run: TrackedRun, model: str = "", source: str = "") -> None:
        """Start the process, which connects to nothing; the arguments are those of `Opening`.

        Raises:
            SettingsError: the client is not installed, or it refuses `url`.
        """
        self._named = f"{settings.kind} at {settings.url or run.folder}"
        content = settings.model_dump(mode="json", exclude_unset=True)
        self._opening = Opening(content, run, model, source)
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False
        self._lock = threading.Lock()
        """Held during a call."""
        try:
            self._start()
        except TrackerError as exc:  # on a busy machine; the first call starts it again
            log.warning("%s", exc)

    def log(self, points: list[Point]) -> None:
        """Add points to the curves of the run, which is made before the first; repeated ones do no harm.

        Raises:
            TrackerError: it failed, and may succeed later.
            TrackerRefusedError: it would fail again.
        """
        self._call(Call("log", points=points))

    def finish(self, points: list[Point], longest: timedelta) -> None:
        """Add the last points, and end the run, if it was made; raises as `log` does, after `longest` too."""
        if self._process is not None:
            self._call(Call("finish", points=points), longest)

    def register(self, version: Registration) -> str:
        """Register a version once, and return the number that it has in the registry; raises as that of the client."""
        result = self._call(Call("register", version=version))
        assert result is not None
        return result

    def move_alias(self, registered: str) -> None:
        """Let the alias name a registered version."""
        self._call(Call("move_alias", [registered]))

    def tag(self, registered: str, key: str, value: str) -> None:
        """Set a tag of a registered version."""
        self._call(Call("tag", [registered, key, value]))

    def close(self) -> None:
        """End the current call, and make none any more. Any thread may call this."""
        self._is_closed = True
        if (process := self._process) is not None:
            process.kill()  # so that a call ends
        if self._lock.acquire(timeout=_LONGEST_CLOSE.total_seconds()):
            self._end()
            self._lock.release()

    def _start(self) -> None:
        # -P: a folder named learner in the working directory must not shadow this package.
        command = [sys.executable, "-P", "-m", "anabranch.learner.extensions.track.client"]
        # A separate session: a terminal sends SIGINT to all of one, and this ends with stdin.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        self._ask(self._opening, _LONGEST_START)

    def _call(self, call: Call, longest: timedelta | None = None) -> str | None:
        with self._lock:
            if self._is_closed:
                raise TrackerError(f"{self._named} is not used any more")
            if self._process is None:
                try:
                    self._start()
                except SettingsError as exc:
                    raise TrackerError(str(exc)) from exc
            return self._ask(call, _LONGEST_CALL if longest is None else longest)

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
            raise TrackerError(
                f"{self._named} is not used for now: the process of its client has ended with code {process.returncode}"
            ) from exc
        if answer.kind:
            if ERRORS[answer.kind] is SettingsError:
                self._end()
            raise ERRORS[answer.kind](answer.error)
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
                    raise TrackerError(f"{self._named} does not answer within {format_duration(longest)}")
                piece = os.read(process.stdout.fileno(), _MOST_BYTES)
                line += piece
                if not piece or len(line) > _MOST_BYTES:
                    raise EOFError
        return line

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
