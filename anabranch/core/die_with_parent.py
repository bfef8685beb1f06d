"""`python -m anabranch.core.die_with_parent [--remove FOLDER] COMMAND...`: runs a command while stdin stays open.

For commands that do not watch a pipe themselves; our own processes call `when_stdin_ends`. The parent holds the other
end of stdin. The pipe ends however the parent dies, also by SIGKILL. Then the command is stopped, and the folder, if
one is named, is removed. A pipe works on every platform; a parent-death signal does not.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

_STOP_SECONDS = 5.0


def when_stdin_ends(call: Callable[[], object]) -> None:
    """Call `call` in a thread once stdin ends, as it does when the parent dies; what comes on stdin is discarded."""
    stdin = os.dup(0)  # a read continues by number after SIGCONT, and another file may be stdin by then

    def watch() -> None:
        while os.read(stdin, 4096):
            pass
        call()

    threading.Thread(target=watch, name="watch-stdin", daemon=True).start()


def lives(pid: int) -> bool:
    """Return whether a process runs on this machine."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is another user's
        return True
    return True


def main() -> int:
    """Run the command until it ends, stdin ends, or SIGTERM comes; return the command's exit code."""
    folder, command = (sys.argv[2], sys.argv[3:]) if sys.argv[1] == "--remove" else (None, sys.argv[1:])
    is_orphaned, is_stopping = threading.Event(), threading.Event()
    child: subprocess.Popen[bytes] | None = None

    def hand_on(*_: object) -> None:
        is_stopping.set()
        if child is not None:
            child.terminate()

    # Before the command starts, which may say so at once, and not as SIG_IGN, which the command would inherit.
    # A terminal sends SIGINT to its whole process group; the parent decides when the command ends.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, hand_on)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    if is_stopping.is_set():
        child.terminate()

    def stop() -> None:
        is_orphaned.set()
        child.terminate()
        try:
            child.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()

    when_stdin_ends(stop)
    code = child.wait()
    if folder is not None and is_orphaned.is_set():
        shutil.rmtree(folder, ignore_errors=True)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
