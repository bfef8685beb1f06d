"""One child process of a supervisor: what it is, what it reports, how it is started, and what it leaves behind."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import msgspec

from anabranch.core.failures import DamagedError, decoded
from anabranch.core.files import MOST_BYTES, read_file


@dataclass(frozen=True)
class Part:
    """One child process to keep alive."""

    name: str
    command: tuple[str, ...]
    report: Path | None = None
    """The file in which it reports its pid, and steps or a version once it has made progress."""
    environment: Mapping[str, str | None] = field(default_factory=dict)
    """Variables in addition to those of the supervisor; None removes one."""
    output: Path | None = None
    """File to which its stdout and stderr are appended; None passes them through."""
    stop_timeout: timedelta = timedelta(seconds=30)
    """Time that it has to stop after SIGTERM."""
    descriptors: tuple[int, ...] = ()
    """File descriptors that it inherits in addition to stdin, stdout and stderr."""
    has_run_before: bool = False
    """Whether the pipeline has run before: exit code 3 on the first start is then an outage, and ends nothing."""
    standby: tuple[str, ...] | None = None
    """Command of a standby, a process that gets ready and becomes this part when it reads a line from stdin; or None.

    The supervisor starts one standby in each life of the part that makes progress. A standby that dies is not replaced
    until the part has been started again."""


class PartProgress(msgspec.Struct):
    """What the report of a part says about its progress."""

    pid: int
    launcher: int | None = None
    steps_since_start: int | None = None
    """Of a learner; its version may be one of an earlier life."""
    version: int | None = None
    checkpoint: int | None = None
    """The newest checkpoint."""

    @property
    def is_any(self) -> bool:
        """Whether it has taken a step or serves a version."""
        steps = self.steps_since_start
        return self.version is not None if steps is None else steps > 0


def progress_of(report: Path | None, pid: int) -> PartProgress | None:
    """Return the progress in the report of a process; None where there is no report of this process."""
    if report is None:
        return None
    try:
        progress = decoded(read_file(report, MOST_BYTES), PartProgress)
    except (OSError, DamagedError):
        return None
    return progress if pid in (progress.pid, progress.launcher) else None


def spawn(part: Part, command: tuple[str, ...]) -> subprocess.Popen[bytes]:
    """Start a command with the environment and output of a part, as the leader of a new session."""
    environment = {**os.environ, **part.environment}
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(part.output.open("ab")) if part.output else None
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env={name: value for name, value in environment.items() if value is not None},
            start_new_session=True,
            pass_fds=part.descriptors,
        )


def activate(standby: subprocess.Popen[bytes]) -> bool:
    """Send a standby the line that makes it the part; return False when it has died."""
    assert standby.stdin is not None
    try:
        os.write(standby.stdin.fileno(), b"\n")
    except BrokenPipeError:
        standby.kill()
        standby.wait()
        close_pipe(standby)
        return False
    return True


def close_pipe(process: subprocess.Popen[bytes]) -> None:
    """Close the pipe to the stdin of a process."""
    assert process.stdin is not None
    process.stdin.close()


def signal_group(group: int, number: signal.Signals | None) -> bool:
    """Signal a process group (None sends nothing), and return whether it still has a member."""
    try:
        os.killpg(group, number or 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        # What macOS says of a group whose members are all dead but not yet waited for.
        return False
    return True


def reap(group: int) -> None:
    """Wait for dead members of a group that became children of this process, as those of PID 1 do in a container."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass


def describe_end(code: int) -> str:
    """Return an exit code or the name of a signal as text."""
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
