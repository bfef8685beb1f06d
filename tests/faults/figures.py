"""What the harness has found: a line for each figure on the terminal, and flat keys in a file."""

import json
import operator
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

AT_MOST, AT_LEAST, EXACTLY = operator.le, operator.ge, operator.eq
_SIGNS = {AT_MOST: "<=", AT_LEAST: ">=", EXACTLY: "="}

TARGETS: dict[str, tuple[Callable[[float, float], bool], float]] = {
    "kills": (AT_LEAST, 100),
    "lost": (EXACTLY, 0),
    "twice": (EXACTLY, 0),
    "ledger_exact": (EXACTLY, True),
    "recovery_seconds_p95": (AT_MOST, 5),
    "weights_equal": (EXACTLY, True),
    "checkpoint_cost_fraction": (AT_MOST, 0.01),
    "failed_requests": (EXACTLY, 0),
    "fuzzed": (AT_LEAST, 100_000),
    "crashes": (EXACTLY, 0),
    "not_dead_lettered": (EXACTLY, 0),
    "poison_without_outcome": (EXACTLY, 0),
    "poison_wrong_outcome": (EXACTLY, 0),
    "poison_restarts": (EXACTLY, 0),
    "memory_growth": (AT_MOST, 1.05),
    "siege_p99_ratio": (AT_MOST, 3),
    "siege_failed": (EXACTLY, 0),
    "siege_memory_bytes": (AT_MOST, 50_000_000),
    "siege_ended": (EXACTLY, 0),
}
"""What the long form has to reach; the quick form makes fewer kills and fuzzes less."""
QUANTITIES = ("kills", "fuzzed")
"""Targets that the quick form does not try for."""


class Figures:
    """Prints figures as they are found, and keeps them for `write`."""

    def __init__(self, *, quick: bool) -> None:
        self._quick = quick
        self.found: dict[str, float | bool | str] = {
            "quick": quick,
            "python": platform.python_version(),
            "machine": platform.platform(),
            "cores": os.cpu_count() or 0,
        }
        self._begin = time.monotonic()
        self.missed: list[str] = []
        """Keys whose target was not reached, and parts that failed."""

    def title(self, name: str, what: str) -> None:
        """Begin a part, and keep how busy the machine is before it."""
        self.found[f"load_before_{name}"] = os.getloadavg()[0]
        print(f"\n{name}: {what}  (after {time.monotonic() - self._begin:.0f} s)", flush=True)

    def say(self, key: str, value: float | bool, note: str = "") -> None:
        """Print a figure under its key, with its target where it has one."""
        self.found[key] = value
        verdict = ""
        if key in TARGETS:
            holds, bound = TARGETS[key]
            met = holds(value, bound)
            spared = self._quick and key in QUANTITIES
            verdict = f"{_SIGNS[holds]} {bound:g}  {'met' if met else 'not tried' if spared else 'MISSED'}"
            if not met and not spared:
                self.missed.append(key)
        print(f"  {key:34} {_short(value):>10}  {verdict:18} {note}".rstrip(), flush=True)

    def fail(self, part: str, error: Exception) -> None:
        """Keep under `failed_PART` why a part did not come to its end."""
        self.found[f"failed_{part}"] = f"{type(error).__name__}: {error}"
        self.missed.append(part)
        print(f"  {part} failed: {type(error).__name__}", flush=True)

    def write(self, path: Path | None) -> None:
        """Write all keys as one JSON object, if there is a place for it."""
        self.found["seconds"] = round(time.monotonic() - self._begin)
        if path is not None:
            path.write_text(json.dumps(self.found, indent=2) + "\n")


def _short(value: float | bool) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
