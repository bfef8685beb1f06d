"""The departures from New York in 2013 as numbers: the features known before departure, and the delay at arrival."""

import csv
import io
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

import numpy as np

from anabranch.ingest.events.block import Array

_WEATHER = ("temp", "dewp", "humid", "wind_speed", "precip", "pressure", "visib")
_MISSING = -1.0
_TAXI_MINUTES = 20
"""From the runway to the gate, which the data lack: they have when a flight left, and how long it was in the air."""

MIDDLE = [0.0, 0.0, 0.0, 0.0, 0.5, 1.0, 0.3, 55.0, 40.0, 60.0, 10.0, 0.0, 1017.0, 9.0]
SCALE = [1.0, 1.0, 1.0, 1.0, 0.3, 0.7, 0.2, 18.0, 19.0, 20.0, 6.0, 0.02, 7.5, 2.0]
"""Centres and scales of the numbers, from their meaning and not from the stream."""

Row = Mapping[str, str]


def flights_arrays(flights: str, weather: str) -> dict[str, Array]:
    """Return flights that arrived, in scheduled order.

    Args:
        flights: the CSV of all flights.
        weather: the CSV of each hour's weather at each airport.

    Returns:
        `num` float32 `[N, 14]`: hour and weekday on the circle, month, distance, scheduled duration, and the weather at
        the airport in the scheduled hour, -1 where it is missing; `cat` int64 `[N, 3]`: carrier, origin, destination;
        `flight` int64 `[N]`: which flight of the line's plan it is; `delay` float32 `[N]` in minutes; `t` and `t_label`
        float64 `[N]`, in seconds since 1970: the scheduled departure, and when the delay was known; the names of the
        categories.
    """
    skies = {
        _airport_hour(row): [_number(row[name]) for name in _WEATHER] for row in csv.DictReader(io.StringIO(weather))
    }
    rows = [row for row in csv.DictReader(io.StringIO(flights)) if row["arr_delay"] not in ("", "NA")]
    rows.sort(key=lambda row: (_day(row), _minutes(row["sched_dep_time"])))
    names = {column: sorted({row[column] for row in rows}) for column in ("carrier", "origin", "dest")}
    indices = {column: {name: index for index, name in enumerate(known)} for column, known in names.items()}
    t = np.array([_departure(row) for row in rows], np.float64)
    return {
        "t": t,
        "t_label": t + [60 * (float(row["dep_delay"]) + float(row["air_time"]) + _TAXI_MINUTES) for row in rows],
        "num": np.array([_numbers(row, skies) for row in rows], np.float32),
        "cat": np.array([[indices[column][row[column]] for column in names] for row in rows], np.int64),
        "flight": np.unique([f"{row['carrier']} {row['flight']}" for row in rows], return_inverse=True)[1],
        "delay": np.array([float(row["arr_delay"]) for row in rows], np.float32),
        "carriers": np.array(names["carrier"]),
        "origins": np.array(names["origin"]),
        "dests": np.array(names["dest"]),
    }


def _numbers(row: Row, skies: Mapping[tuple[str, ...], Sequence[float]]) -> list[float]:
    departs, arrives = _minutes(row["sched_dep_time"]), _minutes(row["sched_arr_time"])
    hour, weekday = departs / 60 / 24, _day(row).weekday() / 7
    circle = [2 * np.pi * hour, 2 * np.pi * weekday]
    turned = [float(turn(angle)) for angle in circle for turn in (np.sin, np.cos)]
    known = [int(row["month"]) / 12, float(row["distance"]) / 1000, (arrives - departs) % 1440 / 600]
    return turned + known + list(skies.get(_airport_hour(row), [_MISSING] * len(_WEATHER)))


def _airport_hour(row: Row) -> tuple[str, ...]:
    return tuple(row[name] for name in ("origin", "year", "month", "day", "hour"))


def _departure(row: Row) -> float:
    return datetime.fromisoformat(row["time_hour"]).timestamp() + 60 * int(row["minute"])


def _day(row: Row) -> datetime:
    return datetime(int(row["year"]), int(row["month"]), int(row["day"]), tzinfo=UTC)


def _minutes(clock: str) -> int:
    return int(clock) // 100 * 60 + int(clock) % 100


def _number(text: str) -> float:
    return _MISSING if text in ("", "NA") else float(text)
