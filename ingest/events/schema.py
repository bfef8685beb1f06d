"""The schema compiled into columns: the arrays that hold events.

Shapes are written with N events a block; a feature's column is `[N, *shape]`.
"""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.core.errors import SettingsError
from anabranch.ingest.events.encoders import Encoder, encoder_of
from anabranch.ingest.settings.features import FeatureSettings, TimeUnit
from anabranch.ingest.settings.labels import LabelStreamSettings, path_of
from anabranch.ingest.settings.stream import LabelSettings, SchemaSettings


@dataclass(frozen=True)
class Feature:
    """One input of the model: its column has dtype `dtype` (ids for strings) and shape `[N, *column_shape]`."""

    name: str
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    """Shape of one event's value in messages and requests."""
    encoder: Encoder | None
    default: NDArray[np.generic] | None
    """Value of events that lack the feature, `[*column_shape]` and encoded; None: the feature is required."""
    min: float | None = None
    max: float | None = None
    may_be_nan: bool = False
    """Whether a value may be missing, which a column has as NaN."""
    is_time: bool = False
    """Whether a value is a time, which a column has in seconds since 1970."""
    unit: TimeUnit = "s"
    """What a time counts in messages and requests."""

    @property
    def is_string(self) -> bool:
        """Whether messages and requests hold strings that become ids."""
        return self.encoder is not None

    @property
    def column_shape(self) -> tuple[int, ...]:
        """Shape of one event's value in a column: of a text, that of its ids follows `shape`."""
        return self.shape + (self.encoder.shape if self.encoder is not None else ())

    def example(self, rows: int, *, short: bool = False) -> NDArray[Any]:
        """Return a column of `rows` events whose value is allowed: `filler`, or texts of the tokenizer's largest id.

        Such a text, without padding, shows whether a model has an embedding for each id and each position. A `short`
        one has one id before the padding. Each id begins a word.
        """
        value, encoder = self.filler, self.encoder
        if encoder is not None and encoder.shape:
            value = encoder.size - (2 if encoder.padding == encoder.size - 1 else 1)
        column = np.full((rows, *self.column_shape), value, self.dtype)
        if encoder is not None and encoder.shape:
            texts = column if len(encoder.shape) == 1 else column[..., 0, :]
            texts[..., 1:] = encoder.padding if short else value
            if len(encoder.shape) == 2:  # with where each word begins, as the encoder counts
                column[..., 1, :] = np.arange(1, column.shape[-1] + 1) * (texts != encoder.padding)
        return column

    def different(self, rows: int) -> NDArray[Any] | None:
        """Return a column of `rows` allowed values that differ, of integers and texts; None where it has none."""
        first, encoder = self.filler, self.encoder
        if encoder is not None and encoder.shape:
            long, short = self.example(rows), self.example(rows, short=True)
            long[1::2] = short[1::2]
            return long
        values = first + np.arange(rows)
        if self.dtype.kind not in "iu" or (encoder is None and self.max is not None and first + rows - 1 > self.max):
            return None
        if encoder is not None:
            values %= encoder.size
        column = np.empty((rows, *self.column_shape), self.dtype)
        column[:] = values.reshape(-1, *[1] * (column.ndim - 1))
        return column

    @property
    def allowed(self) -> str:
        """The values between `min` and `max`, or the times, in words."""
        if self.is_time and self.min is None and self.max is None:
            return times_in(self.unit)
        return allowed(self.min, self.max)

    @property
    def wire(self) -> np.dtype[np.generic]:
        """The dtype of a number in messages and requests: times that are not in seconds need more digits."""
        if self.unit == "s":
            return self.dtype
        return np.dtype(np.float64 if self.dtype.kind == "f" else np.int64)

    def from_wire(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return a column of numbers as messages have them, in dtype `wire`, with times in seconds."""
        return values if self.unit == "s" else in_seconds(values, self.unit).astype(self.dtype)

    @property
    def filler(self) -> float:
        """A value that is allowed: 0, or the bound that is nearest to it; an int where the dtype is one."""
        filler = max(0, 0 if self.min is None else self.min)
        return filler if self.max is None else min(filler, self.max)

    def within(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return numbers, those outside `min` and `max` as the nearest of these."""
        clipped: NDArray[Any] = np.clip(
            values, -np.inf if self.min is None else self.min, np.inf if self.max is None else self.max
        )
        return clipped

    def outside(self, column: NDArray[np.generic]) -> NDArray[np.bool_] | None:
        """Return which of N events have a value below `min` or above `max`, bool `[N]`; None: there are none.

        `column` is `[N, *shape]`. Times have separate bounds, without these.
        """
        if self.is_time and self.min is None and self.max is None:
            return no_times(column)
        return outside(column, self.min, self.max)


def allowed(lowest: float | None, highest: float | None) -> str:
    """Return the values between two bounds in words; None is no bound."""
    if lowest is None or highest is None:
        return f"{lowest} or more" if highest is None else f"{highest} or less"
    return f"in {lowest}..{highest}"


def outside(column: NDArray[np.generic], lowest: float | None, highest: float | None) -> NDArray[np.bool_] | None:
    """Return which of N events have a value in `[N, ...]` below or above a bound, bool `[N]`; None: there are none."""
    if lowest is None and highest is None:
        return None
    found = np.zeros(column.shape, np.bool_)
    if lowest is not None:
        found |= np.less(column, lowest)
    if highest is not None:
        found |= np.greater(column, highest)
    return np.asarray(found.reshape(len(column), -1).any(axis=1)) if found.any() else None


UNITS: dict[TimeUnit, tuple[int, str]] = {
    "s": (1, "seconds"),
    "ms": (10**3, "milliseconds"),
    "us": (10**6, "microseconds"),
    "ns": (10**9, "nanoseconds"),
}
"""How many of each unit a second has, and the unit in words."""


def times_in(unit: TimeUnit) -> str:
    """Return what a time has to be, in words."""
    smaller = "; it seems to be in milliseconds, or smaller units" if unit == "s" else ""
    return f"a time in {UNITS[unit][1]} since 1970{smaller}"


def in_seconds(times: NDArray[Any], unit: TimeUnit) -> NDArray[Any]:
    """Return times that count `unit` in seconds: float64, or of integers the whole seconds before them, int64."""
    count = UNITS[unit][0]
    if count == 1:
        return times
    return times // count if times.dtype.kind in "iu" else times / count


_MOST_SECONDS = 1e11
"""The year 5138 in seconds since 1970, and March 1973 in milliseconds: no time of an event is beyond both."""


def no_times(column: NDArray[np.generic]) -> NDArray[np.bool_] | None:
    """Return which of N events have a time that cannot be in seconds since 1970, bool `[N]`; None: there are none."""
    return outside(column, -_MOST_SECONDS, _MOST_SECONDS)


IGNORED = -100
"""The label of a position that has none, as `ignore_index` of torch's losses is by default."""


@dataclass(frozen=True)
class Label:
    """The target: class indices as int64 when there are classes, else a float of the declared dtype.

    With `multi` it is a bool for each class, `[classes]`; with `length` a class index at each position, or IGNORED.
    """

    name: str
    dtype: np.dtype[np.generic]
    classes: int | None
    names: tuple[str, ...] | None
    wire: np.dtype[np.generic]
    multi: bool = False
    length: int | None = None
    min: float | None = None
    max: float | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one event's label."""
        return (self.classes or 0,) if self.multi else () if self.length is None else (self.length,)

    @property
    def is_list(self) -> bool:
        """Whether messages hold a list of classes."""
        return self.multi or self.length is not None

    @property
    def one_of(self) -> int | None:
        """Number of the classes of which an event has just one; None where it has several, and for regression."""
        return None if self.is_list else self.classes

    @property
    def missing(self) -> float | int:
        """The value that a column holds where an event has no label."""
        if self.is_list:
            return False if self.multi else IGNORED
        return -1 if self.classes is not None else float("nan")


class Schema:
    """The fields of an event as columns; built once from `[schema]`, and `[stream.labels]` where labels come later.

    `join` is the field by which a label finds its event where that is neither the key nor the group, and `join_column`
    the column with its hash.
    """

    def __init__(self, settings: SchemaSettings, labels: LabelStreamSettings | None = None) -> None:
        self.settings = settings
        self.features = tuple(_feature(name, feature) for name, feature in settings.features.items())
        self.label = _label(settings.label)
        self.key = settings.key.name if settings.key else None
        self.time = settings.time.name if settings.time else None
        self.time_unit: TimeUnit = settings.time.unit if settings.time else "s"
        self.weight = settings.weight.name if settings.weight else None
        self.most_weight = settings.weight.max if settings.weight else None
        self.group = settings.group.name if settings.group else None
        key = labels.key if labels is not None else None
        self.join = None if key in (None, self.key, self.group) else key
        others = (settings.label, settings.key, settings.time, settings.weight, settings.group)
        named = [*settings.features.items(), *((each.name, each) for each in others if each is not None)]
        self._paths = {name: path for name, each in named if each.field and (path := path_of(each.field)) != (name,)}
        names = [name for name, _ in named]
        paths = [self.path(name) for name in names]
        self.shared = len(set(paths)) < len(paths)
        """Whether one value of a message is several fields, such as a feature and the time."""
        self.names = tuple(dict.fromkeys([*names, *([self.join] if self.join else [])]))
        """The fields that a message may have, the features first."""
        self.join_column = "join_hash" if self.join else "group_hash" if key and key != self.key else "key_hash"

    def path(self, name: str) -> tuple[str, ...]:
        """Return the names of the fields that lead to the value of a field in a message, the outermost first."""
        return self._paths.get(name, (name,))

    @property
    def is_flat(self) -> bool:
        """Whether each field is found in a message under its own name, and is one thing alone."""
        return not self._paths and not self.shared

    @property
    def join_key(self) -> str | None:
        """The field by which a label finds its event; without `[stream.labels]`, the key."""
        return {"join_hash": self.join, "group_hash": self.group}.get(self.join_column, self.key)

    @property
    def hashed(self) -> list[tuple[str, str | None]]:
        """The fields of which an event has the hash, by the start of the column's name: key, group and join."""
        return [("key", self.key), ("group", self.group)] + [("join", self.join)] * (self.join is not None)

    @property
    def encoders(self) -> dict[str, dict[str, Any]]:
        """What decides the ids of each string feature, by name; of a tokenizer, the SHA-256 of its file."""
        return {feature.name: feature.encoder.identity for feature in self.features if feature.encoder is not None}

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the schema's canonical JSON; two schemas with one digest have the same columns.

        What has its default is left out, so that a setting which is added later changes no digest. So are the bounds of
        numbers, which decide which events are accepted, where messages have a field and in which unit, and of a learned
        vocabulary all but its size: they change no column. A tokenizer counts by its contents.
        """
        bounds: Any = {
            "features": {"__all__": {"min", "max", "field", "unit"}},
            "label": {"min", "max", "field"},
            "weight": {"max", "field"},
            "time": {"unit", "field"},
            "key": {"field"},
            "group": {"field"},
        }
        settings = self.settings.model_dump(mode="json", exclude_defaults=True, exclude=bounds)
        for name, identity in self.encoders.items():
            settings["features"][name]["encode"] = identity
        learned = (*settings["features"].values(), *settings.get("cross", {}).values())
        for encode in (each["encode"] for each in learned if "learn" in each.get("encode", {})):
            encode.pop("min_count", None), encode.pop("expire", None)
        text = json.dumps(settings, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def payload(self) -> dict[str, tuple[np.dtype[np.generic], tuple[int, ...]]]:
        """Dtype and shape of each column of the schema.

        `feature.<name>`, `label`, `labelled` (bool), `weight` (float32, 1 where none is declared) and, where declared,
        `time` (float64, seconds since 1970).
        """
        columns: dict[str, tuple[np.dtype[np.generic], tuple[int, ...]]] = {
            f"feature.{feature.name}": (feature.dtype, feature.column_shape) for feature in self.features
        }
        columns["label"] = (self.label.dtype, self.label.shape)
        columns["labelled"] = (np.dtype(np.bool_), ())
        columns["weight"] = (np.dtype(np.float32), ())
        if self.time:
            columns["time"] = (np.dtype(np.float64), ())
        return columns


def _feature(name: str, settings: FeatureSettings) -> Feature:
    is_string = settings.dtype == "string"  # of whole numbers, the model's vocabulary takes the value itself
    encoder = encoder_of(settings.encode, f"schema.features.{name}.encode") if is_string else None
    dtype = encoder.dtype if encoder else np.dtype(settings.dtype)
    missing = settings.missing is not None
    if isinstance(settings.missing, int | float):
        _constant(name, "missing", settings, None, dtype)
    default = (
        np.full(settings.shape, np.nan, dtype) if missing else _constant(name, "default", settings, encoder, dtype)
    )
    feature = Feature(
        name,
        dtype,
        settings.shape,
        encoder,
        default,
        settings.min,
        settings.max,
        missing,
        bool(settings.cycles),
        settings.unit,
    )
    if default is not None and feature.outside(default[None]) is not None:  # NaN is within any bounds
        raise SettingsError(f"schema.features.{name}.default = {settings.default!r} is not {feature.allowed}")
    return feature


def _constant(
    name: str, key: str, settings: FeatureSettings, encoder: Encoder | None, dtype: np.dtype[np.generic]
) -> NDArray[np.generic] | None:
    """Return the value of a key, such as `default`, for one event; None where there is none."""
    given = getattr(settings, key)
    if given is None:
        return None
    shape = settings.shape
    try:
        value: NDArray[Any] = np.asarray(given)
        if encoder is not None:
            if value.dtype.kind != "U":
                raise ValueError("it is not a string")
            ids = encoder.encode([str(item) for item in value.reshape(-1)])
            value, shape = ids.reshape(value.shape + encoder.shape), shape + encoder.shape
        elif value.dtype.kind not in "biuf":
            raise ValueError("it is not a number")
        elif dtype.kind == "f":
            with np.errstate(over="ignore"):
                if not np.isfinite(value.astype(dtype)).all():
                    raise ValueError(f"it is not a finite {dtype}")
        elif value.dtype.kind == "f" or not np.array_equal(value, value.astype(dtype).astype(value.dtype)):
            raise ValueError(f"it is not a {dtype}")
        return np.broadcast_to(value.astype(dtype), shape)
    except (ValueError, OverflowError) as exc:
        raise SettingsError(
            f"schema.features.{name}.{key} = {given!r} does not fit dtype {settings.dtype} "
            f"and shape {list(settings.shape)}: {exc}"
        ) from exc


def _label(settings: LabelSettings) -> Label:
    names = settings.classes if isinstance(settings.classes, tuple) else None
    classes = len(names) if names else settings.classes if isinstance(settings.classes, int) else None
    wire = np.dtype(settings.dtype)
    dtype = np.dtype(np.bool_ if settings.multi else np.int64) if classes else wire
    return Label(
        settings.name, dtype, classes, names, wire, settings.multi, settings.length, settings.min, settings.max
    )
