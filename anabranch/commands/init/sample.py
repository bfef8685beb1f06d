"""`anabranch init --from`: a pipeline for a file of events, written from what its first rows have.

Each decision is one that a person can check: the comment above a field says what was seen and what follows from it.
"""

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from anabranch.commands.event_files.files import SourceFormat, sample_of
from anabranch.commands.init.files import Classes, PipelineField, SectionField, pipeline_files
from anabranch.core.errors import SettingsError
from anabranch.ingest.formats.base import seconds_of
from anabranch.ingest.formats.other_formats import CLOUD_EVENT, is_debezium

ROWS = 10_000
"""Rows that are read."""
_FEW = 32
"""Strings with so many different values at most are listed; others are learned."""
_FEWEST_ROWS = 20
"""With fewer rows, that all values differ says nothing."""
_MOST_CLASSES = 1000
_MOST_NUMBERS = 100
"""Whole numbers with more different values than this are a quantity, and no classes."""
_ROWS_OF_AN_ID = 10
"""Texts that fewer rows than this have, on average, are ids: too few to learn anything of one."""
_LONG_TEXT = 40
_ID = re.compile(r"(?:^|.*[^A-Za-z])(?:id|ids|uuid|guid|key)|.*[a-z](?:Id|ID|Uuid|UUID)", re.DOTALL)
_OF_TIME = re.compile(r"time|date|timestamp|epoch|created|updated|when|(?:^|_)(?:ts|at|on)(?:$|_)|[a-z]At$|_ms$", re.I)
_PART = re.compile(r"(.+?)(?:\.(\d+)|\[(\d+)\])")
_YEAR_2000, _YEAR_2100 = 946_684_800.0, 4_102_444_800.0
_UNITS = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
_BOOLEANS = {"true": True, "false": False}
_DAY = 86_400.0
_LEARNER = (
    "batch_size = 10                      # small steps: a model that begins with nothing learns sooner",
    'replay_ratio = "auto"                # replays only where it is measured to undo forgetting',
)
_ADAMW = 'optimizer = {name = "adamw", lr = 5e-3}   # sizes the steps of each row of a table'
_SGD = 'optimizer = {name = "sgd", lr = 0.1}   # of scaled numbers alone: follows a drift sooner than adamw'

Path_ = tuple[str, ...]


@dataclass
class _Column:
    """The values of one field in the rows that were read; None where it is missing or null."""

    path: Path_
    values: list[Any]
    present: list[Any] = field(default_factory=list)
    kind: str = ""
    """`bool`, `int`, `float`, `string`, `time`, `list`, or empty for values of several types."""

    def __post_init__(self) -> None:
        self.present = [value for value in self.values if value is not None]
        kinds = {_kind_of(value) for value in self.present}
        kinds = {"float"} if kinds == {"int", "float"} else kinds
        self.kind = kinds.pop() if len(kinds) == 1 else ""

    @property
    def written(self) -> str:
        """The name as a person writes it."""
        return ".".join(self.path)

    @property
    def nulls(self) -> int:
        return len(self.values) - len(self.present)

    @property
    def distinct(self) -> int:
        return len(set(self.present))

    @property
    def is_id(self) -> bool:
        """Whether it names what an event is about: by its name, or since few rows have the same text."""
        if self.kind not in ("string", "int"):
            return False
        rare = self.kind == "string" and len(self.present) >= _FEWEST_ROWS and not self.is_text
        return bool(_ID.fullmatch(self.path[-1])) or (rare and self.distinct * _ROWS_OF_AN_ID > len(self.present))

    @property
    def is_row_number(self) -> bool:
        return self.kind == "int" and self._is_unique and max(self.present) - min(self.present) + 1 == len(self.present)

    @property
    def is_text(self) -> bool:
        if self.kind != "string":
            return False
        mean = sum(map(len, self.present)) / len(self.present)
        return mean > _LONG_TEXT and any(" " in value for value in self.present[:_FEWEST_ROWS])

    @property
    def _is_unique(self) -> bool:
        return len(self.present) >= _FEWEST_ROWS and self.distinct == len(self.present)


