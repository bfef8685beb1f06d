"""Draws docs/images/replay-policies.svg: what each admission policy keeps of a stream, and what each sampler draws.

    python docs/images/draw_policies.py > docs/images/replay-policies.svg

Everything in it is computed by the policies themselves.

Legend: N events of the stream, H events held, Q new events.
"""

import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
from numpy.typing import NDArray

from anabranch.replay.policies import ADMISSIONS, SAMPLERS, AdmissionContext, SamplerContext
from anabranch.replay.reservoir.admission import Candidates
from anabranch.replay.reservoir.event_table import FIELDS, EventTable, records_of
from anabranch.replay.reservoir.quotas import Quotas
from anabranch.replay.snapshot import ENTRY

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

EVENTS, HELD, STEPS, A_DRAW = 3000, 150, 75, 10
DAY, DAYS = 86_400, 10
HALF_LIFE = timedelta(days=1.5)
CLASSES = "ABCD"
CLUSTERS = 12
CENTRES = np.array([[0.30, 0.66], [0.60, 0.44], [0.20, 0.22], [0.82, 0.80]])
SPREADS = np.array([0.085, 0.11, 0.06, 0.07])

CAPTIONS = {
    "reservoir": "a fair sample of all that was ever seen",
    "class-balanced": "equally many of each class, and each a fair sample",
    "recent": "half as many for each 1.5 days that they are older",
    "diverse": "equally many of each region of the embedding",
}
SAMPLE_CAPTIONS = {
    "uniform": "each as often as any other",
    "class-balanced": "each class as often as any other",
    "recent": "half as often for each 1.5 days that it is older",
    "loss": "what the model gets wrong: here, on the border of A and B",
    "similar": "what is near to the new events of the step (crosses)",
    "diverse": "each region of the embedding as often as any other",
}

# Positions in the picture.
WIDTH, CELL, LANE = 860, 420, 19
TIME_X, TIME_W, COUNT_X, MAP_X, MAP_W = 22, 250, 308, 322, 86
LANES_Y, CELL_H = 42, 140
STYLE = """
    svg { --back: #ffffff; --ink: #1f2328; --soft: #59636e; --line: #d1d9e0; --pale: .17 }
    svg { --a: #1f6fc4; --b: #d97a00; --c: #16865a; --d: #b8399a }
    @media (prefers-color-scheme: dark) {
      svg { --back: #12161c; --ink: #e6edf3; --soft: #a2adb9; --line: #343d48; --pale: .26 }
      svg { --a: #62a8f5; --b: #f0a33a; --c: #3fc28d; --d: #e680cf }
    }
    text { font: 12.5px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: var(--soft) }
    .head { font-size: 16px; font-weight: 600; fill: var(--ink) }
    .name { font-size: 13.5px; font-weight: 600; fill: var(--ink) }
    .right { text-anchor: end } .middle { text-anchor: middle }
    .frame { fill: none; stroke: var(--line) }
    path { fill: none; stroke-linecap: round }
    .A { stroke: var(--a) } .B { stroke: var(--b) } .C { stroke: var(--c) } .D { stroke: var(--d) }
    .tA { fill: var(--a) } .tB { fill: var(--b) } .tC { fill: var(--c) } .tD { fill: var(--d) }
    .tA, .tB, .tC, .tD { font-weight: 600 }
    .pale { stroke: var(--soft); opacity: var(--pale) }
    .size { stroke: var(--soft) }
    .new { stroke: var(--ink); stroke-width: 1.1 }
"""


@dataclass(frozen=True)
class Events:
    """Events: when, of which class, where in the embedding `[N, 2]`, and where in a lane of the picture."""

    identity: NDArray[np.uint64]
    day: Floats
    label: Ints
    at: Floats
    lane: Floats

    def __getitem__(self, which: NDArray[np.bool_]) -> "Events":
        return Events(self.identity[which], self.day[which], self.label[which], self.at[which], self.lane[which])

    def __len__(self) -> int:
        return len(self.day)

    @property
    def time_s(self) -> NDArray[np.uint32]:
        """Seconds since the stream began."""
        return (self.day * DAY).astype(np.uint32)


