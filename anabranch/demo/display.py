"""What the demo shows while it runs: a live panel on a terminal, else a plain line every few seconds."""

import sys
import time
from collections import deque
from pathlib import Path
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from anabranch.demo.dataset import CLASSES
from anabranch.demo.report import percent, seconds
from anabranch.demo.snapshot import DemoSnapshot

_LINE_SECONDS = 3.0
_HISTORY_SECONDS = 2.0
_BLOCKS = " ▁▂▃▄▅▆▇█"
_BAR_CELLS = 20
_NOW = "each new digit before it is learned, so it falls when a class begins"


class Display(Protocol):
    """Shows figures; a context manager."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def show(self, figures: DemoSnapshot) -> None:
        """Show the figures of this moment; called about four times a second."""
        ...


class PlainLines:
    """One line every few seconds on stderr."""

    def __init__(self) -> None:
        self._next = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, figures: DemoSnapshot) -> None:
        """Write the line when it is due."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _LINE_SECONDS
        sys.stderr.write(plain_line(figures) + "\n")
        sys.stderr.flush()


class LivePanel:
    """A panel that is sampled over and over."""

    def __init__(self, console: Console, url: str, model: str, request: Path) -> None:
        self._url = url
        self._try = f"curl -s {url}/v2/models/{model}/infer -d @{request}"
        self._live = Live(console=console, auto_refresh=False)
        self._old: deque[float] = deque(maxlen=30)
        self._baseline_old: deque[float] = deque(maxlen=30)
        self._next_history = 0.0

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, figures: DemoSnapshot) -> None:
        """Render the panel."""
        if time.monotonic() >= self._next_history:
            self._next_history = time.monotonic() + _HISTORY_SECONDS
            for history, baseline in ((self._old, False), (self._baseline_old, True)):
                old = figures.accuracy("old", baseline=baseline)
                if old is not None:
                    history.append(old)
        self._live.update(self._render(figures), refresh=True)

    def _render(self, figures: DemoSnapshot) -> RenderableType:
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="bold", no_wrap=True)
        rows.add_column(overflow="fold")
        rows.add_row("stream", _stream(figures))
        rows.add_row("outcomes", _outcomes(figures))
        rows.add_row("accuracy", _bar("now", figures.accuracy("now"), "cyan"))
        rows.add_row("", Text(f"{_NOW}{_against(figures, 'now')}", style="dim"))
        rows.add_row("", _bar("old classes", figures.accuracy("old"), "green", self._old))
        if figures.baseline is not None:
            rows.add_row("", _bar("no replay", figures.accuracy("old", baseline=True), "red", self._baseline_old))
        rows.add_row("replay", _replay(figures))
        rows.add_row("serving", _serving(figures))
        rows.add_row("gate", _gate(figures))
        rows.add_row("requests", _requests(figures))
        rows.add_row(
            "freshness",
            f"p50 {seconds(figures.freshness_p50_seconds)}  p99 {seconds(figures.freshness_p99_seconds)}  "
            "from an event's sending to a reply that has learned it",
        )
        for sentence in figures.problems:
            rows.add_row("[yellow]problem[/]", Text(sentence, style="yellow"))
        hints = Table.grid(padding=(0, 2))
        hints.add_column(style="dim", no_wrap=True)
        hints.add_column(overflow="fold")
        hints.add_row("open", Text(f"{self._url}/", style="bold not dim"))
        hints.add_row("try", Text(self._try))
        hints.add_row("end", "Ctrl-C stops everything and leaves nothing behind")
        title = "Anabranch: a stream of digits, class after class, teaches the model that is being served"
        return Panel(Group(rows, Text(), hints), title=title, title_align="left", padding=(1, 2))


