"""Messages of the Open Inference Protocol v2 as a client writes and reads them, in JSON or with binary tensors.

Source: https://github.com/kserve/open-inference-protocol and Triton's binary tensor data extension.

Legend: N events of a request.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from anabranch.ingest.events.block import Array
from anabranch.ingest.events.schema import Feature

HEADER_LENGTH = "Inference-Header-Content-Length"
"""The HTTP header with the number of JSON bytes in a body; binary tensors follow them."""
_BINARY = frozenset({"binary_tensor_data", "binary_data"})
"""Names of the extension by which tensors are sent as bytes."""
_DTYPES: Mapping[str, Any] = {
    "BOOL": np.bool_,
    **{f"{kind.upper()}{bits}": np.dtype(f"{kind}{bits}") for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
    **{f"FP{bits}": np.dtype(f"float{bits}") for bits in (16, 32, 64)},
}
_LONGEST = 200
"""Characters of the server's own words in a sentence."""

_T = TypeVar("_T")


class MessageError(Exception):
    """The server's answer is no answer to the request, and would not be one the next time; a clause without subject."""


class _ServerMetadata(msgspec.Struct):
    extensions: list[str] = []


class _TensorMetadata(msgspec.Struct):
    name: str
    datatype: str
    shape: list[int] = []


class _ModelTensors(msgspec.Struct):
    inputs: list[_TensorMetadata]
    outputs: list[_TensorMetadata]


class _OutputTensor(msgspec.Struct):
    name: str
    datatype: str
    shape: list[int]
    parameters: dict[str, Any] = {}
    data: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b""))


class _Outputs(msgspec.Struct):
    outputs: list[_OutputTensor]


class _ServerError(msgspec.Struct):
    error: str


@dataclass(frozen=True)
class ModelMetadata:
    """What the server says of its model: the datatype of each input that is sent, and whether tensors may be bytes."""

    datatypes: Mapping[str, str]
    binary: bool


def read_extensions(content: bytes) -> list[str]:
    """Return the extensions of the protocol that the server names."""
    return _decoded(content, _ServerMetadata, "metadata of a server").extensions


def read_metadata(content: bytes, features: Sequence[Feature], output: str, extensions: Sequence[str]) -> ModelMetadata:
    """Return the metadata of a model that takes the features and has the output."""
    model = _decoded(content, _ModelTensors, "metadata of a model")
    inputs, outputs = {each.name: each.datatype for each in model.inputs}, [each.name for each in model.outputs]
    if output not in outputs:
        raise MessageError(f"has no output {output!r} but {_names(outputs)}: set model.teacher.output")
    for feature in features:
        if feature.name not in inputs:
            raise MessageError(f"has no input {feature.name!r} but {_names(inputs)}: set model.teacher.features")
        if inputs[feature.name] not in _DTYPES:
            datatype = shorten(inputs[feature.name])
            sent = "ids of strings, as schema.features encodes them" if feature.is_string else str(feature.dtype)
            raise MessageError(
                f"takes {datatype} for {feature.name!r}, and events have {sent}: leave it out of model.teacher.features"
            )
    return ModelMetadata({each.name: inputs[each.name] for each in features}, bool(_BINARY & set(extensions)))


def fitting(metadata: ModelMetadata, arrays: Mapping[str, Array]) -> tuple[NDArray[np.bool_], str | None]:
    """Return which of N events have the same values in the datatypes of the server, and a clause on one that has not.

    Floating point numbers may be rounded, but not become infinite.
    """
    fits_N, misfit = np.ones(len(next(iter(arrays.values()))), np.bool_), None
    for name, array in arrays.items():
        fits = _is_kept(array, _DTYPES[metadata.datatypes[name]])
        if not fits.all():
            fits_N &= fits.reshape(len(array), -1).all(axis=1)
            misfit = misfit or (
                f"takes {metadata.datatypes[name]} for {name!r}, which has no {array[~fits].flat[0]}: bound "
                f"schema.features.{name} by min and max, or leave it out of model.teacher.features"
            )
    return fits_N, misfit


def _is_kept(array: Array, dtype: Any) -> NDArray[np.bool_]:
    """Return which values stay what they are in a dtype."""
    with np.errstate(over="ignore", invalid="ignore"):
        sent = array.astype(dtype)
        kept: NDArray[np.bool_]
        if array.dtype.kind == sent.dtype.kind == "f":
            kept = np.isfinite(sent) | ~np.isfinite(array)
        else:  # a negative number may come back from a type without a sign
            kept = np.equal(sent.astype(array.dtype), array) & np.equal(np.less(sent, 0), np.less(array, 0))
    return kept


