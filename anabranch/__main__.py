"""`python -m anabranch`, and the console script `anabranch`."""

import sys

from anabranch.intruders import refuse_intruders


def main() -> int:
    """Run the command line and return its exit code."""
    refuse_intruders()
    # Not before, since it imports the packages whose place an intruder may have taken.
    from anabranch import cli

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
