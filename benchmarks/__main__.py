"""All benchmarks and the fault harness, one after the other.

    python -m benchmarks [--quick] [--only NAME ...] [--save [DIR]] [ARGUMENT ...]

Each runs in a new process. It prints how long each takes on two cores without other load, and how long it took. Unknown
arguments are passed to all of them. The exit code is 1 if one of them failed.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.harness.results import FOLDER, ROOT

QUICK_MINUTES = {
    "verdicts": 0.5,
    "ingest": 0.7,
    "replay_disk": 0.7,
    "backfill": 0.7,
    "replay": 1.2,
    "features": 1.5,
    "calibration": 2.0,
    "serving": 2.0,
    "learner": 2.0,
    "mirror": 2.5,
    "search": 3.0,
    "fresh_host": 3.0,
    "faults": 6.0,
    "capacity": 4.0,
    "late_labels": 5.0,
    "pretrained": 6.0,
    "forgetting": 20.0,
}
"""Approximate duration of the quick forms. `benchmarks.gpu` is not among them, since it needs a CUDA device."""
MODULES = {"faults": "tests.faults"}
"""Those that are not in this package."""


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="their quick forms")
    parser.add_argument("--only", nargs="+", choices=QUICK_MINUTES, metavar="NAME", help=", ".join(QUICK_MINUTES))
    parser.add_argument("--save", type=Path, nargs="?", const=FOLDER, metavar="DIR", help="passed to all of them")
    chosen, arguments = parser.parse_known_args()
    names = chosen.only or list(QUICK_MINUTES)
    arguments += ["--quick"] if chosen.quick else []
    arguments += ["--save", str(chosen.save.resolve())] if chosen.save is not None else []
    if chosen.quick:
        print(f"{', '.join(names)}: about {sum(QUICK_MINUTES[name] for name in names):g} minutes", flush=True)
    failed = []
    for name in names:
        print(f"\n== {name}{f', about {QUICK_MINUTES[name]:g} minutes' if chosen.quick else ''}", flush=True)
        begin = time.monotonic()
        module = MODULES.get(name, f"benchmarks.{name}")
        if subprocess.run([sys.executable, "-m", module, *arguments], cwd=ROOT, check=False).returncode:
            failed.append(name)
        print(f"== {name} took {(time.monotonic() - begin) / 60:.1f} minutes", flush=True)
    if failed:
        print(f"\nfailed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