@dataclass(frozen=True)
class EventSample:
    """Events that say what the fields are.

    Attributes:
        rows: the events, values by the names of fields.
        where: what has them, for errors.
        source: what they are, for the first line of the settings.
        stream: lines below `[stream]`.
    """

    rows: Sequence[Mapping[str, Any]]
    where: str
    source: str
    stream: Sequence[str]

    @property
    def fields(self) -> list[str]:
        """The fields of the events, of which one is the label."""
        return [column.written for column in _columns(self.rows)]

    def events(self) -> list[dict[str, Any]]:
        """Return the events as messages of JSON have them, for the settings that are written from them."""
        found: list[dict[str, Any]] = [{} for _ in self.rows]
        for column in _columns(self.rows):
            for event, value in zip(found, column.values, strict=True):
                inner = event
                for name in column.path[:-1]:
                    inner = inner.setdefault(name, {})
                if value is not None:
                    inner[column.path[-1]] = value.isoformat() if isinstance(value, datetime) else value
        return found


def sample_of_file(file: Path, kind: SourceFormat | None = None, delimiter: str | None = None) -> EventSample:
    """Return the first rows of a file; raises SettingsError where it cannot be read."""
    rows, envelope = unwrapped(sample_of(file, kind, delimiter, ROWS))
    stream = ['topics = ["events"]                  # change it to your topic']
    if envelope:
        stream.append(f'envelope = "{envelope}"')
    return EventSample(rows, str(file), f"{len(rows):,} rows of {file.name}", stream)


def sampled_pipeline(
    folder: Path, sample: EventSample, label: str | None, key: str | None = None
) -> tuple[dict[str, str], list[str]]:
    """Return `pipeline.toml` and `my_model.py` for events, and remarks on fields that are left out.

    Raises:
        SettingsError: there are none, or an option names no field that they have.
    """
    return described_rows(sample.rows, sample.where, label, key, sample.source, folder.resolve().name, sample.stream)


def described_rows(
    rows: Sequence[Mapping[str, Any]],
    where: str,
    label: str | None,
    key: str | None,
    source: str,
    name: str,
    stream: Sequence[str],
    option: str = "--",
) -> tuple[dict[str, str], list[str]]:
    """Return `pipeline.toml` and `my_model.py` for events, and remarks on fields that are left out.

    Args:
        rows: the events, values by the names of fields.
        where: what has them, for errors.
        label: the field to predict; None if it is not known yet, which is an error that names the fields.
        key: the field that names whom an event is about; None: the first id, if there is one.
        source: what they come from, for the first line of the settings.
        name: of the pipeline.
        stream: lines below `[stream]`.
        option: what comes before `label` and `key` in errors.

    Raises:
        SettingsError: there are no events or no feature, or `label` or `key` names no field.
    """
    columns = _columns(rows)
    if not columns:
        raise SettingsError(f"{where} has no event: nothing can be said of its fields")
    by_name = {column.written: column for column in columns}
    if label is None:
        raise SettingsError(f"name the field to predict with {option}label: one of {', '.join(by_name)}")
    for argument, field_name in (("label", label), ("key", key)):
        if field_name is not None and field_name not in by_name:
            raise SettingsError(
                f"{option}{argument} {field_name} is no field of {where}, which has {', '.join(by_name)}"
            )
    target = by_name[label]
    classes, why_label = _classes(target)
    identifiers = _identifiers(columns)
    keys = [by_name[key]] if key else [each for each in columns if each.is_id and each is not target and not each.nulls]
    # An id that repeats names whom events are about; one that does not names the event.
    keys.sort(key=lambda each: each.distinct == len(each.present))
    chosen = keys[0] if keys else None
    time: SectionField | None = None
    fields: list[PipelineField] = []
    for column in columns:
        if column is target or column is chosen:
            continue
        described = _described(column, identifiers[column.path], target)
        if described.cycles and time is None:
            comment = f"{column.written} has a time in every row"
            time = SectionField(described.name, described.field, comment, described.unit)
        fields.append(described)
    if not any(each.is_read for each in fields):
        why = "".join(f"; {each.sentence}" for each in fields[:5])
        raise SettingsError(f"{where} has no field that can be a feature besides {label}{why}")
    named_key = None
    if chosen is not None:
        reason = f"as {option}key says" if key else "its values name what an event is about"
        named_key = SectionField(
            identifiers[chosen.path], _field_of(chosen, identifiers), f"{chosen.written}: {reason}"
        )
    files = pipeline_files(
        fields,
        source,
        name,
        stream,
        (SectionField(identifiers[target.path], _field_of(target, identifiers), why_label), classes),
        named_key,
        time,
        (*_LEARNER, _ADAMW if classes is None or any(each.dtype == "string" for each in fields) else _SGD),
    )
    return files, [each.sentence for each in fields if not each.is_read]


