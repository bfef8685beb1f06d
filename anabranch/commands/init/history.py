"""`anabranch init --history`: a pipeline for a folder of Parquet, written from the columns of its files."""

from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import types

from anabranch.commands.init.files import FIELD_NAME, UNFIT_NAME, Classes, PipelineField, SectionField, pipeline_files
from anabranch.config.toml_text import toml_value
from anabranch.core.errors import SettingsError
from anabranch.ingest.backfill.files import FileMark, listed, store_of
from anabranch.ingest.backfill.parquet_file import pandas_index
from anabranch.ingest.settings.backfill import SUFFIXES, BackfillSettings

_MOST_CLASSES = 1000
_NAMED = 5
"""Columns that an error names."""
_OF_KAFKA = ("", "kafka_", "_kafka_", "__")
"""What sinks of Kafka Connect usually put before `topic`, `partition` and `offset`."""


@dataclass
class _Columns:
    """What becomes of the columns of a file."""

    features: list[PipelineField] = field(default_factory=list)
    time: str | None = None
    identity: tuple[str, str, str] | None = None
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
                columns, classes = _read(parquet, mark, label)
        except (pa.ArrowException, OSError) as exc:
            raise SettingsError(f"{mark.name} cannot be read as Parquet: {str(exc).partition(chr(10))[0]}") from exc
    stream = ['topics = ["events"]                  # read after the history; change it to your topic']
    stream += ["", "[stream.backfill]", f"files = [{toml_value(absolute)}]"]
    if SUFFIXES.get(PurePosixPath(absolute).suffix) != "parquet":
        stream.append('format = "parquet"')
    if columns.identity is not None:
        identity = dict(zip(("topic", "partition", "offset"), columns.identity, strict=True))
        stream.append(f"identity = {toml_value(identity)}")
    time = None if columns.time is None else SectionField(columns.time)
    source = f"the columns of {Path(mark.name).name}"
    files = pipeline_files(
        columns.features, source, folder.resolve().name, stream, (SectionField(label), classes), time=time
    )
    left_out = [each.sentence for each in columns.features if not each.is_read]
    return files, left_out + columns.remarks


def _read(parquet: Any, mark: FileMark, label: str) -> tuple[_Columns, Classes]:
    """Return the columns of a file, and the classes of the label."""
    schema = parquet.schema_arrow
    if label not in schema.names:
        raise SettingsError(f"{mark.name} has no column {label}; --label takes one of {', '.join(schema.names)}")
    columns = _Columns()
    for prefix in _OF_KAFKA:
        names = f"{prefix}topic", f"{prefix}partition", f"{prefix}offset"
        if columns.identity is None and set(names) <= set(schema.names):
            columns.identity = names
    index = pandas_index(schema)
    for column in schema:
        if column.name != label and column.name not in (columns.identity or ()):
            _sort(columns, column, is_index=column.name in index)
    columns.features = [
        replace(each, may_be_missing=each.is_read and _has_nulls(parquet, each.name)) for each in columns.features
    ]
    if not any(each.is_read for each in columns.features):
        why = "".join(f"; {each.sentence}" for each in columns.features[:_NAMED])
        raise SettingsError(f"{mark.name} has no column that can be a feature besides {label}{why}")
    return columns, _label(parquet, mark, label, columns.remarks)


def _sort(columns: _Columns, column: Any, *, is_index: bool) -> None:
    """Put a column where it belongs."""
    name, kind = column.name, column.type
    plain = kind.value_type if types.is_dictionary(kind) else kind
    shape: list[int] = []
    inner = kind
    while types.is_fixed_size_list(inner):
        shape.append(inner.list_size)
        inner = inner.value_type
    if not FIELD_NAME.fullmatch(name):
        columns.features.append(PipelineField(name, why=UNFIT_NAME))
    elif types.is_timestamp(kind) and columns.time is None:
        columns.time = name
    elif is_index:
        columns.features.append(PipelineField(name, why="it is the index of pandas, such as the number of a row"))
    elif types.is_string(plain) or types.is_large_string(plain) or types.is_string_view(plain):
        columns.features.append(PipelineField(name, "string"))
    elif types.is_boolean(inner) or types.is_integer(inner):
        columns.features.append(PipelineField(name, str(inner), tuple(shape)))
    elif types.is_decimal(inner) and inner.scale == 0:
        columns.features.append(PipelineField(name, "int64", tuple(shape)))
    elif types.is_floating(inner) or types.is_decimal(inner):
        columns.features.append(PipelineField(name, "float32", tuple(shape)))
    else:
        columns.features.append(PipelineField(name, why=f"no feature is of Arrow type {kind}"))


def _has_nulls(parquet: Any, name: str) -> bool:
    return any(batch.column(0).null_count for batch in parquet.iter_batches(columns=[name]))


def _label(parquet: Any, mark: FileMark, label: str, remarks: list[str]) -> Classes:
    """Return the classes of the label, from its values in the first file; adds to `remarks` what was made of them."""
    kind = parquet.schema_arrow.field(label).type
    plain = kind.value_type if types.is_dictionary(kind) else kind
    if types.is_boolean(plain):
        return 2
    whole = types.is_integer(plain) or (types.is_decimal(plain) and plain.scale == 0)
    words = types.is_string(plain) or types.is_large_string(plain) or types.is_string_view(plain)
    if not words and not whole and not types.is_floating(plain) and not types.is_decimal(plain):
        raise SettingsError(f"{mark.name}: the label {label} is of Arrow type {kind}, not a number or a string")
    values = pc.unique(parquet.read(columns=[label]).column(label).cast(plain)).drop_null().to_pylist()
    if not words and not whole:
        found = {value for value in values if value == value}
        if found and found <= {0, 1}:
            remarks.append(f"the label {label} has the values 0.0 and 1.0 alone: it has two classes")
            return 2
        remarks.append(f"the label {label} has numbers such as {max(found, default=0.0)}: the model is a regression")
        return None
    if not words and (not values or min(values) < 0):
        raise SettingsError(f"{mark.name}: the label {label} is {min(values, default='missing')}, not 0 or above")
    classes = sorted(values) if words else int(max(1, *values)) + 1
    count = classes if isinstance(classes, int) else len(classes)
    if not 2 <= count <= _MOST_CLASSES:
        raise SettingsError(
            f"{mark.name}: the label {label} has {count} classes, not 2 to {_MOST_CLASSES}; choose another --label, or "
            "write its values as floats for a regression"
        )
    return classes
