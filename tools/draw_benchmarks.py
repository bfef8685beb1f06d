"""Write the newest saved figures of benchmarks into docs/benchmarks.md, and draw them where the docs are built.

    python tools/draw_benchmarks.py            write the page, and print its path if it changed
    python tools/draw_benchmarks.py --check    write nothing; exit code 1 if the page would change
    python tools/draw_benchmarks.py --show [BENCHMARK ...]   print all newest figures, those without a target too

It reads `benchmarks/results/<benchmark>.jsonl`, to which `python -m benchmarks.<benchmark> --save` appends;
benchmarks/harness/results.py describes the lines. The page names the figures that it shows in comments:

    <!-- figures: BENCHMARK KEY ... -->    a list of these figures
    <!-- missed -->                        the other newest figures that missed their target

What is between such a comment and `<!-- end -->` is written here, and depends on nothing but the files. The newest
figure of a key is that of its last long run, or of its last quick run if there is no long one.

mkdocs.yml names this file as a hook too: it adds a plot below each list. No plot is stored in the repository.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
BLOCK = re.compile(r"<!-- (figures: (?P<names>[^>]+)|missed) -->\n(?s:.*?)<!-- end -->\n")
CHANGED = "2026-11-30"
"""When code that benchmarks measure was changed last in a way that may change figures."""
OLDER = "\N{DAGGER}"
"""Marks figures from before that."""

WIDTH, LEFT, RIGHT, ROW_H = 720, 260, 130, 30
STYLE = """
    svg { --back: #ffffff; --ink: #1f2328; --soft: #59636e; --line: #d1d9e0; --met: #1f6fc4; --missed: #c4461f }
    @media (prefers-color-scheme: dark) {
      svg { --back: #12161c; --ink: #e6edf3; --soft: #a2adb9; --line: #343d48; --met: #62a8f5; --missed: #f08b5f }
    }
    text { font: 12.5px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: var(--ink) }
    .right { text-anchor: end } .soft { fill: var(--soft) }
    .bar { fill: var(--met); opacity: 0.85 } .missed { fill: var(--missed) }
    path { fill: none; stroke: var(--ink) } .axis { stroke: var(--line) } .target { stroke-dasharray: 4 3 }
"""


@dataclass(frozen=True)
class Figure:
    """The newest figure of a key."""

    key: str
    value: float
    unit: str
    least: float | None
    most: float | None
    target: str | None
    met: bool | None
    remark: str
    date: str
    """The day, in UTC."""
    form: str
    machine: str

    @property
    def bound(self) -> float | None:
        """The number of the target."""
        return None if self.target is None else float(self.target.split()[1])

    @property
    def shown(self) -> str:
        """The value, with its unit where the key does not say it."""
        return f"{short(self.value)}{f' {self.unit}' if self.unit in ('%', 's', 'points') else ''}"

    @property
    def spread(self) -> str:
        """The smallest and the largest value of one round."""
        return "" if self.least is None or self.most is None else f" ({short(self.least)}..{short(self.most)})"

    @property
    def bound_in_words(self) -> str:
        """The target in words."""
        return (self.target or "").replace(">=", "≥").replace("<=", "≤")

    @property
    def measured(self) -> str:
        """The day and the machine, with a mark if the code is newer."""
        quick = ", quick" if self.form == "quick" else ""
        return f"{self.date}{f' {OLDER}' if self.date < CHANGED else ''}, {self.machine}{quick}"


def newest(path: Path) -> dict[str, Figure]:
    """Return the newest figures of the benchmark that a file is of, by key."""
    runs = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    runs.sort(key=lambda run: (run["parameters"]["form"] != "quick", run["time"]))
    return {
        figure["key"]: _figure(figure, run)
        for run in runs
        for figure in run["figures"]
        if figure["value"] is not None  # null for what is no finite number
    }


def _figure(figure: dict[str, Any], run: dict[str, Any]) -> Figure:
    machine = re.sub(r" \d+GB.*", "", run["machine"]["gpu"] or run["machine"]["cpu"])
    return Figure(**{"remark": ""} | figure, date=run["time"][:10], form=run["parameters"]["form"], machine=machine)


def lines(figures: Iterable[Figure]) -> Iterator[str]:
    """Yield a line of a list for each figure."""
    for figure in figures:
        verdict = f", target {figure.bound_in_words}: {'met' if figure.met else '**missed**'}" if figure.target else ""
        yield f"* `{figure.key}`: **{figure.shown}**{figure.spread}{verdict}; {figure.measured}"


def plot(title: str, figures: Sequence[Figure]) -> Iterator[str]:
    """Yield the lines of an SVG: a bar for each figure that has the unit of the first one, with spread and target."""
    figures = [figure for figure in figures if figure.unit == figures[0].unit]
    numbers = [number for figure in figures for number in (figure.value, figure.least, figure.most, figure.bound)]
    known = [0.0, *(number for number in numbers if number is not None)]
    low, high = min(known), max(known)

    def x(number: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (number - low) / ((high - low) or 1)

    height = 46 + ROW_H * len(figures)
    name = escape(f"{title}, {figures[0].unit}" if figures[0].unit else title)
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="title">'
    yield f'<title id="title">{name}</title>'
    yield f"<style>{STYLE}</style>"
    yield f'<rect width="{WIDTH}" height="{height}" rx="10" style="fill: var(--back)"/>'
    yield f'<text x="14" y="24">{name}; a dashed line is a target</text>'
    yield f'<path class="axis" d="M{x(0):.1f} 36V{height - 8}"/>'
    for at, figure in enumerate(figures):
        y = 38 + ROW_H * at
        start, end = sorted((x(0), x(figure.value)))
        kind = "bar missed" if figure.met is False else "bar"
        yield f'<text class="right" x="{LEFT - 10}" y="{y + 18}">{escape(figure.key)}</text>'
        yield f'<rect class="{kind}" x="{start:.1f}" y="{y + 6}" width="{end - start:.1f}" height="16"/>'
        if figure.least is not None and figure.most is not None:
            yield f'<path d="M{x(figure.least):.1f} {y + 14}H{x(figure.most):.1f}"/>'
        if figure.bound is not None:
            yield f'<path class="target" d="M{x(figure.bound):.1f} {y}V{y + ROW_H - 2}"/>'
        shown = escape(f"{short(figure.value)}{', missed' if figure.met is False else ''}")
        yield f'<text class="soft" x="{WIDTH - RIGHT + 10}" y="{y + 18}">{shown}</text>'
    yield "</svg>"


def short(value: float) -> str:
    """Return a number with three digits, as a benchmark prints it."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def written(text: str, results: Path = RESULTS) -> str:
    """Return a page with the newest figures between its comments.

    Raises:
        ValueError: the page names a figure that no result has.
    """
    known = {path.stem: newest(path) for path in sorted(results.glob("*.jsonl"))}
    named = {tuple(found["names"].split()) for found in BLOCK.finditer(text) if found["names"]}
    shown = {(benchmark, key) for benchmark, *keys in named for key in keys}
    unknown = [f"{benchmark} {key}" for benchmark, key in sorted(shown) if key not in known.get(benchmark, {})]
    if unknown:
        raise ValueError(f"no saved result has these figures of the page: {', '.join(unknown)}")
    missed = [
        f"* {benchmark}: `{figure.key}` {short(figure.value)}, target {figure.bound_in_words}"
        for benchmark, of_benchmark in known.items()
        for figure in of_benchmark.values()
        if figure.met is False and (benchmark, figure.key) not in shown
    ]

    def block(found: re.Match[str]) -> str:
        begin = found[0][: found[0].index("-->") + 3]
        if found["names"] is None:
            return "\n".join([begin, "", *(missed or ["None."]), "", "<!-- end -->\n"])
        benchmark, *keys = found["names"].split()
        return "\n".join([begin, "", *lines(known[benchmark][key] for key in keys), "", "<!-- end -->\n"])

    return BLOCK.sub(block, text)


def on_files(files: "Files", config: "MkDocsConfig") -> "Files":
    """Add the plots to the site."""
    from mkdocs.structure.files import File

    for found in BLOCK.finditer(PAGE.read_text(encoding="utf-8")):
        if found["names"]:
            benchmark, *keys = found["names"].split()
            known = newest(RESULTS / f"{benchmark}.jsonl")
            content = "\n".join(plot(benchmark, [known[key] for key in keys])) + "\n"
            files.append(File.generated(config, _uri(found["names"]), content=content))
    return files


def on_page_markdown(markdown: str, page: "Page", config: "MkDocsConfig", files: "Files") -> str:  # noqa: ARG001
    """Return the page of benchmarks with a plot below each list, and other pages as they are."""
    if page.file.src_uri != PAGE.name:
        return markdown
    return BLOCK.sub(
        lambda f: f"{f[0]}\n![{f['names'].split()[0]}]({_uri(f['names'])})\n" if f["names"] else f[0], markdown
    )


def _uri(names: str) -> str:
    benchmark, key, *_ = names.split()
    return f"images/benchmarks/{benchmark}-{key}.svg"


def main(arguments: Sequence[str] | None = None, page: Path = PAGE, results: Path = RESULTS) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the page would change")
    parser.add_argument("--show", nargs="*", metavar="BENCHMARK", help="print all newest figures")
    options = parser.parse_args(arguments)
    if options.show is not None:
        for name in options.show or sorted(path.stem for path in results.glob("*.jsonl")):
            print("\n".join([f"## {name}", "", *lines(newest(results / f"{name}.jsonl").values()), ""]))
        return 0
    before = page.read_text(encoding="utf-8")
    after = written(before, results)
    if after == before:
        return 0
    print(page)
    if not options.check:
        page.write_text(after, encoding="utf-8")
    return 1 if options.check else 0


if __name__ == "__main__":
    sys.exit(main())