class Map:
    """Replaces the index process: has the clusters, and the neighbours of the newest events."""

    training = 1

    def __init__(self, stream: Events, held: Events, new_Q: Floats) -> None:
        self._held = held.at
        self.indexed = np.ones(len(held), np.bool_)
        """All are found."""
        self._centres = _centres(stream.at)
        self._batches = itertools.cycle(np.array_split(new_Q, len(new_Q) // 2))

    def clusters(self, slots: NDArray[np.int32]) -> NDArray[np.int16]:
        """Return the cluster of each event held; 0 is that of those whose cluster is not known."""
        return self.cluster_of(self._held[slots]) + np.int16(1)

    def cluster_of(self, at: Floats) -> NDArray[np.int16]:
        """Return the nearest centre of each point."""
        clusters: NDArray[np.int16] = _distances(at, self._centres).argmin(axis=1).astype(np.int16)
        return clusters

    def stale(self, _n: int) -> NDArray[np.int32]:
        """All embeddings are of one model."""
        return np.empty(0, np.int32)

    def nearest(self) -> NDArray[np.int32]:
        """Return the slots of the nearest to the new events, nearest first."""
        return np.argsort(_distances(self._held, next(self._batches)).min(axis=1), kind="stable").astype(np.int32)


def make_stream(rng: np.random.Generator) -> Events:
    """Return a stream of four classes: many A, fewer B, C in the first three days alone, few D."""
    day = np.sort(rng.random(EVENTS) * DAYS)
    early = day < DAYS * 0.3
    chances = np.where(early[:, None], [0.50, 0.22, 0.24, 0.04], [0.68, 0.28, 0.0, 0.04])
    label = (rng.random(EVENTS)[:, None] > np.cumsum(chances, axis=1)).sum(axis=1).clip(0, 3)
    at = CENTRES[label] + rng.standard_normal((EVENTS, 2)) * SPREADS[label, None]
    at = np.where(rng.random(EVENTS)[:, None] < 0.08, rng.random((EVENTS, 2)), at).clip(0.02, 0.98)
    identity = rng.integers(0, 2**64, EVENTS, np.uint64)
    return Events(identity, day, label, at, rng.random(EVENTS))


def kept(name: str, stream: Events, around: Map) -> NDArray[np.bool_]:
    """Return which events of the stream are held at its end under an admission policy, bool `[N]`."""
    admission = ADMISSIONS[name](AdmissionContext(len(CLASSES), HALF_LIFE, CLUSTERS))
    weight = np.ones(len(stream), np.float32)
    priorities = admission.priorities(Candidates(stream.identity, weight, stream.time_s))
    groups = admission.group(stream.label, around.cluster_of(stream.at))
    return Quotas(HELD, admission.groups).lower(priorities, groups)


def drawn(name: str, held: Events, around: Map) -> Ints:
    """Return how often each event held is drawn by a sampler, over all steps, `[H]`."""
    entries, slots = EventTable(len(held), len(held)), np.arange(len(held), dtype=np.int32)
    columns = {field: np.zeros(len(held), ENTRY[field]) for field in FIELDS}
    columns |= {"offset": slots.astype(np.int64), "time_s": held.time_s, "label": held.label.astype(np.int32)}
    entries.append(slots, np.zeros(len(held)), 0, records_of(columns))
    sampler = SAMPLERS[name](SamplerContext(entries, len(held), len(CLASSES), HALF_LIFE, around))  # type: ignore[arg-type]
    sampler.add(slots)
    sampler.update_priorities(slots, losses(held.at))
    chosen = [sampler.sample(A_DRAW, np.random.default_rng((0, step))).slots for step in range(STEPS)]
    return np.bincount(np.concatenate(chosen), minlength=len(held))


def losses(at: Floats) -> NDArray[np.float32]:
    """Return losses that are large where events are as near to A as to B."""
    to_a, to_b = np.sqrt(_distances(at, CENTRES[:2])).T
    found: NDArray[np.float32] = (0.02 + 3 * np.exp(-(((to_a - to_b) / 0.07) ** 2)) * (to_a < 0.4)).astype(np.float32)
    return found


def _distances(one: Floats, other: Floats) -> Floats:
    squares: Floats = ((one[:, None] - other[None]) ** 2).sum(axis=2)
    return squares


def _centres(at: Floats) -> Floats:
    """Return clusters as k-means finds them."""
    centres = at[:CLUSTERS].copy()
    for _ in range(20):
        nearest = _distances(at, centres).argmin(axis=1)
        centres = np.stack([at[nearest == each].mean(axis=0) for each in range(CLUSTERS)])
    return centres


def _dots(x: Floats, y: Floats) -> str:
    points = zip(x.tolist(), y.tolist(), strict=True)
    return "".join(f"M{x:.1f} {y:.1f}h0" for x, y in points)


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{text}</text>'


def _positions(events: Events) -> list[tuple[Floats, Floats]]:
    """Return where dots are in a cell: over time, and in the embedding."""
    lane_y = LANES_Y + (events.label + 0.12 + 0.76 * events.lane) * LANE
    time_x = TIME_X + 4 + events.day / DAYS * (TIME_W - 8)
    map_y = LANES_Y + (1 - events.at[:, 1]) * LANE * len(CLASSES)
    return [(time_x, lane_y), (MAP_X + events.at[:, 0] * MAP_W, map_y)]


def _size(times: Ints) -> Floats:
    """Return the size of the dot of an event that was sampled `times` times."""
    return np.where(times > 0, np.round(1.7 * np.sqrt(times) + 0.8, 1), 1.0)


def _events(events: Events, sizes: Floats) -> Iterator[str]:
    """Draw events as dots of their sizes in both views."""
    for x, y in _positions(events):
        for number, letter in enumerate(CLASSES):
            for size in np.unique(sizes[events.label == number]).tolist():
                which = (events.label == number) & (sizes == size)
                yield f'<path class="{letter}" stroke-width="{size:g}" d="{_dots(x[which], y[which])}"/>'


def _definitions(stream: Events) -> Iterator[str]:
    """Define the dots of the whole stream, which are in many cells, in the colour of whoever uses them."""
    yield '<defs><g id="stream">'
    for number, letter in enumerate(CLASSES):
        dots = "".join(_dots(x, y) for x, y in _positions(stream[stream.label == number]))
        yield f'<path id="{letter}" stroke-width="1.6" d="{dots}"/>'
    yield "</g></defs>"


def _cell(name: str, caption: str, counts: list[str], inner: Iterator[str] | list[str]) -> Iterator[str]:
    yield _text(TIME_X, 15, name, "name")
    yield _text(TIME_X, 32, caption)
    for number, letter in enumerate(CLASSES):
        middle = LANES_Y + (number + 0.5) * LANE + 4.5
        yield _text(6, middle, letter, f"t{letter}")
        yield _text(COUNT_X, middle, counts[number], "right")
    for x, width in ((TIME_X, TIME_W), (MAP_X, MAP_W)):
        yield f'<rect class="frame" x="{x}" y="{LANES_Y}" width="{width}" height="{LANE * len(CLASSES)}" rx="3"/>'
    yield from inner
    under = LANES_Y + LANE * len(CLASSES) + 14
    yield _text(TIME_X, under, "day 0")
    yield _text(TIME_X + TIME_W, under, f"day {DAYS}", "right")
    yield _text(MAP_X + MAP_W / 2, under, "embedding", "middle")


def _stream_cell(stream: Events) -> Iterator[str]:
    counts = [str(int((stream.label == each).sum())) for each in range(len(CLASSES))]
    caption = f"{EVENTS:,} events; C was seen in the first 3 days only"
    yield from _cell("the stream", caption, counts, [f'<use href="#{each}" class="{each}"/>' for each in CLASSES])


def _admission_cell(name: str, stream: Events, around: Map) -> Iterator[str]:
    which = kept(name, stream, around)
    held = stream[which]
    counts = [str(int((held.label == each).sum())) for each in range(len(CLASSES))]
    inner = ['<use href="#stream" class="pale"/>', *_events(held, np.full(len(held), 4.2))]
    yield from _cell(name, CAPTIONS[name], counts, inner)


def _sampler_cell(name: str, held: Events, around: Map, new_Q: Floats) -> Iterator[str]:
    times = drawn(name, held, around)
    shares = [100 * times[held.label == each].sum() / times.sum() for each in range(len(CLASSES))]
    inner = list(_events(held, _size(times)))
    if name == "similar":
        crosses = zip(MAP_X + new_Q[:, 0] * MAP_W, LANES_Y + (1 - new_Q[:, 1]) * LANE * len(CLASSES), strict=True)
        inner += [f'<path class="new" d="M{x - 2:.1f} {y - 2:.1f}l4 4m0 -4l-4 4"/>' for x, y in crosses]
    yield from _cell(name, SAMPLE_CAPTIONS[name], [f"{share:.0f}%" for share in shares], inner)


def _group(x: float, y: float, parts: Iterator[str]) -> Iterator[str]:
    yield f'<g transform="translate({x:g} {y:g})">'
    yield from parts
    yield "</g>"


def draw() -> Iterator[str]:
    """Yield the lines of the picture."""
    rng = np.random.default_rng(7)
    stream = make_stream(rng)
    new_Q = np.array([0.76, 0.62]) + rng.standard_normal((14, 2)) * [0.05, 0.12]
    around = Map(stream, stream, new_Q)
    rows = (len(CAPTIONS) + 1) // 2, (len(SAMPLE_CAPTIONS) + 1) // 2
    height = 16 + CELL_H + sum(34 + CELL_H * each for each in rows)
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="title">'
    yield '<title id="title">What each admission policy keeps of a stream, and what each sampler samples of it</title>'
    yield f"<style>{STYLE}</style>"
    yield from _definitions(stream)
    yield f'<rect width="{WIDTH}" height="{height}" rx="10" style="fill: var(--back)"/>'
    yield from _group(8, 12, _stream_cell(stream))
    yield from _group(8 + CELL + 10, 12, _how_to_read())
    top = 12.0 + CELL_H
    held = stream[kept("reservoir", stream, around)]
    cells = [(name, list(_admission_cell(name, stream, around))) for name in CAPTIONS]
    yield from _section(top, "replay.admission: who is kept", f"{HELD} of {EVENTS:,}; the rest is pale", cells)
    top += 34 + CELL_H * rows[0]
    around = Map(stream, held, new_Q)
    cells = [(name, list(_sampler_cell(name, held, around, new_Q))) for name in SAMPLE_CAPTIONS]
    what = f"of what reservoir keeps, in {STEPS} samples of {A_DRAW}"
    yield from _section(top, "replay.sampling: what is sampled", what, cells)
    yield from _group(600, top + 13, _sizes())
    yield "</svg>"


def _section(top: float, head: str, what: str, cells: list[tuple[str, list[str]]]) -> Iterator[str]:
    yield f'<text x="14" y="{top + 18:g}"><tspan class="head">{head}</tspan>  ({what})</text>'
    for index, (_, parts) in enumerate(cells):
        yield from _group(8 + index % 2 * (CELL + 10), top + 34 + index // 2 * CELL_H, iter(parts))


def _sizes() -> Iterator[str]:
    for index, times in enumerate((0, 1, 5, 20)):
        x = 52 * index + 14 * (index > 0)
        yield f'<path class="size" stroke-width="{_size(np.array([times]))[0]:g}" d="M{x} 0h0"/>'
        yield _text(x + 8, 4.5, f"{times}" if times else "never")
    yield _text(52 * 3 + 44, 4.5, "times")


def _how_to_read() -> Iterator[str]:
    lines = [
        "Every dot is an event, its colour is its class, A to D.",
        "Left: when it came. Right: where the model's embedding",
        "puts it; similar events are close to each other.",
        "Numbers: how many events each class has, or which",
        "fraction of the samples is of that class.",
    ]
    yield _text(TIME_X, 15, "how to read this", "name")
    for number, line in enumerate(lines):
        yield _text(TIME_X, 36 + 19 * number, line)


if __name__ == "__main__":
    sys.stdout.write("\n".join(draw()) + "\n")
