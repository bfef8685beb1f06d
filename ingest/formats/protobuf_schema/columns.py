"""Decodes Protobuf records in columns: to Arrow by ptars, then as the format `arrow` does.

Legend: M records, G of them that are Protobuf messages.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from ptars import HandlerPool

from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats.arrow_columns import Faults, columns_of, fields_of
from anabranch.ingest.formats.base import Decoded, reject_unusable_numbers
from anabranch.ingest.formats.protobuf_schema.fields import ReadField, ReadType
from anabranch.ingest.formats.protobuf_schema.records import ProtobufRecords, unreadable_rejects


class ProtobufColumns:
    """Decodes records of one message type together; `one_by_one` decides about records that ptars refuses."""

    def __init__(self, read: ReadType, schema: Schema, one_by_one: ProtobufRecords) -> None:
        self._read = read
        self._schema = schema
        self._fields = tuple(fields_of(schema))
        self._one_by_one = one_by_one
        self._handler: Any = HandlerPool([read.message.file]).get_for_message(read.message)

    def decode(self, records: Sequence[bytes]) -> Decoded:
        """Decode M records, each one event or a reject.

        ptars reads some records that are not Protobuf messages: groups that end with another number than they began,
        and lists of fixed-size numbers that end within one. So the runtime parses all before.
        """
        unreadable = self._one_by_one.unreadable(records)
        try:
            if not unreadable:
                return self._decode_readable(records)
            readable = [index for index in range(len(records)) if index not in unreadable]
            decoded = self._decode_readable([records[index] for index in readable]).at(np.array(readable, np.int32))
        except ValueError:
            return self._one_by_one.decode(records)
        return replace(decoded, rejects=sorted([*decoded.rejects, *unreadable_rejects(unreadable)]))

    def _decode_readable(self, records: Sequence[bytes]) -> Decoded:
        """Decode G records together; raises ValueError if ptars refuses one of them."""
        batch = self._handler.list_to_record_batch(list(records))
        arrays = {field.declared.name: _array(field, _column(batch, field.steps)) for field in self._read.fields}
        n = len(records)
        faults = Faults(n)
        columns = columns_of(self._schema, self._fields, arrays, faults)
        index, row = np.arange(n, dtype=np.int32), np.zeros(n, np.int32)
        decoded = Decoded(index, row, columns, (), n if self._read.has_unknown else 0)
        return reject_unusable_numbers(faults.remove_from(decoded, "schema: "), self._schema)


def _column(batch: Any, steps: Sequence[str]) -> Any:
    """Return the array of a field, null where a message that it is in is absent."""
    array = batch.column(steps[0])
    for name in steps[1:]:
        array = pc.struct_field(array, name)
    return array


def _array(field: ReadField, array: Any) -> Any:
    """Return the Arrow array of a field as the format `arrow` reads it, null where the field is missing."""
    if field.form == "list":
        return _lists(field, array)
    if field.form == "timestamp":
        seconds, nanos = (each.fill_null(0).to_numpy() for each in array.flatten())
        return pa.array(
            field.declared.of_seconds(seconds + nanos / 1e9), mask=~array.is_valid().to_numpy(zero_copy_only=False)
        )
    if field.form == "wrapper":
        (array,) = array.flatten()
    if field.words is not None:
        array = _words(field, array)
    if field.missing is not None:
        words = array.cast(pa.string())
        return pc.if_else(pc.equal(words, field.missing), None, words)
    return array.cast(pa.int8()) if field.scalar == "bool" and field.declared.is_label else array


def _lists(field: ReadField, array: Any) -> Any:
    """Return lists with an enum's names, and null for those that are empty, except in labels."""
    values = array.values if field.words is None else _words(field, array.values)
    absent = array.is_null().to_numpy(zero_copy_only=False)
    if not field.declared.is_label:
        absent = absent | np.equal(np.diff(array.offsets.to_numpy()), 0)
    mask = pa.array(absent) if absent.any() else None
    return pa.ListArray.from_arrays(array.offsets, values, mask=mask)


def _words(field: ReadField, numbers: Any) -> Any:
    """Return the names of an enum's values as a dictionary array."""
    coded = numbers.dictionary_encode()
    words = pa.array([field.word(number) for number in coded.dictionary.to_pylist()], pa.string())
    return pa.DictionaryArray.from_arrays(coded.indices, words)
