"""Avro to columns, by pyruhvro and Arrow: all records of one writer schema together."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyruhvro
from pyarrow import types

from anabranch.core.failures import panics_are_errors
from anabranch.ingest.formats.arrow_columns import Faults, columns_of, fields_of
from anabranch.ingest.formats.avro_records.fields import AvroReading
from anabranch.ingest.formats.avro_records.rows import END, END_BYTES, END_FIELD, FOLLOWED, AvroRowsDecoder
from anabranch.ingest.formats.avro_records.schema import written
from anabranch.ingest.formats.base import Decoded, joined, reject_unusable_numbers

_UNITS = {"millis": "ms", "micros": "us", "nanos": "ns"}


def suits_columns(reading: AvroReading) -> bool:
    """Return whether pyruhvro can decode these records, with bounded memory."""
    decimals = any(kind.logical == "decimal" for name in reading.fields for kind in reading.type_of(name).walk())
    if decimals or not reading.record.suits_columns:
        return False
    try:
        pyruhvro.avro_to_arrow_schema(_columns_text(reading))
    except ValueError:  # such as a union in a union, which fastavro reads
        return False
    return True


_FEWEST = 256
"""Records that are decoded together; where fewer cannot be, one by one costs less than smaller groups."""
_MOST_FAILURES = 32
"""Groups that fail before the rest is decoded one by one: halving costs more where bad records are many."""


class AvroColumnsDecoder:
    """Decodes records together; where one cannot be read, halves of them, and small groups one by one."""

    def __init__(self, reading: AvroReading) -> None:
        self._reading = reading
        self._text = _columns_text(reading)
        self._fields = tuple(fields_of(reading.schema))
        self._steps = {name: reading.steps(name) for name in reading.fields}
        self._rows = AvroRowsDecoder(reading)

    def decode(self, records: Sequence[bytes]) -> Decoded:
        """Decode M records, each one event or a reject."""
        return self._decode(records, [])

    def _decode(self, records: Sequence[bytes], failures: list[int]) -> Decoded:
        """Decode records; `failures` gets the size of each group that fails."""
        if len(failures) >= _MOST_FAILURES:
            return self._rows.decode(records)
        try:
            with panics_are_errors():
                batch = self._read(records)
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001 pyruhvro raises its own for each kind of bad record
            if len(records) <= _FEWEST:
                return self._rows.decode(records)
            failures.append(len(records))
            return self._decode_halves(records, failures)
        return self._converted(batch)

    def _decode_halves(self, records: Sequence[bytes], failures: list[int]) -> Decoded:
        half = len(records) // 2
        first, second = self._decode(records[:half], failures), self._decode(records[half:], failures)
        return joined([first, second.at(np.arange(half, len(records), dtype=np.int32))])

    def _read(self, records: Sequence[bytes]) -> Any:
        batch = pyruhvro.deserialize_array([record + END_BYTES for record in records], self._text)
        for column in {steps[0] for steps in self._steps.values()}:
            batch.column(column).validate(full=True)  # pyruhvro does not check that text is UTF-8
        return batch

    def _converted(self, batch: Any) -> Decoded:
        reading, n = self._reading, batch.num_rows
        arrays = {name: _array_at(batch, steps) for name, steps in self._steps.items()}
        for name, logical in reading.times.items():
            arrays[name] = _as_times(arrays[name], pa.timestamp(_UNITS[logical.rpartition("-")[2]]))
        if reading.is_label_boolean:
            arrays[reading.schema.label.name] = arrays[reading.schema.label.name].cast(pa.int8())
        faults = Faults(n)
        faults.add(batch.column(END_FIELD).to_numpy() != END, FOLLOWED)
        columns = columns_of(reading.schema, self._fields, arrays, faults)
        index = np.arange(n, dtype=np.int32)
        row = np.zeros(n, np.int32)
        decoded = Decoded(index, row, columns, (), n if reading.has_unknown else 0)
        return reject_unusable_numbers(faults.remove_from(decoded, "schema: "), reading.schema)


def _array_at(batch: Any, steps: Sequence[str]) -> Any:
    array = batch.column(steps[0])
    for step in steps[1:]:
        array = pc.struct_field(array, array.type.get_field_index(step))
    return array


def _as_times(array: Any, kind: Any) -> Any:
    """Return an array of counts, or of lists of them, as one of timestamps."""
    return array.cast(pa.list_(kind) if types.is_list(array.type) else kind)


def _columns_text(reading: AvroReading) -> str:
    return written(reading.record, reading.record.fields, END_FIELD, for_columns=True)
