"""What a benchmark has found: a line for each figure on the terminal, and flat keys in a file."""

import argparse
import json
import platform
from dataclasses import dataclass
from pathlib import Path

from harness.turns import Spread


@dataclass(frozen=True)
class Target:
    """A bound that a figure is to keep; printed, never enforced."""

    bound: float
    least: bool = False
    """Whether the figure is to be at least the bound, not at most."""

    def __str__(self) -> str:
        return f"{'>=' if self.least else '<='} {self.bound:g}"

    def met(self, value: float) -> bool:
        """Return whether a value keeps the bound."""
        return value >= self.bound if self.least else value <= self.bound


class Table:
    """Prints figures as they are found, and keeps them for `write`."""

    def __init__(self, targets: dict[str, Target]) -> None:
        self._targets = targets
        self._found: dict[str, float | bool | str] = {}

    def title(self, text: str) -> None:
        """Begin a part."""
        print(f"\n{text}", flush=True)

    def word(self, text: str) -> None:
        """Print what is to be known of the figures beside them, or why there is none."""
        print(f"  {text}", flush=True)

    def say(self, key: str, value: float | Spread, note: str = "") -> None:
        """Print a figure under its key, with its spread over rounds and its target where it has them."""
        spread = ""
        if isinstance(value, Spread):
            spread = f"[{_short(value.least)} .. {_short(value.most)}]"
            self._found |= {f"{key}_least": value.least, f"{key}_most": value.most}
            value = value.middle
        self._found[key] = value
        verdict = ""
        if (target := self._targets.get(key)) is not None:
            verdict = f"{target!s:8} {'met' if target.met(value) else 'MISSED'}"
        print(f"  {key:38} {_short(value):>9} {spread:22} {verdict:16} {note}".rstrip(), flush=True)

    def fact(self, key: str, value: float | bool | str) -> None:
        """Keep what is not a figure, unprinted."""
        self._found[key] = value

    def write(self, path: Path | None) -> None:
        """Write all keys as one JSON object, if there is a place for it."""
        if path is not None:
            machine = {"python": platform.python_version(), "machine": platform.platform()}
            path.write_text(json.dumps(machine | self._found, indent=2) + "\n")


def options(parser: argparse.ArgumentParser, quick: str = "smaller sizes and fewer rounds, less than a minute") -> None:
    """Add what every benchmark takes; `quick` says what its quick form leaves out."""
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, one flat object")


def _short(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
