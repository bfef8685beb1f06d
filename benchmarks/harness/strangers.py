"""Natural streams on which no rule of the learner was made: numbers `x` float32 `[N, F]` and classes `y` int64 `[N]`.

covertype   cartographic numbers of a forest, in the order of the file: seven classes, of which three go
            after an eighth of the events
rain        a day's weather at an air base, over 50 years: does it rain on the next day?
wind        an hour's weather at New York's airports: which of eight directions has the wind in the next hour?
warmer      the same: is the next hour warmer?
watch       readings of a smartwatch: which of seven exercises is it, one after the other for about 35 seconds
"""

import csv
import io
import itertools
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from anabranch.ingest.events.block import Array

EVENTS = 110_000
"""Of each stream, or fewer."""
SOURCES = {"covertype": "covertype", "rain": "rain", "wind": "hours", "warmer": "hours", "watch": "watch"}
"""The data set of each stream."""
_SECTORS = 8
_NUMBERS = ("temp", "dewp", "humid", "wind_speed", "precip", "pressure", "visib")
_SCALED = 1000
"""Events at the start of a stream whose statistics scale its numbers."""


def table_arrays(text: bytes) -> dict[str, Array]:
    """Return a table whose last column is the class; the file has a header."""
    table = np.loadtxt(io.BytesIO(text), np.float32, delimiter=",", skiprows=1)
    label = table[:, -1].astype(np.int64)
    return {"x": table[:, :-1], "y": label - label.min()}


def hour_arrays(weather: str) -> dict[str, Array]:
    """Return the hours of all airports in order of time.

    Returns:
        `x` float32 `[N, 13]`; `after` float32 `[N, 2]`: the wind's direction in the next hour, in degrees, and how much
        warmer that is, in degrees Fahrenheit; NaN where one is missing.
    """
    rows = sorted(_hours(weather), key=lambda row: row[0])
    _, x, after = zip(*rows, strict=True)
    return {"x": np.array(x, np.float32), "after": np.array(after, np.float32)}


def _hours(weather: str) -> Iterator[tuple[tuple[str, str], list[float], list[float]]]:
    rows = list(csv.DictReader(io.StringIO(weather)))
    for now, later in itertools.pairwise(rows):
        if now["origin"] != later["origin"]:
            continue
        angle, hour = np.deg2rad(_number(now, "wind_dir")), int(now["hour"]) / 24 * 2 * np.pi
        circle = [np.sin(angle), np.cos(angle), np.sin(hour), np.cos(hour)]
        numbers = [*(_number(now, name) for name in _NUMBERS), *circle]
        airport = [float(now["origin"] == name) for name in ("EWR", "JFK")]
        after = [_number(later, "wind_dir"), _number(later, "temp") - _number(now, "temp")]
        yield (now["time_hour"], now["origin"]), np.nan_to_num(numbers).tolist() + airport, after


def _number(row: Mapping[str, str], name: str) -> float:
    return float("nan") if row[name] in ("", "NA") else float(row[name])


def watch_arrays(recorded: Mapping[str, list[Array]]) -> dict[str, Array]:
    """Return all readings, one recording after the other."""
    x, y = recorded["X"], recorded["y"]
    sizes = [len(each) for each in x]
    return {"x": np.concatenate(x).astype(np.float32), "y": np.repeat(np.asarray(y, np.int64), sizes)}


def _wind(arrays: Mapping[str, Array]) -> tuple[Array, Array]:
    direction = arrays["after"][:, 0]
    known = np.isfinite(direction)
    return arrays["x"][known], ((direction[known] / 360 * _SECTORS + 0.5) % _SECTORS).astype(np.int64)


def _warmer(arrays: Mapping[str, Array]) -> tuple[Array, Array]:
    rise = arrays["after"][:, 1]
    known = np.isfinite(rise)
    return arrays["x"][known], (rise[known] > 0).astype(np.int64)


_LABELS: dict[str, Callable[[Mapping[str, Array]], tuple[Array, Array]]] = {"wind": _wind, "warmer": _warmer}


def stranger(name: str, arrays: Mapping[str, Array]) -> tuple[Array, Array]:
    """Return a stream of the data set of its name: numbers scaled by the statistics of the first ones, and labels."""
    x, y = _LABELS[name](arrays) if name in _LABELS else (arrays["x"], arrays["y"])
    first = x[:_SCALED]
    return ((x - first.mean(axis=0)) / (first.std(axis=0) + 1e-3))[:EVENTS], y[:EVENTS]
