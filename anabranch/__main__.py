"""`python -m anabranch`, and the console script `anabranch`."""

import os
import signal
import sys


def main() -> int:
    """Run the command line and return its exit code."""
    if os.getpid() == 1:
        # The kernel keeps from the first process of a container every signal that it has no handler for, and loading
        # takes seconds in which a container may be stopped.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    from anabranch.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
