"""Labels that come later than their events: what it costs to wait for them, and what early negatives are worth.

    python -m benchmarks.late_labels [--quick] [--json FILE] [--save] [--only PART ...] [--seeds N] [--data DIR]

    rate          events a second that a learner trains on: with labels in another topic, over labels in the events
    memory        bytes of memory that an event takes that waits, without its payload
    freshness     from the append of a label to a prediction by a version that has learned from it
    early         flights from New York, of which only late ones get a label, when they land: the log loss of the
                  prediction that was made when it was due, with early negatives and their correction, over the smaller
                  one of waiting for the label and of negatives without a correction

The learner of `rate` and `freshness` trains an MLP of a million parameters. `early` runs a backtest, without broker and
learner process.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from anabranch.commands.backtesting.delayed_labels import POLICIES
from benchmarks.harness import early_labels, late_stream
from benchmarks.harness.interleave import Spread
from benchmarks.harness.pipeline import broker
from benchmarks.harness.results import Form, Results, Target, options
from benchmarks.harness.waiting import waiting_bytes

TARGETS = {
    "late_over_plain": Target(0.9, least=True),
    "waiting_bytes": Target(64),
    "label_freshness_p99_seconds": Target(1.0),
    "early_log_loss_ratio": Target(0.9999),
}
_ROWS = (2_000, 60_000, None)
"""Of the flights, in each form: the second are two months."""


@dataclass(frozen=True)
class Setup:
    """What all parts of one start have in common."""

    results: Results
    bootstrap: str
    seeds: range
    data: Path | None
    form: Form


def rate(setup: Setup) -> None:
    """Measure the rate with late labels."""
    late_stream.rate(setup.results, form=setup.form)


def memory(setup: Setup) -> None:
    """Measure the memory of events that wait."""
    events = (2_000, 200_000, 2_000_000)[setup.form]
    setup.results.title(f"memory: {events:,} events that wait")
    with tempfile.TemporaryDirectory() as folder:
        setup.results.add("waiting_bytes", waiting_bytes(events, Path(folder)), unit="bytes per event")


def freshness(setup: Setup) -> None:
    """Measure from a label to a prediction."""
    late_stream.freshness(setup.results, setup.bootstrap, form=setup.form)


def early(setup: Setup) -> None:
    """Compare the log loss of the three policies on the same flights, by seed."""
    results, rows = setup.results, _ROWS[setup.form]
    results.title(f"flights: late ones get a label when they land, others none within {early_labels.WAIT_HOURS:g} h")
    for both in (False, True):
        columns = early_labels.flights(setup.data, rows, both=both)
        losses: dict[str, list[float]] = {}
        for policy in POLICIES:
            losses[policy] = [early_labels.log_loss(columns, policy, seed) for seed in setup.seeds]
            name = f"{policy.replace('-', '_')}_log_loss" + ("_both_labels" if both else "")
            for seed, value in zip(setup.seeds, losses[policy], strict=True):
                results.fact(f"{name}_seed_{seed}", value)
            mean = Spread(statistics.mean(losses[policy]), min(losses[policy]), max(losses[policy]))
            results.add(name, mean, "flights in time get a label as well" if both else "", "nats")
        ratios = [
            corrected / min(waiting, negative)
            for corrected, waiting, negative in zip(
                losses["negative-then-correct"], losses["wait"], losses["negative"], strict=True
            )
        ]
        worst = Spread(max(ratios), min(ratios), max(ratios))
        key = "early_log_loss_both_labels_ratio" if both else "early_log_loss_ratio"
        results.add(key, worst, "over the better of the other two, of the worst seed")


PARTS: dict[str, Callable[[Setup], None]] = {"rate": rate, "memory": memory, "freshness": freshness, "early": early}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options(parser, PARTS)
    parser.add_argument("--seeds", type=int, default=3, help="seeds, from 0 on")
    parser.add_argument("--data", type=Path, metavar="DIR", help="has nycflights.npz, instead of what pip fetches")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    results = Results("late_labels", TARGETS)
    results.fact("quick", chosen.form is not Form.LONG)
    with broker(None) as bootstrap:
        setup = Setup(results, bootstrap, range(chosen.seeds), chosen.data, chosen.form)
        for part in chosen.only or PARTS:
            PARTS[part](setup)
            results.write(chosen)


if __name__ == "__main__":
    main()
