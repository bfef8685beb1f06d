"""Finds the message type of a writer schema, from .proto text or from serialized file descriptors in base64.

Imports are resolved from the references of the writer schema, and from the files that come with Protobuf. Others are
left out: files of options, such as `confluent/meta.proto`, are often missing, and no message needs them. A message that
does need one cannot be built.
"""

import base64
import binascii
from collections.abc import Sequence
from typing import Any

# Each module adds its file to the default pool.
from google.protobuf import (
    any_pb2,
    api_pb2,
    descriptor_pb2,
    descriptor_pool,
    duration_pb2,
    empty_pb2,
    field_mask_pb2,
    source_context_pb2,
    struct_pb2,
    timestamp_pb2,
    type_pb2,
    wrappers_pb2,
)
from google.protobuf.descriptor import Descriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.message import DecodeError

from anabranch.ingest.formats.protobuf_schema.text import ProtoTextError, parse_proto
from anabranch.ingest.schema_registry.writer_schema import UnfitSchemaError, WriterSchema

_SHIPPED = {
    module.DESCRIPTOR.name: module.DESCRIPTOR
    for module in (
        any_pb2,
        api_pb2,
        descriptor_pb2,
        duration_pb2,
        empty_pb2,
        field_mask_pb2,
        source_context_pb2,
        struct_pb2,
        timestamp_pb2,
        type_pb2,
        wrappers_pb2,
    )
}


def message_type(writer: WriterSchema, indexes: Sequence[int]) -> Descriptor:
    """Return the message type at `indexes`: that of the message in the file, then of the one nested in it, and so on.

    Raises:
        UnfitSchemaError: the schema cannot be read, or has no such message.
    """
    pool = descriptor_pool.DescriptorPool()
    try:
        for reference in writer.references:
            if not _has(pool, reference.name):  # one that several others refer to may be there already
                _add(pool, _file(reference.name, reference.text))
        file = _file(f"schema/{writer.id}", writer.text)
        _add(pool, file)
        name = _name_at(file, indexes)
        return pool.FindMessageTypeByName(name)
    except (ProtoTextError, DecodeError, TypeError) as exc:
        raise UnfitSchemaError(f"the Protobuf schema {writer.id} cannot be read: {exc}") from exc


def _file(name: str, text: str) -> FileDescriptorProto:
    """Return the descriptor of a file from its text, or from base64."""
    try:
        content = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return parse_proto(name, text)
    file = FileDescriptorProto()
    file.ParseFromString(content)
    file.name = name
    return file


def _add(pool: Any, file: FileDescriptorProto) -> None:
    """Add a file to a pool, with those of its imports that are known."""
    public = {file.dependency[index] for index in file.public_dependency if 0 <= index < len(file.dependency)}
    known = [name for name in dict.fromkeys(file.dependency) if _has(pool, name)]
    del file.dependency[:], file.public_dependency[:], file.weak_dependency[:]
    file.dependency.extend(known)
    file.public_dependency.extend(index for index, name in enumerate(known) if name in public)
    pool.Add(file)


def _has(pool: Any, name: str) -> bool:
    """Return whether a pool has a file; one that comes with Protobuf is added if it has not."""
    try:
        pool.FindFileByName(name)
    except KeyError:
        if name not in _SHIPPED:
            return False
        shipped = FileDescriptorProto()
        _SHIPPED[name].CopyToProto(shipped)
        _add(pool, shipped)
    return True


def _name_at(file: FileDescriptorProto, indexes: Sequence[int]) -> str:
    """Return the full name of the message at `indexes`."""
    names = [file.package] if file.package else []
    messages = file.message_type
    for index in indexes:
        if not 0 <= index < len(messages):
            raise ProtoTextError(f"it has no message at the indexes {list(indexes)}")
        names.append(messages[index].name)
        messages = messages[index].nested_type
    return ".".join(names)