def unwrapped(rows: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], str]:
    """Return the events in rows, and the envelope in which they are; empty without one."""
    found = list(rows)
    envelope = ""
    if found and all(row.keys() == {"schema", "payload"} for row in found):
        found, envelope = [row["payload"] for row in found], "connect"
    if found and all(is_debezium(row) for row in found):
        found, envelope = [row["after"] for row in found], "debezium"
    if found and all(row.keys() >= CLOUD_EVENT and isinstance(row.get("data"), Mapping) for row in found):
        found, envelope = [row["data"] for row in found], "cloudevents"
    return [row for row in found if isinstance(row, Mapping)], envelope


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[_Column]:
    """Return the fields of rows, those in objects too, in the order in which they come first."""
    flat = [dict(_leaves(row, ())) for row in rows]
    paths = list(dict.fromkeys(path for row in flat for path in row))
    outer = {path[:end] for path in paths for end in range(1, len(path))}  # null in some rows, an object in others
    columns = [_Column(path, [_plain(row.get(path)) for row in flat]) for path in paths if path not in outer]
    return [column for column in _joined(columns) if column.path != ("",)]


def _leaves(row: Mapping[str, Any], above: Path_) -> Iterator[tuple[Path_, Any]]:
    for name, value in row.items():
        if isinstance(value, Mapping) and len(above) < 15:
            yield from _leaves(value, (*above, str(name)))
        else:
            yield (*above, str(name)), value


def _joined(columns: list[_Column]) -> Iterator[_Column]:
    """Yield the columns, with `x.0`, `x.1` and so on as one of lists."""
    parts: dict[str, list[_Column]] = {}
    for column in columns:
        part = _PART.fullmatch(column.path[-1]) if len(column.path) == 1 else None
        if part and int(part[2] or part[3]) == len(parts.get(part[1], ())) and column.kind in ("int", "float"):
            parts.setdefault(part[1], []).append(column)
    lists = {name: each for name, each in parts.items() if len(each) > 1 and not any(one.nulls for one in each)}
    inside = {column.path: name for name, each in lists.items() for column in each}
    for column in columns:
        name = inside.get(column.path)
        if name is None:
            yield column
        elif column is lists[name][0]:
            yield _Column((name,), [list(cells) for cells in zip(*(one.values for one in lists[name]), strict=True)])


