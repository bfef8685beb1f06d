"""`anabranch init --history`: a pipeline for a folder of Parquet, written from the columns of its files."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import types

from anabranch.config.toml_text import toml_comment, toml_value
from anabranch.core.errors import SettingsError
from ingest.backfill.files import FileMark, listed, store_of
from ingest.backfill_settings import SUFFIXES, BackfillSettings

_MOST_CLASSES = 1000
_BUCKETS = 1000
"""Hash buckets of a column of strings."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NAMED = 5
"""Columns that an error names."""
_OF_KAFKA = ("", "kafka_", "_kafka_", "__")
"""What sinks of Kafka Connect usually put before `topic`, `partition` and `offset`."""


@dataclass
class _Columns:
    """What becomes of the columns of a file."""

    numbers: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    """Features: dtype and shape."""
    words: list[str] = field(default_factory=list)
    """Features that are strings."""
    nulls: set[str] = field(default_factory=set)
    time: str | None = None
    identity: tuple[str, str, str] | None = None
    left_out: dict[str, str] = field(default_factory=dict)
    """Columns that are no feature, and why."""
    remarks: list[str] = field(default_factory=list)
    """What else was decided that another reader of the files might not have."""


def described_pipeline(folder: Path, pattern: str, label: str) -> tuple[dict[str, str], list[str]]:
    """Return `pipeline.toml` and `my_model.py` for the files of a glob or URL, of which the first is read, and remarks.

    Raises:
        SettingsError: no file matches, or the first cannot be read or has no usable column `label`.
        HistoryAwayError: the storage does not answer.
    """
    absolute = pattern if "://" in pattern else str(Path(pattern).absolute())
    settings = BackfillSettings(files=(absolute,), format="parquet")
    mark = listed(settings)[0]
    with store_of(mark.name, settings).open(mark) as file:
        try:
            with pq.ParquetFile(file) as parquet:
                columns, described = _read(parquet, mark, label)
        except (pa.ArrowException, OSError) as exc:
            raise SettingsError(f"{mark.name} cannot be read as Parquet: {str(exc).partition(chr(10))[0]}") from exc
    outputs = described.pop("outputs")
    text = "\n".join(_lines(folder, absolute, mark, columns, label, described, outputs)) + "\n"
    left_out = [f'the column "{toml_comment(name)}" is left out: {why}' for name, why in columns.left_out.items()]
    return {"pipeline.toml": text, "my_model.py": _MODEL}, left_out + columns.remarks


def _read(parquet: Any, mark: FileMark, label: str) -> tuple[_Columns, dict[str, Any]]:
    """Return the columns of a file, and the keys of `[schema.label]` with the number of outputs."""
    schema = parquet.schema_arrow
    if label not in schema.names:
        raise SettingsError(f"{mark.name} has no column {label}; --label takes one of {', '.join(schema.names)}")
    columns = _Columns()
    for prefix in _OF_KAFKA:
        names = f"{prefix}topic", f"{prefix}partition", f"{prefix}offset"
        if columns.identity is None and set(names) <= set(schema.names):
            columns.identity = names
    index = _pandas_index(schema)
    for column in schema:
        if column.name != label and column.name not in (columns.identity or ()):
            _sort(columns, column, is_index=column.name in index)
    columns.nulls = {name for name in (*columns.numbers, *columns.words) if _has_nulls(parquet, name)}
    if not columns.numbers and not columns.words:
        why = "".join(f"; {toml_comment(name)}: {reason}" for name, reason in list(columns.left_out.items())[:_NAMED])
        raise SettingsError(f"{mark.name} has no column that can be a feature besides {label}{why}")
    return columns, _label(parquet, mark, label, columns.remarks)


def _pandas_index(schema: Any) -> set[str]:
    """Return the columns that are the index of the table that pandas wrote, which says so in the file."""
    try:
        named = json.loads((schema.metadata or {}).get(b"pandas", b"{}")).get("index_columns", ())
        return {name for name in named if isinstance(name, str)}
    except (ValueError, AttributeError, TypeError):  # the file's own text, which may be anything
        return set()


def _sort(columns: _Columns, column: Any, *, is_index: bool) -> None:
    """Put a column where it belongs."""
    name, kind = column.name, column.type
    plain = kind.value_type if types.is_dictionary(kind) else kind
    shape: list[int] = []
    inner = kind
    while types.is_fixed_size_list(inner):
        shape.append(inner.list_size)
        inner = inner.value_type
    if not _NAME.fullmatch(name):
        columns.left_out[name] = "its name is not that of a field: rename it to letters, digits and _"
    elif types.is_timestamp(kind) and columns.time is None:
        columns.time = name
    elif is_index:
        columns.left_out[name] = "it is the index of pandas, such as the number of a row"
    elif types.is_string(plain) or types.is_large_string(plain) or types.is_string_view(plain):
        columns.words.append(name)
    elif types.is_boolean(inner) or types.is_integer(inner):
        columns.numbers[name] = str(inner), tuple(shape)
    elif types.is_decimal(inner) and inner.scale == 0:
        columns.numbers[name] = "int64", tuple(shape)
    elif types.is_floating(inner) or types.is_decimal(inner):
        columns.numbers[name] = "float32", tuple(shape)
    else:
        columns.left_out[name] = f"no feature is of Arrow type {toml_comment(str(kind))}"


def _has_nulls(parquet: Any, name: str) -> bool:
    return any(batch.column(0).null_count for batch in parquet.iter_batches(columns=[name]))


