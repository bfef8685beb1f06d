"""The figures of a benchmark: a line for each on the terminal, and JSON.

Each benchmark takes `--quick` or `--smoke`, `--only PART ...`, `--json FILE` and `--save [DIR]`. `--json` writes flat
keys. `--save` appends a line to `benchmarks/results/<benchmark>.jsonl`, or to the same file in DIR.
`tools/draw_benchmarks.py` reads these files. A line is an object with:

    benchmark   the script's name
    time        UTC, ISO 8601
    revision    of git, with a `+` where files differ from it; null outside a checkout
    parameters  `form` (`quick` or `long`), and the options of the command line
    machine     `name`, `cpu`, `cores`, `gpu` (null: none), `system`, `python`, `torch`, `kafka`
    facts       values that are not figures, such as the load before a part
    figures     a list of `key`, `value`, `unit`, `least` and `most` of one round, `target`, `met` and `remark`;
                null for those that a figure does not have
"""

import argparse
import importlib.metadata
import json
import math
import os
import platform
import re
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import IntEnum
from pathlib import Path
from typing import Any

from benchmarks.harness.interleave import Spread

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks" / "results"
UNITS = {
    "ratio": "_over_|_growth|_ratio",
    "bytes per event": "bytes_per_event",
    "bytes": "bytes",
    "1/s": "_per_second",
    "s": "seconds",
    "fraction": "fraction|recall|_used_by_",
}
"""The unit, and the pattern of the keys that have it; the first match counts."""
_CLIENTS = ("kafka-python", "confluent-kafka", "noida-db")


class Form(IntEnum):
    """How large a benchmark is: an index into the sizes of its forms."""

    SMOKE = 0
    QUICK = 1
    LONG = 2


@dataclass(frozen=True)
class Target:
    """A bound of a figure: an upper one, a lower one with `least`, or the value itself with `exact`."""

    bound: float
    least: bool = False
    exact: bool = False

    def __str__(self) -> str:
        return f"{'=' if self.exact else '>=' if self.least else '<='} {self.bound:g}"

    def met(self, value: float) -> bool:
        """Return whether a value satisfies the bound."""
        if self.exact:
            return value == self.bound
        return value >= self.bound if self.least else value <= self.bound


@dataclass(frozen=True)
class Figure:
    """A saved figure."""

    key: str
    value: float | None
    """None for NaN and infinity."""
    unit: str
    least: float | None
    most: float | None
    target: str | None
    met: bool | None
    remark: str


class Results:
    """Prints figures as they are measured, and writes them to files."""

    def __init__(self, benchmark: str, targets: dict[str, Target]) -> None:
        self._benchmark, self._targets = benchmark, targets
        self._machine = machine()  # before a benchmark leaves some of its cores to others
        self._flat: dict[str, float | bool | str | None] = {}
        self._facts: dict[str, float | bool | str | None] = {}
        self._figures: list[Figure] = []
        if hasattr(os, "getloadavg"):
            self.fact("load_at_start", os.getloadavg()[0])
        self._saved: int | None = None
        """The number of the line that `write` appended."""

    def title(self, text: str) -> None:
        """Print the title of a part."""
        print(f"\n{text}", flush=True)

    def remark(self, text: str) -> None:
        """Print a sentence about the figures of this part, or why there are none."""
        print(f"  {text}", flush=True)

    def add(self, key: str, value: float | Spread, remark: str = "", unit: str | None = None) -> None:
        """Print a figure under its key, with its spread over rounds and its target where it has them.

        The unit is that of the key's name, if none is given.
        """
        spread, least, most = "", None, None
        if isinstance(value, Spread):
            value, least, most = value.middle, value.least, value.most
            spread = f"[{short(least)} .. {short(most)}]"
            self._flat |= {f"{key}_least": least, f"{key}_most": most}
        self._flat[key] = value
        target = self._targets.get(key)
        met = None if target is None else target.met(value)
        verdict = "" if target is None else f"{target!s:8} {'met' if met else 'MISSED'}"
        described = None if target is None else str(target)
        unit = unit_of(key) if unit is None else unit
        self._figures.append(Figure(key, finite(value), unit, finite(least), finite(most), described, met, remark))
        print(f"  {key:38} {short(value):>9} {spread:22} {verdict:16} {remark}".rstrip(), flush=True)

    @property
    def missed(self) -> list[str]:
        """Keys whose target was missed."""
        return [figure.key for figure in self._figures if figure.met is False]

    def table(self) -> None:
        """Print a line for each target: met, missed or not measured."""
        print("\ntargets", flush=True)
        values = {figure.key: figure for figure in self._figures}
        for key, target in self._targets.items():
            figure = values.get(key)
            value = "" if figure is None or figure.value is None else short(figure.value)
            verdict = "not measured" if figure is None else "met" if figure.met else "MISSED"
            print(f"  {key:38} {value:>9} {target!s:9} {verdict}", flush=True)

    def fact(self, key: str, value: float | bool | str | None) -> None:
        """Save a value that is not a figure; it is not printed."""
        self._flat[key] = self._facts[key] = value

    def write(self, options: argparse.Namespace) -> None:
        """Write the files of the command line; another call replaces what this run wrote."""
        if options.json is not None:
            described = {"python": platform.python_version(), "machine": platform.platform()}
            options.json.write_text(json.dumps(described | self._flat, indent=2) + "\n")
        if options.save is not None:
            path = options.save / f"{self._benchmark}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
            if self._saved is None:
                self._saved = len(lines)
                print(f"\nsaved in {path}", flush=True)
            lines[self._saved : self._saved + 1] = [json.dumps(self.document(options), allow_nan=False) + "\n"]
            path.write_text("".join(lines), encoding="utf-8")

    def document(self, options: argparse.Namespace) -> dict[str, Any]:
        """Return what `--save` writes."""
        left_out = {"json", "save", "form"}
        given = {key: value for key, value in vars(options).items() if key not in left_out and value is not None}
        parameters = {key: str(value) if isinstance(value, Path) else value for key, value in given.items()}
        return {
            "benchmark": self._benchmark,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "revision": revision(),
            "parameters": {"form": options.form.name.lower()} | parameters,
            "machine": self._machine,
            "facts": self._facts,
            "figures": [asdict(figure) for figure in self._figures],
        }


