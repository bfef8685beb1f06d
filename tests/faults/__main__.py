"""`python -m tests.faults [--quick] [--minutes M] [--json FILE] [--only PART ...]`: what faults cost, in figures.

It takes the broker that ANABRANCH_TEST_KAFKA_START starts, else the embedded one. A part that fails is reported, and
the others run. The exit code is 1 when a part failed or a target is missed.
"""

import argparse
import logging
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.faults import baselines, cost, fuzz, kills, overload, poison, recovery, serving_kills, siege
from tests.faults.figures import Figures
from tests.faults.pipeline import broker

PARTS: dict[str, Callable[..., None]] = {
    "kills": kills.run,
    "recovery": recovery.run,
    "baselines": baselines.run,
    "cost": cost.run,
    "serving": serving_kills.run,
    "fuzz": fuzz.run,
    "poison": poison.run,
    "overload": overload.run,
    "siege": siege.run,
}

log = logging.getLogger(__name__)


def main() -> int:
    """Run the parts that were asked for, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer kills and shorter streams, within five minutes")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long a stream is that has no other length")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, one flat object")
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=", ".join(PARTS))
    chosen = parser.parse_args()
    logging.basicConfig(level=logging.ERROR, format="%(message)s")
    logging.getLogger("kafka").setLevel(logging.CRITICAL)
    figures = Figures(quick=chosen.quick)
    for name in chosen.only or PARTS:
        try:
            _run(name, figures, quick=chosen.quick, minutes=chosen.minutes)
        except Exception as exc:
            log.exception("part %s failed", name)
            figures.fail(name, exc)
    figures.write(chosen.json)
    if figures.missed:
        print(f"missed: {', '.join(figures.missed)}")
    return 1 if figures.missed else 0


def _run(name: str, figures: Figures, *, quick: bool, minutes: float) -> None:
    """Run a part with a folder and a broker of its own."""
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as folder:
        with broker(Path(folder) / "kafka") as bootstrap:
            PARTS[name](Path(folder) / name, bootstrap, figures, quick=quick, minutes=minutes)


if __name__ == "__main__":
    sys.exit(main())
