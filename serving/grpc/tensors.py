"""Requests and replies of gRPC, to and from those of the service."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from anabranch.serving.errors import BadRequestError, shorten
from anabranch.serving.grpc.messages import MESSAGES
from anabranch.serving.protocol.bodies import Parameters, RequestedOutput
from anabranch.serving.protocol.codec import GivenInput, Request, Signature
from anabranch.serving.protocol.parameters import check_served
from anabranch.serving.protocol.tensors import Array, TensorSpec, check_finite, read_binary, write_binary

_HARMLESS_BYTES = 65_536
"""A shorter message cannot unfold into much."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_LONGEST_VARINT = 10


def check_fields(body: bytes, descriptor: Any, most: int) -> None:
    """Raise BadRequestError where a message, with those in it, has more than `most` fields, or is malformed.

    Called before the message is parsed, since two bytes can unfold into a message of fifty. Reads the wire format of
    https://protobuf.dev/programming-guides/encoding far enough to count fields.
    """
    if len(body) > _HARMLESS_BYTES:
        _count(memoryview(body), descriptor, most, most)


def _count(view: memoryview, descriptor: Any, left: int, most: int) -> int:
    """Return how many of `left` fields are left after those of a message."""
    position, end = 0, len(view)
    while position < end:
        if not left:
            raise BadRequestError(
                f"the message has more than {most} fields; send elements packed, or fewer rows at once"
            )
        left -= 1
        tag, position = _varint(view, position)
        kind = tag & 7
        if kind == _VARINT:
            _, position = _varint(view, position)
        elif kind == _BYTES:
            size, position = _varint(view, position)
            field = descriptor.fields_by_number.get(tag >> 3)
            if field is not None and field.message_type is not None and position + size <= end:
                left = _count(view[position : position + size], field.message_type, left, most)
            position += size
        elif kind in (_FIXED32, _FIXED64):
            position += 4 if kind == _FIXED32 else 8
        else:
            raise BadRequestError("the message has fields of a kind that the protocol does not have")
    if position > end:
        raise BadRequestError("the message ends within a field")
    return left


def _varint(view: memoryview, position: int) -> tuple[int, int]:
    value = 0
    for index in range(_LONGEST_VARINT):
        if position >= len(view):
            raise BadRequestError("the message ends within a field")
        byte = view[position]
        position += 1
        value |= (byte & 127) << (7 * index)
        if byte < 128:
            return value, position
    raise BadRequestError("the message has a number of more than 64 bits")


_CONTENTS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
"""The field of `InferTensorContents` for each datatype; FP16 has none, and is sent raw."""
_MOST_ITEMS = 64
"""Largest number of parameters, and of requested outputs."""
_MOST_DIMENSIONS = 64
_OTHER_FIELDS = 4096
"""Fields of a request besides its inputs and the elements that are strings, which are a field each."""


def parse_request(signature: Signature, body: bytes) -> Any:
    """Return the `ModelInferRequest` in a body.

    Raises:
        BadRequestError: it is none, or has more fields than any request for the model.
    """
    kind = MESSAGES["ModelInferRequest"]
    check_fields(body, kind.DESCRIPTOR, _OTHER_FIELDS + 2 * len(signature.inputs) + signature.most_strings)
    try:
        return kind.FromString(body)
    except DecodeError as exc:
        raise BadRequestError("the message is no ModelInferRequest") from exc