def write_request(metadata: ModelMetadata, arrays: Mapping[str, Array], output: str) -> tuple[bytes, int | None]:
    """Return the body of a request for one output of N events, and the value of HEADER_LENGTH; None: all is JSON.

    Raises:
        MessageError: the server's datatypes have not all values; see `fitting`.
    """
    _, misfit = fitting(metadata, arrays)
    if misfit is not None:
        raise MessageError(misfit)
    inputs, blobs = list[dict[str, Any]](), list[bytes]()
    for name, array in arrays.items():
        datatype = metadata.datatypes[name]
        sent = array.astype(_DTYPES[datatype])
        tensor: dict[str, Any] = {"name": name, "datatype": datatype, "shape": list(array.shape)}
        if metadata.binary:
            blobs.append(sent.astype(sent.dtype.newbyteorder("<"), copy=False).tobytes())
            tensor["parameters"] = {"binary_data_size": len(blobs[-1])}
        else:
            tensor["data"] = sent.reshape(-1).tolist()
        inputs.append(tensor)
    requested: dict[str, Any] = {"name": output}
    if metadata.binary:
        requested["parameters"] = {"binary_data": True}
    head = msgspec.json.encode({"inputs": inputs, "outputs": [requested]})
    return (b"".join((head, *blobs)), len(head)) if metadata.binary else (head, None)


def read_output(content: bytes, length: str | None, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Return the values of an output, float32 of `shape`, from an answer with the header HEADER_LENGTH `length`.

    Numbers that float32 does not have are infinite; null in JSON is NaN.
    """
    if length is not None and not (length.isascii() and length.isdigit() and int(length) <= len(content)):
        raise MessageError(f"answers with {HEADER_LENGTH} = {shorten(length)!r} and {len(content)} bytes")
    end = len(content) if length is None else int(length)
    reply = _decoded(content[:end], _Outputs, "outputs")
    binary = memoryview(content)[end:]
    for output in reply.outputs:
        size = output.parameters.get("binary_data_size")
        if size is not None and (type(size) is not int or not 0 <= size <= len(binary)):
            raise MessageError(
                f"answers with binary_data_size = {shorten(repr(size))}, and {len(binary)} bytes are left"
            )
        if output.name == name:
            return _values(output, None if size is None else binary[:size], shape)
        binary = binary[size or 0 :]
    raise MessageError(f"answers without the output {name!r}")


def error_in(content: bytes) -> str:
    """Return the end of a sentence with the server's error, as far as there is one."""
    try:
        return f" ({shorten(msgspec.json.decode(content, type=_ServerError).error)})"
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return ""


def shorten(text: str) -> str:
    """Return the server's own words on one line, without control characters and not too long."""
    return "".join(each if each.isprintable() else " " for each in text[:_LONGEST])


def _values(output: _OutputTensor, binary: memoryview | None, shape: tuple[int, ...]) -> NDArray[np.float32]:
    expected, found = list(shape), output.shape
    if found != expected and not (found[:1] == expected[:1] and math.prod(found) == math.prod(expected)):
        raise MessageError(f"answers with {output.name!r} of shape {shorten(str(found))}, and {expected} is needed")
    dtype = _DTYPES.get(output.datatype)
    if dtype is None:
        raise MessageError(f"answers with {output.name!r} as {shorten(output.datatype)}, which has no numbers")
    try:
        if binary is not None:
            values = np.frombuffer(binary, np.dtype(dtype).newbyteorder("<"))
        else:
            values = np.asarray(msgspec.json.decode(output.data), np.float64).reshape(-1)
        with np.errstate(over="ignore"):
            return values.astype(np.float32).reshape(shape)
    except (ValueError, TypeError, OverflowError, RecursionError) as exc:  # msgspec's are ValueError
        raise MessageError(f"answers with data of {output.name!r} that are not {expected} numbers") from exc


def _decoded(content: bytes, kind: type[_T], what: str) -> _T:
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as exc:
        raise MessageError(
            f"answers with something else than {what} of the Open Inference Protocol v2: check model.teacher.url and "
            "model.teacher.model"
        ) from exc


def _names(names: Any) -> str:
    return shorten(", ".join(map(str, names))) or "none"