def _label(parquet: Any, mark: FileMark, label: str, remarks: list[str]) -> dict[str, Any]:
    """Return the keys of the label, from its values in the first file; adds to `remarks` what was made of them."""
    kind = parquet.schema_arrow.field(label).type
    plain = kind.value_type if types.is_dictionary(kind) else kind
    if types.is_boolean(plain):
        return {"classes": 2, "outputs": 2}
    whole = types.is_integer(plain) or (types.is_decimal(plain) and plain.scale == 0)
    words = types.is_string(plain) or types.is_large_string(plain) or types.is_string_view(plain)
    if not words and not whole and not types.is_floating(plain) and not types.is_decimal(plain):
        raise SettingsError(f"{mark.name}: the label {label} is of Arrow type {kind}, not a number or a string")
    values = pc.unique(parquet.read(columns=[label]).column(label).cast(plain)).drop_null().to_pylist()
    if not words and not whole:
        found = {value for value in values if value == value}
        if found and found <= {0, 1}:
            remarks.append(f"the label {label} has the values 0.0 and 1.0 alone: it has two classes")
            return {"classes": 2, "outputs": 2}
        remarks.append(f"the label {label} has numbers such as {max(found, default=0.0)}: the model is a regression")
        return {"dtype": "float32", "outputs": 1}
    if words:
        described: dict[str, Any] = {"classes": sorted(values), "outputs": len(values)}
    elif not values or min(values) < 0:
        raise SettingsError(f"{mark.name}: the label {label} is {min(values, default='missing')}, not 0 or above")
    else:
        most = int(max(1, *values)) + 1
        described = {"classes": most, "outputs": most}
    if not 2 <= described["outputs"] <= _MOST_CLASSES:
        raise SettingsError(
            f"{mark.name}: the label {label} has {described['outputs']} classes, not 2 to {_MOST_CLASSES}; choose "
            "another --label, or write its values as floats for a regression"
        )
    return described


def _lines(
    folder: Path,
    pattern: str,
    mark: FileMark,
    columns: _Columns,
    label: str,
    described: Mapping[str, Any],
    outputs: int,
) -> Iterator[str]:
    """Yield the lines of `pipeline.toml`."""
    yield f"# Written by anabranch init --history, from the columns of {toml_comment(Path(mark.name).name)}."
    yield f"name = {toml_value(_pipeline_name(folder))}"
    yield ""
    yield "[stream]"
    yield 'topics = ["events"]                  # read after the history; change it to your topic'
    yield ""
    yield "[stream.backfill]"
    yield f"files = [{toml_value(pattern)}]"
    if SUFFIXES.get(PurePosixPath(pattern).suffix) != "parquet":
        yield 'format = "parquet"'
    if columns.identity is not None:
        keys = zip(("topic", "partition", "offset"), columns.identity, strict=True)
        yield f"identity = {{{', '.join(f'{key} = {toml_value(name)}' for key, name in keys)}}}"
    for name, why in columns.left_out.items():
        yield f'# the column "{toml_comment(name)}" is left out: {why}'
    yield from _features(columns)
    yield ""
    yield "[schema.label]"
    yield f"name = {toml_value(label)}"
    yield from (f"{key} = {toml_value(value)}" for key, value in described.items())
    if columns.time is not None:
        yield from ("", "[schema.time]", f"name = {toml_value(columns.time)}")
    yield ""
    yield "[model]"
    yield 'factory = "my_model:build"'
    numbers = sum(math.prod(shape) for _, shape in columns.numbers.values())
    words = ", ".join(f"{name} = {_BUCKETS}" for name in columns.words)
    yield f"args = {{numbers = {numbers}, words = {{{words}}}, outputs = {outputs}}}"
    if "classes" not in described:
        yield 'task = "regression"'


def _features(columns: _Columns) -> Iterator[str]:
    for name, (dtype, shape) in columns.numbers.items():
        yield from ("", f"[schema.features.{name}]", f'dtype = "{dtype}"')
        if shape:
            yield f"shape = {list(shape)}"
        if name in columns.nulls:
            blank = "false" if dtype == "bool" else "0.0" if dtype.startswith("float") else "0"
            yield f"default = {_filled(blank, shape)}                      # some rows have none"
    for name in columns.words:
        yield from ("", f"[schema.features.{name}]", 'dtype = "string"', f"encode = {{hash = {_BUCKETS}}}")
        if name in columns.nulls:
            yield 'default = ""                       # some rows have none'


def _filled(value: str, shape: Sequence[int]) -> str:
    for size in reversed(shape):
        value = f"[{', '.join([value] * size)}]"
    return value


def _pipeline_name(folder: Path) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).strip("-._")[:100] or "pipeline"


_MODEL = '''"""A model for the columns of the history. Replace `build` by your own."""

import torch
from torch import Tensor, nn


class Tabular(nn.Module):
    """A network of two layers over all numbers, and an embedding of each column of strings."""

    def __init__(self, numbers: int, words: dict[str, int], outputs: int, hidden: int) -> None:
        super().__init__()
        self.names = list(words)
        self.words = nn.ModuleList(nn.Embedding(buckets, 8) for buckets in words.values())
        width = numbers + 8 * len(words)
        self.body = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, outputs))

    def forward(self, **features: Tensor) -> Tensor:
        """Return the output float32 `[B, outputs]`, or `[B]` of a regression."""
        numbers = [value for name, value in features.items() if name not in self.names]
        # asinh: large values become small ones. shape[0], not len(): an export takes any number of rows.
        parts = [value.float().asinh().reshape(value.shape[0], -1) for value in numbers]
        parts += [embed(features[name]) for name, embed in zip(self.names, self.words, strict=True)]
        output = self.body(torch.cat(parts, dim=1))
        return output[:, 0] if output.shape[1] == 1 else output


def build(numbers: int, words: dict[str, int], outputs: int, hidden: int = 64) -> nn.Module:
    """Return the model for the schema of pipeline.toml."""
    return Tabular(numbers, words, outputs, hidden)
'''