def _plain(value: Any) -> Any:
    """Return a value as JSON would have it; None where it is missing, or no finite number."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, datetime):
        return value if value.tzinfo else value.replace(tzinfo=UTC)
    if isinstance(value, date):
        return datetime(value.year, value.month, value.day, tzinfo=UTC)
    return value


def _kind_of(value: Any) -> str:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int | float):
        return "int" if isinstance(value, int) or value.is_integer() else "float"
    if isinstance(value, datetime):
        return "time"
    if isinstance(value, str):
        return "time" if len(value) >= 10 and _seconds(value) is not None else "string"
    return "list" if isinstance(value, list) else ""


def _seconds(value: Any) -> float | None:
    try:
        return value.timestamp() if isinstance(value, datetime) else seconds_of(str(value))
    except (ValueError, OverflowError):
        return None


def _is_free(name: str, used: Collection[str]) -> bool:
    """Return whether a feature may have this name, and its mark of a missing value too."""
    return not {name, f"{name}_missing", name.removesuffix("_missing")} & {*used}


def _identifiers(columns: Sequence[_Column]) -> dict[Path_, str]:
    """Return a name in `[schema]` for each column: the last part of its path where no other has that."""
    names: dict[Path_, str] = {}
    for column in columns:
        for end in range(1, len(column.path) + 1):
            name = re.sub(r"\W", "_", "_".join(column.path[-end:]), flags=re.ASCII)
            name = name if re.match(r"[A-Za-z_]", name) else f"_{name}"
            if _is_free(name, names.values()):
                break
        while not _is_free(name, names.values()):
            name += "_"
        names[column.path] = name
    return names


def _field_of(column: _Column, identifiers: Mapping[Path_, str]) -> str | Path_:
    return _written_path(column.path, identifiers[column.path])


def _written_path(path: Path_, name: str) -> str | Path_:
    """Return the key `field` for a path; empty where the name is enough."""
    if path == (name,):
        return ""
    return path if any("." in part for part in path) else ".".join(path)


def _classes(target: _Column) -> tuple[Classes, str]:
    """Return the classes of the label, and why."""
    name, values = target.written, set(target.present) if target.kind not in ("list", "") else set()
    if target.kind == "bool":
        return 2, f"{name} is true or false"
    if target.kind == "string":
        if not 2 <= len(values) <= _MOST_CLASSES:
            raise SettingsError(f"the label {name} has {len(values)} classes, not 2 to {_MOST_CLASSES}")
        return sorted(values), f"{name} has {len(values)} values, which are classes"
    if (
        target.kind == "int"
        and values
        and min(values) >= 0
        and len(values) <= _MOST_NUMBERS
        and max(values) < _MOST_CLASSES
    ):
        count = int(max(1, *values)) + 1
        return count, f"{name} has whole numbers up to {count - 1}, which are classes"
    if target.kind in ("int", "float"):
        return None, f"{name} has numbers such as {target.present[0]}: a regression"
    raise SettingsError(f"the label {name} has {target.kind or 'values of several type'}s, not classes or numbers")


def _described(column: _Column, name: str, target: _Column) -> PipelineField:
    """Return what becomes of a column, and why."""
    of = PipelineField(name, field=_written_path(column.path, name))
    left_out = replace(of, name=column.written)
    missing = f", and {column.nulls:,} rows have none" if column.nulls else ""
    if not column.present:
        return replace(left_out, why="no row has a value")
    if column.kind == "":
        return replace(left_out, why="its values are of several types, or objects")
    if column.kind == "list":
        return _of_lists(column, of, left_out)
    if column.kind == "time" or _unit(column) is not None:
        return _of_times(column, of, left_out)
    if column.is_id:
        return replace(
            left_out,
            why="it is an id, by which a model would remember events; where it says more, set encode = {learn = N}",
        )
    if column.is_row_number:
        return replace(left_out, why="it numbers the rows")
    if column.distinct == 1 and column.kind not in ("int", "float"):
        return replace(left_out, why=f"it is {column.present[0]!r} in each row")
    if _gives_away(column, target):
        return replace(
            left_out, why=f"each of its values has one {target.written} alone: it seems to be known after it"
        )
    if column.kind == "bool":
        return replace(of, dtype="bool", may_be_missing=bool(column.nulls), comment=f"true or false{missing}")
    if column.is_text:
        return replace(left_out, why="it is a text: see encode = {tokenizer = ...}")
    if column.kind == "string":
        count = column.distinct
        if count <= _FEW:
            words, comment = tuple(sorted(set(column.present))), f"{count} different texts: categories{missing}"
            return replace(of, dtype="string", vocabulary=words, may_be_missing=bool(column.nulls), comment=comment)
        rows = min(2**16, 2 ** math.ceil(math.log2(count * 2)))
        comment = f"{count:,} different texts: rows of a table that grows{missing}"
        return replace(of, dtype="string", learn=rows, may_be_missing=bool(column.nulls), comment=comment)
    try:
        numbers = np.array(column.present, np.float64)
    except OverflowError:
        return replace(left_out, why="it has whole numbers that are larger than any float")
    return _of_numbers(of, numbers, missing)


def _of_numbers(of: PipelineField, values: Any, missing: str) -> PipelineField:
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
    heavy = high > low and float(values.std()) > 5 * (high - low)
    comment = f"numbers from {values.min():.4g} to {values.max():.4g}, half of them up to {middle:.4g}"
    if values.min() == values.max():  # later rows may have others, and until then it is 0 once it is scaled
        comment = f"{values.min():.4g} in each row so far"
    comment += f", a few far from the others{missing}" if heavy else missing
    return replace(
        of,
        dtype="float32",
        scale="quantile" if heavy else "standard",
        missing="indicator" if missing else "",
        comment=comment,
    )


def _of_lists(column: _Column, of: PipelineField, left_out: PipelineField) -> PipelineField:
    shapes = {_shape(value) for value in column.present}
    shape = shapes.pop() if len(shapes) == 1 else None
    if not shape or not all(shape) or column.nulls:
        return replace(left_out, why="it has lists that are no numbers, of several lengths, or missing")
    comment = f"lists of {' x '.join(map(str, shape))} numbers"
    return replace(of, dtype="float32", shape=shape, scale="standard", comment=comment)


def _shape(value: Any) -> tuple[int, ...] | None:
    """Return the shape of numbers in lists, maybe of lists; None where they are no numbers or have no shape."""
    try:
        numbers = np.asarray(value)
    except ValueError:
        return None
    return numbers.shape if numbers.dtype.kind in "iuf" else None


def _unit(column: _Column) -> str | None:
    """Return the unit of a column of times since 1970 as numbers; None for other numbers."""
    if column.kind not in ("int", "float") or not _OF_TIME.search(column.path[-1]):
        return None
    low, high = min(column.present), max(column.present)
    return next((unit for unit, by in _UNITS.items() if _YEAR_2000 * by <= low and high <= _YEAR_2100 * by), None)


def _of_times(column: _Column, of: PipelineField, left_out: PipelineField) -> PipelineField:
    if column.nulls:
        return replace(left_out, why=f"it is a time, which {column.nulls:,} rows do not have")
    unit = _unit(column)
    if unit is None:
        seconds = [_seconds(value) or 0.0 for value in column.present]
    else:
        seconds = [value / _UNITS[unit] for value in column.present]
    days = (max(seconds) - min(seconds)) / _DAY
    cycles = ("day",) if days < 7 else ("day", "week") if days < 400 else ("day", "week", "year")
    what = "ISO times" if unit is None else f"times in {unit} since 1970"
    return replace(
        of, dtype="float64", cycles=cycles, unit=unit or "s", comment=f"{what}, over {days:,.1f} days: their cycles"
    )


def _gives_away(column: _Column, target: _Column) -> bool:
    """Return whether each of several values of a column has one label alone, and each label one value."""
    if target.kind not in ("bool", "int", "string") or column.distinct != target.distinct or target.distinct < 2:
        return False
    if len(column.present) < 2 * target.distinct:
        return False  # of numbers that are all different each pair is unique
    pairs = {pair for pair in zip(column.values, target.values, strict=True) if None not in pair}
    return len(column.present) >= _FEWEST_ROWS and len(pairs) == target.distinct == len({value for value, _ in pairs})
