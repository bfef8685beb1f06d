"""The cost of faults: kills, malformed messages, overload and attacks.

    python -m tests.faults [--quick] [--json FILE] [--save] [--only PART ...] [--minutes M]

It uses the broker that ANABRANCH_TEST_KAFKA_START starts, or else the embedded one. A part that fails is reported, and
the others run. The exit code is 1 if a part failed or a target was missed.
"""

import argparse
import logging
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.harness.results import Form, options
from tests.faults import (
    answer_kills,
    backfill,
    baselines,
    bucket_kills,
    cost,
    fuzz_part,
    kills,
    late_labels,
    outliers,
    overload,
    poison,
    recovery,
    round_kills,
    serving_kills,
    siege,
    undo,
)
from tests.faults.figures import Figures
from tests.faults.pipeline import broker

PARTS: dict[str, Callable[..., None]] = {
    "kills": kills.run,
    "rounds": round_kills.run,
    "bucket": bucket_kills.run,
    "late_labels": late_labels.run,
    "recovery": recovery.run,
    "baselines": baselines.run,
    "cost": cost.run,
    "serving": serving_kills.run,
    "answers": answer_kills.run,
    "fuzz": fuzz_part.run,
    "poison": poison.run,
    "outliers": outliers.run,
    "overload": overload.run,
    "backfill": backfill.run,
    "undo": undo.run,
    "siege": siege.run,
}

log = logging.getLogger(__name__)


def main() -> int:
    """Run the parts of the command line, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options(parser, PARTS, "fewer kills and shorter streams")
    parser.add_argument("--minutes", type=float, default=10.0, help="duration of the streams of `cost` and `overload`")
    chosen = parser.parse_args()
    logging.basicConfig(level=logging.ERROR, format="%(message)s")
    logging.getLogger("kafka").setLevel(logging.CRITICAL)
    quick = chosen.form is not Form.LONG
    figures = Figures(quick=quick)
    for name in chosen.only or PARTS:
        try:
            _run(name, figures, quick=quick, minutes=chosen.minutes)
        except Exception as exc:
            log.exception("part %s failed", name)
            figures.fail(name, exc)
    missed = figures.finish()
    figures.write(chosen)
    if missed:
        print(f"missed: {', '.join(missed)}")
    return 1 if missed else 0


def _run(name: str, figures: Figures, *, quick: bool, minutes: float) -> None:
    """Run a part with a new folder and a new broker."""
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as folder:
        with broker(Path(folder) / "kafka") as bootstrap:
            PARTS[name](Path(folder) / name, bootstrap, figures, quick=quick, minutes=minutes)


if __name__ == "__main__":
    sys.exit(main())