def plain_line(figures: DemoSnapshot) -> str:
    """Return everything that matters in one line."""
    version = figures.serving.version if figures.serving else None
    line = (
        f"{figures.seconds:4.0f} s  {figures.sent:,} events, class {figures.phase}  {_outcomes(figures)}  "
        f"accuracy now {percent(figures.accuracy('now'))}{_against(figures, 'now')}, "
        f"old {percent(figures.accuracy('old'))}{_against(figures, 'old')}  "
        f"version {'-' if version is None else version}  "
        f"freshness p99 {seconds(figures.freshness_p99_seconds)}  "
        f"{figures.requests:,} requests, {figures.failures} failed"
    )
    gate = [f"gate: {_gate(figures)}"] if figures.poisoned or _held_reasons(figures) else []
    return "; ".join([line, *gate, *figures.problems])


def _against(figures: DemoSnapshot, window: str) -> str:
    """Return what an accuracy is to be compared with, in brackets."""
    known = {
        "no replay": figures.accuracy(window, baseline=True),
        "always the commonest digit": figures.simplest(window),
    }
    others = [f"{name} {percent(value)}" for name, value in known.items() if value is not None]
    return f" ({', '.join(others)})" if others else ""


def sparkline(values: deque[float]) -> str:
    """Return fractions as a row of blocks, from empty for 0 to full for 1."""
    return "".join(_BLOCKS[round(min(1.0, max(0.0, value)) * (len(_BLOCKS) - 1))] for value in values)


def _bar(name: str, fraction: float | None, style: str, history: deque[float] | None = None) -> Text:
    full = round((fraction or 0.0) * _BAR_CELLS)
    text = Text(f"{name:<12}")
    text.append("█" * full, style=style)
    text.append("░" * (_BAR_CELLS - full), style="dim")
    text.append(f" {percent(fraction):>4}  ")
    return text.append(sparkline(history), style=style) if history else text


def _stream(figures: DemoSnapshot) -> Text:
    text = Text(f"{figures.sent:,} events, {figures.rate:,.0f}/s   class ")
    for digit in range(CLASSES):
        text.append(f" {digit} ", style="reverse bold" if digit == figures.phase else "dim")
    return text


def _outcomes(figures: DemoSnapshot) -> str:
    names = ("trained", "stored_only", "held_out", "dead_lettered", "skipped")
    counts = [f"{name.replace('_', ' ')} {figures.outcomes.get(name, 0):,}" for name in names]
    lag = sum(p.pending for p in figures.learner.partitions.values()) if figures.learner else 0
    return ", ".join([text for text in counts if not text.endswith(" 0")] or ["nothing yet"]) + f"; lag {lag:,}"


def _replay(figures: DemoSnapshot) -> str:
    rows = figures.learner.replay_rows if figures.learner else {}
    if not rows:
        return "empty"
    *caches, (last, held) = rows.items()
    return ", ".join([f"{held:,} old events in {last}", *(f"{many:,} of them in {tier} too" for tier, many in caches)])


def _serving(figures: DemoSnapshot) -> str:
    if figures.serving is None or figures.serving.version is None:
        return "waits for the first version"
    return f"version {figures.serving.version}, swapped {figures.serving.swaps.get('swapped', 0):,} times under load"


def _gate(figures: DemoSnapshot) -> Text:
    """Return what the quality gate decided about the newest version; in a poisoned phase also that it is one."""
    learner, text = figures.learner, Text()
    if figures.poisoned:
        text.append("the producer sends wrong labels on purpose; ", style="magenta")
    if learner is None or learner.version is None or learner.verdict is None:
        return text.append("nothing judged yet")
    if reasons := _held_reasons(figures):
        return text.append(f"version {learner.version} FAIL: {reasons[0]}", style="red")
    return text.append(f"version {learner.version} {learner.verdict}")


def _held_reasons(figures: DemoSnapshot) -> list[str]:
    """Return why the newest version failed; nothing where it did not."""
    return figures.learner.held_reasons if figures.learner else []


def _requests(figures: DemoSnapshot) -> Text:
    text = Text(f"{figures.requests:,} sent, ")
    text.append(f"{figures.failures:,} failed", style="red" if figures.failures else "green")
    right = percent(figures.request_accuracy)
    return text.append(f", {right} of the last right, p99 {seconds(figures.request_p99_seconds)}")
