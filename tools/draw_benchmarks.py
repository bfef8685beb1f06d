"""Write the saved results of benchmarks as tables into docs/benchmarks.md, and plot each figure over time.

    python tools/draw_benchmarks.py            write the files that change, and print their paths
    python tools/draw_benchmarks.py --check    write nothing; exit code 1 if a file would change

It reads `benchmarks/results/<benchmark>/*.json`, which `python -m benchmarks.<benchmark> --save` adds;
benchmarks/harness/results.py describes the files. The tables of a benchmark are between two comments of the page, one
for each machine. They have the figures with a target, the ratios, the percentages and the keys in ALSO_SHOWN. Of each
key they have the newest figure of the long form, or of the quick form if there is no other. The output depends on
nothing but the files.
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- results of {}: written by tools/draw_benchmarks.py -->\n", "<!-- end of results -->\n"
BLOCK = re.compile(BEGIN.replace("{}", r"(\w+)") + "(?s:.*?)" + END)
ALSO_SHOWN = {
    "replay": (
        *("sample_hot_seconds", "store_fraction_cold", "memmap_seconds_cold", "disk_seconds_cold"),
        *("add_processor_seconds", "index_bytes_per_event_memory", "faiss_bytes_per_event"),
    ),
    "replay_disk": tuple(
        f"{key}_{store}"
        for store in ("small", "large", "disk", "cold")
        for key in ("steps_per_second", "stall_fraction")
    ),
    "forgetting": ("elec2_none", "elec2_no_change", "flights_none", "flights_no_change"),
    "learner": tuple(
        f"{model}_steps_per_second_{arm}" for model in ("mlp", "convnet") for arm in ("learner", "baseline")
    ),
    "faults": ("recovery_seconds_p95_alone",),
    "ingest": tuple(f"{form}{kind}_events_per_second" for form in ("json_schema", "json") for kind in ("", "_wide")),
    "serving": ("swap_disk_bytes", "freshness_p50_seconds"),
}
"""Keys without a target that are no ratios."""
CHANGED = "2026-11-29"
"""When code that benchmarks measure was changed last in a way that may change figures."""
OLDER = "\N{DAGGER}"
"""Marks figures from before that."""

WIDTH, PLOT_H, LINE_H = 720, 200, 19
LEFT, RIGHT, TOP, BOTTOM = 74, 24, 46, 34
COLOURS = 4
STYLE = """
    svg { --back: #ffffff; --ink: #1f2328; --soft: #59636e; --line: #d1d9e0 }
    svg { --c0: #1f6fc4; --c1: #d97a00; --c2: #16865a; --c3: #b8399a }
    @media (prefers-color-scheme: dark) {
      svg { --back: #12161c; --ink: #e6edf3; --soft: #a2adb9; --line: #343d48 }
      svg { --c0: #62a8f5; --c1: #f0a33a; --c2: #3fc28d; --c3: #e680cf }
    }
    text { font: 12.5px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: var(--soft) }
    .head { font-size: 15px; font-weight: 600; fill: var(--ink) }
    .right { text-anchor: end } .middle { text-anchor: middle }
    path { fill: none } .grid { stroke: var(--line) }
    .target { stroke: var(--ink); stroke-dasharray: 5 4 } .of-target { fill: var(--ink) }
    .s0 { stroke: var(--c0) } .s1 { stroke: var(--c1) } .s2 { stroke: var(--c2) } .s3 { stroke: var(--c3) }
    .f0 { fill: var(--c0) } .f1 { fill: var(--c1) } .f2 { fill: var(--c2) } .f3 { fill: var(--c3) }
    .hollow { fill: var(--back) } circle { stroke-width: 1.8 } .series { stroke-width: 1.8 }
"""


@dataclass(frozen=True)
class Figure:
    """A figure of one result."""

    key: str
    value: float
    unit: str
    least: float | None
    most: float | None
    target: str | None
    met: bool | None
    remark: str = ""

    @property
    def bound(self) -> float | None:
        """The number of the target."""
        return None if self.target is None else float(self.target.split()[1])


@dataclass(frozen=True)
class Result:
    """A saved result."""

    benchmark: str
    time: datetime
    revision: str
    form: str
    machine: str
    """The name, as in file names."""
    description: str
    """The machine in words."""
    versions: str
    figures: Sequence[Figure]

    @property
    def date(self) -> str:
        """The day, in UTC."""
        return self.time.strftime("%Y-%m-%d")


@dataclass(frozen=True)
class Point:
    """A figure of a plot."""

    result: Result
    figure: Figure

    @property
    def values(self) -> list[float]:
        """The figure, and the ends of its spread."""
        figure = self.figure
        return [number for number in (figure.value, figure.least, figure.most) if number is not None]


def read(folder: Path) -> list[Result]:
    """Return all results, benchmark by benchmark, the oldest first."""
    results = [_result(path) for path in sorted(folder.glob("*/*.json"))]
    return sorted(results, key=lambda result: (result.benchmark, result.time, result.machine, result.form))


def _result(path: Path) -> Result:
    document = json.loads(path.read_text(encoding="utf-8"))
    machine = document["machine"]
    time = datetime.fromisoformat(document["time"])
    return Result(
        benchmark=document["benchmark"],
        time=time if time.tzinfo else time.replace(tzinfo=UTC),
        revision=document["revision"] or "unknown",
        form=document["parameters"]["form"],
        machine=machine["name"],
        description=f"{machine['cpu']}, {machine['cores']} cores, {machine['gpu'] or 'no GPU'}",
        versions=f"Python {machine['python']}, torch {machine['torch']}",
        figures=[Figure(**figure) for figure in document["figures"] if figure["value"] is not None],
    )


def key_figures(results: Sequence[Result]) -> list[str]:
    """Return the keys of one benchmark that are shown: those with a target first."""
    figures = [figure for result in reversed(results) for figure in result.figures]
    also = ALSO_SHOWN.get(results[0].benchmark, ())
    targets = [figure.key for figure in figures if figure.target is not None]
    others = [figure.key for figure in figures if figure.unit in ("ratio", "%") or figure.key in also]
    return list(dict.fromkeys(targets + others))


def tables(results: Sequence[Result], images: str) -> Iterator[str]:
    """Yield the lines of the tables of one benchmark, one for each machine; keys link to the plots in a folder."""
    keys = key_figures(results)
    for machine in sorted({result.machine for result in results}):
        rows = [(key, point) for key in keys if (point := _newest(results, machine, key)) is not None]
        if not rows:
            continue
        newest = max((point.result for _, point in rows), key=lambda result: result.time)
        yield from ("", f"{newest.description}; {newest.versions}:", "")
        yield "| key | figure | unit | of one round | target | remark | form | measured |"
        yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
        for key, point in rows:
            yield _row(point, f"{images}/{file_name(results[0].benchmark, key)}")


def _row(point: Point, image: str) -> str:
    figure, result = point.figure, point.result
    spread = "" if figure.least is None or figure.most is None else f"{short(figure.least)} to {short(figure.most)}"
    words = re.sub("^=", "exactly", (figure.target or "").replace(">=", "at least").replace("<=", "at most"))
    target = words and f"{words}: {'met' if figure.met else 'missed'}"
    cells = [f"[`{figure.key}`]({image})", short(figure.value), figure.unit, spread, target]
    measured = f"{result.date}, {result.revision}{f' {OLDER}' if result.date < CHANGED else ''}"
    cells += [figure.remark.replace("|", ","), result.form, measured]
    return f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |")


def _newest(results: Sequence[Result], machine: str, key: str) -> Point | None:
    """Return the newest figure of the long form on a machine, or else of the quick form."""
    points = [point for point in _points(results, key) if point.result.machine == machine]
    return max(points, key=lambda each: (each.result.form != "quick", each.result.time), default=None)


def _points(results: Sequence[Result], key: str) -> list[Point]:
    return [Point(result, figure) for result in results for figure in result.figures if figure.key == key]


def _by_benchmark(results: Sequence[Result]) -> list[tuple[str, list[Result]]]:
    return [(name, list(group)) for name, group in groupby(results, key=lambda result: result.benchmark)]


def file_name(benchmark: str, key: str) -> str:
    """Return the file name of a figure's plot."""
    return f"{benchmark}-{re.sub(r'[^A-Za-z0-9_.-]+', '-', key)}.svg"


def plot(benchmark: str, points: Sequence[Point]) -> Iterator[str]:
    """Yield the lines of an SVG: a figure over time, a line for each machine and form, with its spread and target."""
    newest = points[-1].figure
    series = sorted({(point.result.machine, point.result.form) for point in points})
    colour = {machine: at % COLOURS for at, machine in enumerate(dict.fromkeys(machine for machine, _ in series))}
    height = TOP + PLOT_H + BOTTOM + LINE_H * len(series) + 8
    title = escape(f"{benchmark}: {newest.key}")
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="title">'
    yield f'<title id="title">{title}, over time</title>'
    yield f"<style>{STYLE}</style>"
    yield f'<rect width="{WIDTH}" height="{height}" rx="10" style="fill: var(--back)"/>'
    yield _text(14, 26, f"{title}{escape(f', {newest.unit}' if newest.unit else '')}", "head")
    values = [value for point in points for value in point.values]
    scale = Scale.over([*values, *([newest.bound] if newest.bound is not None else [])])
    for tick in scale.ticks:
        y = scale.y(tick)
        yield f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>'
        yield _text(LEFT - 8, y + 4, f"{tick:g}", "right")
    dates = Dates([point.result.time for point in points])
    for x, date in dates.labels:
        yield _text(x, TOP + PLOT_H + 22, date, "middle")
    if newest.bound is not None:
        y = scale.y(newest.bound)
        yield f'<path class="target" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>'
        yield _text(WIDTH - RIGHT, y - 5, escape(f"target {newest.target}"), "right of-target")
    for at, (machine, form) in enumerate(series):
        own = [point for point in points if (point.result.machine, point.result.form) == (machine, form)]
        yield from _series(own, colour[machine], scale, dates)
        y = TOP + PLOT_H + BOTTOM + LINE_H * at + 14
        yield _dot(LEFT + 4, y - 4, colour[machine], hollow=form == "quick")
        yield _text(LEFT + 16, y, escape(f"{own[-1].result.description}, {form} form"))
    yield "</svg>"


def _series(points: Sequence[Point], colour: int, scale: "Scale", dates: "Dates") -> Iterator[str]:
    positions = [(dates.x(point.result.time), scale.y(point.figure.value)) for point in points]
    if len(positions) > 1:
        yield f'<path class="series s{colour}" d="M{" ".join(f"{x:.1f} {y:.1f}" for x, y in positions)}"/>'
    for (x, y), point in zip(positions, points, strict=True):
        least, most = point.figure.least, point.figure.most
        if least is not None and most is not None:
            yield f'<path class="s{colour}" d="M{x:.1f} {scale.y(least):.1f}V{scale.y(most):.1f}"/>'
        yield _dot(x, y, colour, hollow=point.result.form == "quick")


def _dot(x: float, y: float, colour: int, *, hollow: bool) -> str:
    fill = "hollow" if hollow else f"f{colour}"
    return f'<circle class="s{colour} {fill}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>'


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    of_kind = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{of_kind}>{text}</text>'


@dataclass(frozen=True)
class Scale:
    """The vertical axis: from the first of its ticks to the last."""

    ticks: Sequence[float]

    @classmethod
    def over(cls, values: Sequence[float]) -> "Scale":
        """Return a scale for all values, with about five ticks at round numbers."""
        low, high = min(values), max(values)
        if low == high:
            low, high = (low - abs(low) / 2, high + abs(high) / 2) if low else (-1.0, 1.0)
        rough = (high - low) / 4
        power = 10.0 ** math.floor(math.log10(rough))
        step = power * next(factor for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        return cls([round(step * n, 12) for n in range(first, last + 1)])

    def y(self, value: float) -> float:
        """Return the vertical position of a value."""
        return TOP + PLOT_H * (1 - (value - self.ticks[0]) / (self.ticks[-1] - self.ticks[0]))


class Dates:
    """The horizontal axis."""

    _ROOM = 90

    def __init__(self, times: Sequence[datetime]) -> None:
        self._first, self._last = min(times), max(times)
        self.labels: list[tuple[float, str]] = []
        """Positions and days; a day that would overlap the one before is left out."""
        for time in sorted(times):
            x, date = self.x(time), time.strftime("%Y-%m-%d")
            if not self.labels or (date != self.labels[-1][1] and x - self.labels[-1][0] >= self._ROOM):
                self.labels.append((x, date))

    def x(self, time: datetime) -> float:
        """Return the horizontal position of a time; a single one is in the middle."""
        span = (self._last - self._first).total_seconds()
        part = (time - self._first).total_seconds() / span if span else 0.5
        return LEFT + 30 + part * (WIDTH - LEFT - RIGHT - 60)


def short(value: float) -> str:
    """Return a number with three digits, as a benchmark prints it."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def outputs(root: Path) -> dict[Path, str | None]:
    """Return the text of each file to write; None for the plot of a figure that is not shown any more.

    Raises:
        ValueError: the page lacks the comments for the tables of a benchmark.
    """
    page, folder = root / "docs" / "benchmarks.md", root / "docs" / "images" / "benchmarks"
    results = dict(_by_benchmark(read(root / "benchmarks" / "results")))
    text = page.read_text(encoding="utf-8")
    missing = set(results) - set(BLOCK.findall(text))
    if missing:
        lines = BEGIN.format(min(missing)) + END
        raise ValueError(f"{page} lacks these lines, between which the tables of {min(missing)} are written:\n{lines}")
    written: dict[Path, str | None] = dict.fromkeys(sorted(folder.glob("*.svg")))
    written[page] = BLOCK.sub(lambda block: _block(block[1], results.get(block[1], [])), text)
    for benchmark, of_benchmark in results.items():
        for key in key_figures(of_benchmark):
            lines = "\n".join(plot(benchmark, _points(of_benchmark, key))) + "\n"
            written[folder / file_name(benchmark, key)] = lines
    return written


def _block(benchmark: str, results: Sequence[Result]) -> str:
    lines = tables(results, "images/benchmarks") if results else ("", "There are no saved results.")
    return "\n".join([BEGIN.format(benchmark).rstrip(), *lines, "", END])


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a file would change")
    options = parser.parse_args(arguments)
    changed = 0
    for path, text in outputs(root).items():
        if text == (path.read_text(encoding="utf-8") if path.exists() else None):
            continue
        changed += 1
        print(path.relative_to(root))
        if options.check:
            continue
        if text is None:
            path.unlink()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return 1 if options.check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
