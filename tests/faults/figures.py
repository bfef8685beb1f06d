"""The figures of the harness, with their targets."""

import os
import time

from benchmarks.harness.results import Results, Target

TARGETS = {
    "kills": Target(100, least=True),
    "lost": Target(0, exact=True),
    "twice": Target(0, exact=True),
    "ledger_exact": Target(True, exact=True),
    "round_kills": Target(100, least=True),
    "round_kills_lost": Target(0, exact=True),
    "round_kills_twice": Target(0, exact=True),
    "round_kills_exact": Target(True, exact=True),
    "bucket_kills": Target(100, least=True),
    "bucket_torn": Target(0, exact=True),
    "bucket_lost": Target(0, exact=True),
    "bucket_twice": Target(0, exact=True),
    "bucket_exact": Target(True, exact=True),
    "late_labels_kills": Target(100, least=True),
    "joined_differs": Target(0, exact=True),
    "twice_with_late_labels": Target(0, exact=True),
    "late_labels_exact": Target(True, exact=True),
    "recovery_seconds_p95": Target(5),
    "weights_equal": Target(True, exact=True),
    "checkpoint_cost_fraction": Target(0.01),
    "failed_requests": Target(0, exact=True),
    "answer_kills": Target(100, least=True),
    "answers_lost": Target(0, exact=True),
    "answers_twice": Target(0, exact=True),
    "fuzzed": Target(100_000, least=True),
    "fuzzed_avro": Target(100_000, least=True),
    "fuzzed_protobuf": Target(100_000, least=True),
    "fuzzed_json_schema": Target(100_000, least=True),
    "crashes": Target(0, exact=True),
    "not_dead_lettered": Target(0, exact=True),
    "poison_without_outcome": Target(0, exact=True),
    "poison_wrong_outcome": Target(0, exact=True),
    "poison_restarts": Target(0, exact=True),
    "outlier_kinds": Target(40, least=True),
    "outlier_accuracy_lost": Target(0.01),
    "outlier_unnamed": Target(0, exact=True),
    "outlier_wrong_outcome": Target(0, exact=True),
    "outlier_restarts": Target(0, exact=True),
    "memory_growth": Target(1.05),
    "backfill_lost": Target(0, exact=True),
    "backfill_twice": Target(0, exact=True),
    "backfill_exact": Target(True, exact=True),
    "undo_kills": Target(10, least=True),
    "undo_tainted_exact": Target(True, exact=True),
    "undo_served_seconds": Target(1),
    "undo_wrong_answers": Target(0, exact=True),
    "undo_equal": Target(True, exact=True),
    "siege_p99_ratio": Target(3),
    "siege_failed": Target(0, exact=True),
    "siege_memory_bytes": Target(50_000_000),
    "siege_ended": Target(0, exact=True),
}
QUANTITIES = (
    "kills",
    "round_kills",
    "bucket_kills",
    "late_labels_kills",
    "answer_kills",
    "undo_kills",
    "fuzzed",
    "fuzzed_avro",
    "fuzzed_protobuf",
    "fuzzed_json_schema",
)
"""Figures that have a target in the long form alone: the quick form has fewer kills and malformed messages."""


class Figures(Results):
    """Prints figures as they are measured, and writes them to files."""

    def __init__(self, *, quick: bool) -> None:
        super().__init__("faults", {k: target for k, target in TARGETS.items() if not (quick and k in QUANTITIES)})
        self.fact("quick", quick)
        self._begin = time.monotonic()
        self.failed: list[str] = []
        """Parts that failed."""

    def part(self, name: str, text: str) -> None:
        """Print the title of a part, and save the load before it."""
        self.fact(f"load_before_{name}", os.getloadavg()[0])
        self.title(f"{name}: {text}  (after {time.monotonic() - self._begin:.0f} s)")

    def fail(self, part: str, error: Exception) -> None:
        """Save the error of a part that failed, under `failed_PART`."""
        self.fact(f"failed_{part}", f"{type(error).__name__}: {error}")
        self.failed.append(part)
        self.remark(f"{part} failed: {type(error).__name__}")

    def finish(self) -> list[str]:
        """Save the duration; return the failed parts and the figures that missed their target."""
        self.fact("seconds", round(time.monotonic() - self._begin))
        return self.failed + self.missed