def read_request(signature: Signature, message: Any) -> Request:
    """Read a `ModelInferRequest`.

    Raises:
        BadRequestError: it does not fit the protocol or the model.
        TooLargeError: it has more rows than the queue.
    """
    inputs, raw = message.inputs, message.raw_input_contents
    if len(inputs) > len(signature.inputs):
        raise BadRequestError(f"the request has {len(inputs)} inputs; inputs are {', '.join(signature.inputs)}")
    if raw and len(raw) != len(inputs):
        raise BadRequestError(f"raw_input_contents has {len(raw)} elements for {len(inputs)} inputs")
    if len(message.outputs) > _MOST_ITEMS:
        raise BadRequestError(f"there are {len(message.outputs)} outputs; there may be {_MOST_ITEMS}")
    for tensor in inputs:
        check_served(_parameters(tensor.parameters), f"input {shorten(tensor.name)!r}")
    given = [GivenInput(tensor.name, tensor.datatype, _shape(tensor)) for tensor in inputs]

    def read(index: int, spec: TensorSpec, rows: int) -> Array:
        if not raw:
            return _read_contents(spec, inputs[index].contents, rows)
        if inputs[index].HasField("contents"):
            raise BadRequestError(f"input {spec.name!r} has contents besides raw_input_contents")
        return read_binary(spec, memoryview(raw[index]), rows)

    requested = [RequestedOutput(output.name, _parameters(output.parameters)) for output in message.outputs]
    return signature.request(given, read, _parameters(message.parameters), requested, message.id or None)


def write_reply(
    request: Request,
    answers: Mapping[str, Array],
    signature: Signature,
    name: str,
    version: str,
    progress: Mapping[str, str],
) -> bytes:
    """Write a `ModelInferResponse` with raw contents; `progress` are its parameters."""
    reply = MESSAGES["ModelInferResponse"](model_name=name, model_version=version, id=request.id or "")
    for key, value in progress.items():
        reply.parameters[key].string_param = value
    for output in request.outputs:
        array = signature.answer(request, answers, output)
        reply.outputs.add(name=output, datatype=signature.datatype(output, array), shape=array.shape)
        reply.raw_output_contents.append(write_binary(array))
    written: bytes = reply.SerializeToString()
    return written


def _shape(tensor: Any) -> list[int]:
    if len(tensor.shape) > _MOST_DIMENSIONS:
        raise BadRequestError(f"input {shorten(tensor.name)!r} has {len(tensor.shape)} dimensions")
    return list(tensor.shape)


def _parameters(entries: Any) -> Parameters:
    if len(entries) > _MOST_ITEMS:
        raise BadRequestError(f"there are {len(entries)} parameters; there may be {_MOST_ITEMS}")
    parameters: Parameters = {}
    for key, value in entries.items():
        choice = value.WhichOneof("parameter_choice")
        parameters[key] = None if choice is None else getattr(value, choice)
    return parameters


def _read_contents(spec: TensorSpec, contents: Any, rows: int) -> Array:
    """Read the one field of typed contents into `[rows, *spec.shape]`; strings come as an object array."""
    field = _CONTENTS.get(spec.datatype)
    given = [each.name for each, _ in contents.ListFields()]
    if field is None or given not in ([field], []):
        raise BadRequestError(
            f"input {spec.name!r} has {' and '.join(given) or 'no contents'}; {spec.datatype} is sent in "
            f"{f'{field} or ' if field else ''}raw_input_contents"
        )
    values = getattr(contents, field)
    expected = rows * spec.row_elements
    if len(values) != expected:
        raise BadRequestError(f"input {spec.name!r} has {len(values)} elements, but its shape asks for {expected}")
    shape = (rows, *spec.shape)
    if spec.dtype is None:
        return np.array(_texts(spec, values), dtype=object).reshape(shape)
    array = np.array(values, dtype={"i": np.int64, "u": np.uint64}.get(spec.dtype.kind, spec.dtype))
    if spec.dtype.kind in "iu":
        limits = np.iinfo(spec.dtype.name)
        if array.size and (array.min() < limits.min or array.max() > limits.max):
            raise BadRequestError(f"input {spec.name!r} has elements that are not {spec.datatype}")
    return check_finite(spec, array.astype(spec.dtype, copy=False).reshape(shape))


def _texts(spec: TensorSpec, values: Sequence[bytes]) -> list[str]:
    try:
        return [value.decode() for value in values]
    except UnicodeDecodeError as exc:
        raise BadRequestError(f"input {spec.name!r} has a string that is not UTF-8") from exc