def options(
    parser: argparse.ArgumentParser, parts: Iterable[str], quick: str = "smaller sizes and fewer rounds"
) -> None:
    """Add the options of every benchmark, with the `form` that was chosen; `quick` is the help of `--quick`."""
    parser.set_defaults(form=Form.LONG)
    parser.add_argument("--quick", dest="form", action="store_const", const=Form.QUICK, help=quick)
    smoke = "as small as it works, to see that it does; its figures mean nothing"
    parser.add_argument("--smoke", dest="form", action="store_const", const=Form.SMOKE, help=smoke)
    parser.add_argument("--only", nargs="+", choices=list(parts), metavar="PART", help=", ".join(parts))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, one flat object")
    parser.add_argument(
        "--save",
        type=Path,
        nargs="?",
        const=FOLDER,
        metavar="DIR",
        help="append the figures, the machine and the revision to a file there, by default in benchmarks/results",
    )


def machine() -> dict[str, Any]:
    """Describe this machine, and the versions of Python, torch and the Kafka clients."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    cpu, cores = _cpu(), len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    words = f"{cpu} {cores} cores {gpu or ''}"
    return {
        "name": re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-"),
        "cpu": cpu,
        "cores": cores,
        "gpu": gpu,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kafka": ", ".join(f"{name} {version}" for name in _CLIENTS if (version := _version(name))),
    }


def _cpu() -> str:
    """Return the model of the processor, without trademarks."""
    path = Path("/proc/cpuinfo")
    match = re.search(r"^model name\s*: (.+)$", path.read_text(), re.MULTILINE) if path.exists() else None
    name = match[1] if match else platform.processor() or platform.machine()
    return re.sub(r"\s+", " ", re.sub(r"\((R|TM|tm)\)|\bCPU\b|\bProcessor\b|@.*", "", name)).strip()


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def revision() -> str | None:
    """Return the revision of the checkout, with a `+` where tracked files differ from it; None outside a checkout."""
    try:
        number = _git("rev-parse", "--short=10", "HEAD")
        return number + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def unit_of(key: str) -> str:
    """Return the unit of a figure from its key; empty for a count."""
    return next((unit for unit, pattern in UNITS.items() if re.search(pattern, key)), "")


def finite(value: float | None) -> float | None:
    """Return a number, or None for NaN and infinity, which JSON does not have."""
    return value if value is not None and math.isfinite(value) else None


def short(value: float) -> str:
    """Return a number with three digits, or `true` or `false`."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
