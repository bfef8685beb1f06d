"""`python -m anabranch.core.die_with_parent [--remove FOLDER] COMMAND...`: runs a command while stdin stays open.

For children that do not watch a pipe themselves. Whoever holds the other end of stdin may die in any way, also by
SIGKILL: the end of the pipe is noticed here, the command is stopped, and then the folder, if one is named, removed.
Works wherever pipes do, which parent-death signals do not.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading

_PATIENCE_SECONDS = 5.0


def main() -> int:
    """Run the command; end when it ends, when stdin does, or on SIGTERM."""
    folder, command = (sys.argv[2], sys.argv[3:]) if sys.argv[1] == "--remove" else (None, sys.argv[1:])
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    abandoned = threading.Event()

    def stop() -> None:
        child.terminate()
        try:
            child.wait(_PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        abandoned.set()
        stop()

    # SIGINT goes to the whole group of a terminal; this process' parent decides when the command ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    threading.Thread(target=watch, name="watch-stdin", daemon=True).start()
    code = child.wait()
    if folder is not None and abandoned.is_set():
        shutil.rmtree(folder, ignore_errors=True)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
