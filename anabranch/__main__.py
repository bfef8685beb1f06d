"""`python -m anabranch`, and the console script `anabranch`."""

import os
import signal
import sys

from anabranch.runtime.package_check import refuse_intruders


def main() -> int:
    """Run the command line and return its exit code."""
    if os.getpid() == 1:
        # The kernel keeps from the first process of a container every signal that it has no handler for, and loading
        # takes seconds in which a container may be stopped.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    refuse_intruders()
    # Not before, since it imports packages that an intruder may hide.
    from anabranch.cli import app as cli

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
