"""Tensors as the Open Inference Protocol v2 writes them, in JSON and in binary, to and from numpy.

Legend: B rows of a request; a tensor is `[B, *shape]`, row-major; binary is little-endian.
Source: https://github.com/kserve/open-inference-protocol and Triton's binary tensor data extension.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from anabranch.serving.errors import BadRequestError, shorten

Array = NDArray[np.generic]
BYTES = "BYTES"
DATATYPES = {
    "bool": "BOOL",
    **{f"{kind}{bits}": f"{kind}{bits}".upper() for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"FP{bits}" for bits in (16, 32, 64)},
}
"""The protocol's name of each numpy dtype."""

_ELEMENTS: dict[str, type] = {"b": bool, "i": int, "u": int, "f": float}
_OPENS_TWICE = re.compile(rb"\s*\[\s*\[")


class TensorSpec:
    """One input or output: its name, the shape of a row, and how its elements are written."""

    def __init__(
        self, name: str, dtype: np.dtype[np.generic] | None, shape: tuple[int, ...], *, may_be_nan: bool = False
    ) -> None:
        """Describe a tensor of numbers, which may be missing (`null` or NaN) if so said, or of strings if `dtype` is
        None."""
        self.name = name
        self.shape = shape
        self.dtype = dtype
        self.datatype = DATATYPES[dtype.name] if dtype is not None else BYTES
        self.row_elements = math.prod(shape)
        self.may_be_nan = may_be_nan
        element: Any = _ELEMENTS[dtype.kind] if dtype is not None else str
        if may_be_nan:
            element = element | None
        nested: Any = element
        for _ in range(1 + len(shape)):
            nested = list[nested]
        self.flat_decoder: msgspec.json.Decoder[list[Any]] = msgspec.json.Decoder(list[element])
        self.nested_decoder: msgspec.json.Decoder[list[Any]] = msgspec.json.Decoder(nested)

    def metadata(self) -> dict[str, object]:
        """Describe the tensor as model metadata does; -1 is the rows of a request."""
        return {"name": self.name, "datatype": self.datatype, "shape": [-1, *self.shape]}


def read_json(spec: TensorSpec, data: bytes, rows: int) -> Array:
    """Read `data`, flat or nested, into `[rows, *spec.shape]`; strings come as an object array.

    Commas are counted first, so data that does not fit the declared shape costs no memory. Strings may contain commas,
    so their unescaped quotes are counted: there are at most two for each string.

    Raises:
        BadRequestError: other elements, or another number of them, than the tensor has.
    """
    expected = rows * spec.row_elements
    elements = data.count(b",") + 1
    if spec.dtype is None and (data.count(b'"') - data.count(b'\\"')) > 2 * expected:
        raise BadRequestError(f"input {spec.name!r} has more elements than its shape asks for, which is {expected}")
    if elements < expected or (elements > expected and spec.dtype is not None):
        raise BadRequestError(f"input {spec.name!r} has {elements} elements, but its shape asks for {expected}")
    nested = _OPENS_TWICE.match(data) is not None
    decoder = spec.nested_decoder if nested else spec.flat_decoder
    try:
        values = decoder.decode(data)
        array = _array(values, spec.dtype)
    except (msgspec.DecodeError, ValueError, OverflowError) as exc:
        missing = "; null and NaN are a missing value, which [schema] does not allow here" * ("`null`" in str(exc))
        raise BadRequestError(
            f"input {spec.name!r} is not {spec.datatype} data of its shape: {_cause(exc)}{missing}"
        ) from exc
    shape = (rows, *spec.shape)
    if array.shape != (shape if nested else (expected,)):
        raise BadRequestError(f"input {spec.name!r} has data of shape {list(array.shape)}, not {list(shape)}")
    return check_finite(spec, array.reshape(shape))


def read_binary(spec: TensorSpec, data: memoryview, rows: int) -> Array:
    """Read little-endian elements, or strings with 4-byte lengths, into `[rows, *spec.shape]`.

    Raises:
        BadRequestError: the bytes are too many or too few, or no such elements.
    """
    shape = (rows, *spec.shape)
    expected = rows * spec.row_elements
    if spec.dtype is None:
        return np.array(_read_strings(spec, data, expected), dtype=object).reshape(shape)
    if len(data) != expected * spec.dtype.itemsize:
        raise BadRequestError(
            f"input {spec.name!r} has {len(data)} bytes, but {spec.datatype} of shape {list(shape)} "
            f"takes {expected * spec.dtype.itemsize}"
        )
    if spec.dtype.kind == "b" and expected and np.frombuffer(data, np.uint8).max() > 1:
        raise BadRequestError(f"input {spec.name!r} is BOOL, but has a byte that is neither 0 nor 1")
    array = np.frombuffer(data, spec.dtype.newbyteorder("<")).astype(spec.dtype, copy=False)
    return check_finite(spec, array.reshape(shape))


def write_json(array: Array) -> list[Any]:
    """Return the elements, flat and row-major, as JSON has them."""
    values: list[Any] = array.reshape(-1).tolist()
    return values


def write_binary(array: Array) -> bytes:
    """Return the elements as little-endian bytes, strings with 4-byte lengths before them."""
    if array.dtype.kind == "O":
        texts = [str(value).encode() for value in array.reshape(-1)]
        return b"".join(len(text).to_bytes(4, "little") + text for text in texts)
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def _array(values: Sequence[Any], dtype: np.dtype[np.generic] | None) -> Array:
    if dtype is None:
        return np.array(values, dtype=object)
    with np.errstate(over="ignore"):
        return np.array(values, dtype=dtype)


def _read_strings(spec: TensorSpec, data: memoryview, expected: int) -> list[str]:
    texts: list[str] = []
    position = 0
    while position < len(data) and len(texts) < expected:
        end = position + 4 + int.from_bytes(data[position : position + 4], "little")
        if end > len(data):
            raise BadRequestError(f"input {spec.name!r}: string {len(texts)} reaches beyond the end of the data")
        try:
            texts.append(str(data[position + 4 : end], "utf-8"))
        except UnicodeDecodeError as exc:
            raise BadRequestError(f"input {spec.name!r}: string {len(texts)} is not UTF-8") from exc
        position = end
    if len(texts) != expected or position != len(data):
        raise BadRequestError(
            f"input {spec.name!r} has {len(texts)} strings in {position} of {len(data)} bytes, "
            f"but its shape asks for {expected}"
        )
    return texts


def check_finite(spec: TensorSpec, array: Array) -> Array:
    """Return the array; raises BadRequestError where it has infinity, or NaN unless a value may be missing."""
    if array.dtype.kind == "f" and not (np.isfinite(array) | (spec.may_be_nan & np.isnan(array))).all():
        raise BadRequestError(f"input {spec.name!r} has elements that are NaN or infinite as {spec.datatype}")
    return array


def _cause(exc: Exception) -> str:
    if isinstance(exc, msgspec.DecodeError | OverflowError | UnicodeDecodeError):
        return shorten(str(exc))
    return "its rows differ in length"
