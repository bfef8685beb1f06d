"""Requests and replies of the Open Inference Protocol v2: bytes to arrays, and arrays to bytes.

Legend: B rows of a request. Independent of HTTP, except for the header that separates JSON from binary data.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np

from anabranch.ingest.events.schema import Feature, Schema
from anabranch.ingest.events.tokenizer import UnencodableError
from anabranch.serving.errors import BadRequestError, TooLargeError, shorten
from anabranch.serving.protocol.bodies import (
    InferBody,
    InputTensor,
    OutputTensor,
    Parameters,
    ReplyBody,
    RequestedOutput,
)
from anabranch.serving.protocol.parameters import (
    ABSENT,
    check_served,
    decode_json,
    read_count,
    read_flag,
    read_freshness,
    read_parameters,
)
from anabranch.serving.protocol.tensors import (
    BYTES,
    DATATYPES,
    Array,
    TensorSpec,
    read_binary,
    read_json,
    write_binary,
    write_json,
)

HEADER_LENGTH = "inference-header-content-length"
"""The HTTP header with the number of JSON bytes in a body; binary tensors follow them."""

LABEL, _PREDICTION = "label", "prediction"
"""The output with the names of predicted classes, BYTES `[-1]`, where `[schema.label]` has names; and their numbers."""
EMBEDDING = "embedding"
"""The output that the request parameter `return_embedding` asks for, FP32 `[-1, D]`."""

_LARGE_BYTES = 262_144
_LARGE_TEXT_BYTES = 16_384
"""A longer body is decoded in a thread; that of a model with a tokenizer, which reads about 2 MB of text a second."""
_LONGEST_DIMENSION = 24
"""Characters of one number of a shape, including blanks."""
_LONGEST_OUTPUT = 1024
"""Bytes of JSON for one requested output."""
_LONGEST_ID = 1024
_MOST_OTHER_BYTES = 1_000_000
"""Bytes of a request's JSON besides the elements of its inputs."""


@dataclass(frozen=True)
class Request:
    """A request that fits the model.

    Attributes:
        features: one array `[rows, *column_shape]` for each feature of the schema, of the feature's dtype (ids for
            strings), finite.
        outputs: the requested outputs by name, each with whether it is sent as binary data.
        min_trained_through: offsets, by `topic:partition`, that the answering version must have learned.
        timeout_ms: how long to wait for such a version; None to wait until `serving.timeout`.
        embed: whether EMBEDDING is requested besides the model's outputs.
        classified: how many of the likeliest classes are requested of an output with a number for each, instead of it.
        given: those inputs that `Signature` keeps, as they were sent; strings are an object array.
    """

    features: dict[str, Array]
    rows: int
    id: str | None
    outputs: dict[str, bool]
    min_trained_through: dict[str, int]
    timeout_ms: float | None
    embed: bool = False
    classified: Mapping[str, int] = field(default_factory=dict)
    given: Mapping[str, Array] = field(default_factory=dict)


class GivenInput(NamedTuple):
    """What a request says of an input besides its elements."""

    name: str
    datatype: str
    shape: list[int]


class Signature:
    """The inputs and outputs of the served model, and the codec between them and bytes."""

    def __init__(
        self,
        schema: Schema,
        outputs: Sequence[TensorSpec],
        max_rows: int,
        embeds: bool = False,
        kept: Collection[str] = (),
    ) -> None:
        """Take `embeds`, whether the model has an embedding, and `kept`, inputs that requests keep as they were sent.

        One of these that is no feature, such as the key of an event, is an input of strings that may be absent.
        """
        self.features = {feature.name: feature for feature in schema.features}
        others = {name: TensorSpec(name, None, ()) for name in kept if name not in self.features}
        self.inputs = {feature.name: input_spec(feature) for feature in schema.features} | others
        self._kept = kept
        self.outputs = {spec.name: spec for spec in outputs}
        self._classes, self._names = schema.label.one_of, None
        if _PREDICTION in self.outputs and self.outputs[_PREDICTION].shape == () and self._classes is not None:
            self._names = schema.label.names
        self._array_of_names = np.array(self._names or (), object)
        self._derives_label = self._names is not None and LABEL not in self.outputs
        if self._derives_label:
            self.outputs[LABEL] = TensorSpec(LABEL, None, ())
        self.tokenizes = any(feature.column_shape != feature.shape for feature in schema.features)
        """Whether decoding takes the time of a tokenizer."""
        self.most_strings = max_rows * sum(spec.row_elements for spec in self.inputs.values() if spec.dtype is None)
        """The largest number of strings that a request may have."""
        self._max_rows = max_rows
        self._embeds = embeds
        self._decoder = msgspec.json.Decoder(InferBody)
        self._shape_decoder = msgspec.json.Decoder(list[int])
        self._outputs_decoder = msgspec.json.Decoder(list[RequestedOutput])
        self._encoder = msgspec.json.Encoder()

    def is_long(self, size: int) -> bool:
        """Return whether decoding a body of `size` bytes would block an event loop for long."""
        return size > (_LARGE_TEXT_BYTES if self.tokenizes else _LARGE_BYTES)

    def decode(self, body: bytes, header_length: int | None) -> Request:
        """Read a request's body; `header_length` is the value of `HEADER_LENGTH`, None without one.

        Raises:
            BadRequestError: it does not fit the protocol or the model; the sentence names the part.
            TooLargeError: it has more rows than the queue.
        """
        if header_length == 0:
            return self._decode_raw(body)
        if header_length is not None and not 0 <= header_length <= len(body):
            raise BadRequestError(f"{HEADER_LENGTH} is {header_length}, but the body has {len(body)} bytes")
        view = memoryview(body)
        text_bytes = len(body) if header_length is None else header_length
        document = self._parse(view[:text_bytes])
        _check_sizes(document, text_bytes)
        rows = self._rows(list(map(self._given, document.inputs)))
        arrays = _read_tensors(self.inputs, document.inputs, rows, view[text_bytes:])
        return self._request(
            arrays, rows, read_parameters(document.parameters), self._requested(document.outputs), document.id
        )

    def request(
        self,
        inputs: Sequence[GivenInput],
        read: Callable[[int, TensorSpec, int], Array],
        parameters: Parameters,
        requested: Sequence[RequestedOutput],
        id_: str | None,
    ) -> Request:
        """Return the request with these parts; its outputs count as JSON, where that makes a difference.

        Args:
            inputs: what describes each input.
            read: returns the elements of an input, given its index, what it has to be, and the number of rows.
            parameters: of the request.
            requested: outputs; empty: all.
            id_: of the request.

        Raises:
            BadRequestError: it does not fit the model.
            TooLargeError: it has more rows than the queue.
        """
        if id_ is not None and len(id_) > _LONGEST_ID:
            raise BadRequestError(f"id has {len(id_)} characters; it may have {_LONGEST_ID}")
        rows = self._rows(inputs)
        arrays = {each.name: read(index, self.inputs[each.name], rows) for index, each in enumerate(inputs)}
        return self._request(arrays, rows, parameters, requested, id_)

    def describe_outputs(self) -> list[dict[str, object]]:
        """Describe the outputs as model metadata does, with the names of classes where these are numbers."""
        described = []
        for spec in self.outputs.values():
            named = self._names is not None and (spec.name == _PREDICTION or self._has_classes(spec))
            described.append(spec.metadata() | ({"labels": [*(self._names or ())]} if named else {}))
        return described

    def datatype(self, output: str, array: Array) -> str:
        """Return the protocol's name for the elements of an output."""
        if array.dtype.kind == "O":
            return BYTES
        return self.outputs[output].datatype if output in self.outputs else DATATYPES[array.dtype.name]

    def answer(self, request: Request, answers: Mapping[str, Array], output: str) -> Array:
        """Return an output of a reply, `[B, ...]`, from what the model answers; strings are an object array.

        Of an output that is classified, each row has its N largest elements in descending order, each a string
        `value:index:name`, without the name if there are none (Triton's classification extension).
        """
        if output == LABEL and self._derives_label:
            return self._array_of_names[answers[_PREDICTION].astype(np.int64)]
        array = answers[output]
        if output not in request.classified:
            return array
        number_BN = np.argsort(-array.astype(np.float64), axis=1, kind="stable")[:, : request.classified[output]]
        value_BN = np.take_along_axis(array, number_BN, axis=1)
        names = [f":{name}" for name in self._names or ()] or [""] * array.shape[1]
        pairs = zip(value_BN.reshape(-1).tolist(), number_BN.reshape(-1).tolist(), strict=True)
        texts = [f"{value:.6f}:{number}{names[number]}" for value, number in pairs]
        return np.array(texts, object).reshape(number_BN.shape)

    def _has_classes(self, spec: TensorSpec) -> bool:
        """Return whether an output has a number for each class."""
        return spec.shape == (self._classes,) and spec.dtype is not None and spec.dtype.kind == "f"

    def encode(
        self, request: Request, answers: Mapping[str, Array], name: str, version: str, progress: Mapping[str, str]
    ) -> tuple[bytes, int | None]:
        """Write a reply; return its body and the value of `HEADER_LENGTH`, None when all of it is JSON.

        `progress` are parameters of the reply: how far the version is trained.
        """
        blobs: list[bytes] = []
        outputs = [
            self._output(self.answer(request, answers, output), output, binary, blobs)
            for output, binary in request.outputs.items()
        ]
        parameters: Parameters = {**progress}
        header = self._encoder.encode(ReplyBody(name, version, outputs, parameters, request.id))
        return (b"".join((header, *blobs)), len(header)) if blobs else (header, None)

    def _decode_raw(self, body: bytes) -> Request:
        """Read a body without JSON: all of it is the one input, and the outputs are sent as binary data."""
        if len(self.features) != 1:
            count = len(self.features)
            raise BadRequestError(f"a body without JSON needs a model with one input; this one has {count}")
        spec = self.inputs[next(iter(self.features))]
        if spec.dtype is None:
            raise BadRequestError(f"a body without JSON cannot carry input {spec.name!r}, which has strings")
        rows, rest = divmod(len(body), spec.row_elements * spec.dtype.itemsize)
        if rest:
            raise BadRequestError(f"a body of {len(body)} bytes is no whole number of rows of input {spec.name!r}")
        self._check_rows(rows)
        array = read_binary(spec, memoryview(body), rows)
        features = {spec.name: _column(self.features[spec.name], array)}
        given = {spec.name: array} if spec.name in self._kept else {}
        return Request(features, rows, None, dict.fromkeys(self.outputs, True), {}, None, given=given)

    def _parse(self, text: memoryview) -> InferBody:
        return decode_json(self._decoder, text, "the body is not an inference request")

    def _rows(self, inputs: Sequence[GivenInput]) -> int:
        """Check names, datatypes and shapes of inputs, and return the rows that they agree on."""
        rows: int | None = None
        seen: set[str] = set()
        for name, datatype, shape in inputs:
            spec = self.inputs.get(name)
            if spec is None:
                raise BadRequestError(f"there is no input {shorten(name)!r}; inputs are {', '.join(self.inputs)}")
            if name in seen:
                raise BadRequestError(f"input {name!r} is given twice")
            seen.add(name)
            if datatype != spec.datatype:
                raise BadRequestError(f"input {name!r} has datatype {spec.datatype}, not {shorten(datatype)!r}")
            if tuple(shape[1:]) != spec.shape or not shape:
                raise BadRequestError(f"input {name!r} has shape {[-1, *spec.shape]}, not {shape}")
            if shape[0] < 1:
                raise BadRequestError(f"input {name!r} has {shape[0]} rows; it needs one at least")
            if rows is not None and shape[0] != rows:
                raise BadRequestError(f"input {name!r} has {shape[0]} rows, but input {inputs[0].name!r} has {rows}")
            rows = shape[0]
        if rows is None:
            raise BadRequestError(f"the request has no inputs; inputs are {', '.join(self.inputs)}")
        self._check_rows(rows)
        for name, feature in self.features.items():
            if name not in seen and feature.default is None:
                raise BadRequestError(f"input {name!r} is missing")
        return rows

    def _given(self, tensor: InputTensor) -> GivenInput:
        spec, text = self.inputs.get(tensor.name), bytes(tensor.shape)
        if spec is None:
            return GivenInput(tensor.name, tensor.datatype, [])
        if len(text) > _LONGEST_DIMENSION * (2 + len(spec.shape)):
            given = text[:_LONGEST_DIMENSION].decode("ascii", "replace")
            raise BadRequestError(f"input {spec.name!r} has shape {[-1, *spec.shape]}, not {given}...")
        shape = decode_json(self._shape_decoder, text, f"the shape of input {spec.name!r} is not one")
        return GivenInput(tensor.name, tensor.datatype, shape)

    def _check_rows(self, rows: int) -> None:
        if rows < 1:
            raise BadRequestError(f"the request has {rows} rows; it needs one at least")
        if rows > self._max_rows:
            raise TooLargeError(f"the request has {rows} rows; this server accepts {self._max_rows} at once")

    def _request(
        self,
        arrays: Mapping[str, Array],
        rows: int,
        parameters: Parameters,
        requested: Sequence[RequestedOutput],
        id_: str | None,
    ) -> Request:
        features = {
            name: _column(feature, arrays[name]) if name in arrays else _default(feature, rows)
            for name, feature in self.features.items()
        }
        embed = self._embed(check_served(parameters, "the request"))
        outputs, classified = self._requested_outputs(
            requested, read_flag(parameters, "binary_data_output", False), embed
        )
        through, timeout_ms = read_freshness(parameters) if parameters else ({}, None)
        embed = embed and EMBEDDING not in self.outputs  # otherwise the model predicts it anyway
        given = {name: arrays[name] for name in self._kept if name in arrays} if self._kept else {}
        return Request(features, rows, id_, outputs, through, timeout_ms, embed, classified, given)

    def _embed(self, parameters: Parameters) -> bool:
        embed = read_flag(parameters, "return_embedding", False)
        if embed and not self._embeds and EMBEDDING not in self.outputs:
            raise BadRequestError(
                "return_embedding: this model has no embedding; name one of its modules in model.embedding, "
                "or give its task a method embed"
            )
        return embed

    def _requested(self, text: msgspec.Raw) -> list[RequestedOutput]:
        if bytes(text) in ABSENT:
            return []
        if len(text) > _LONGEST_OUTPUT * (2 + len(self.outputs)):
            raise BadRequestError(f"outputs has {len(text)} bytes, for a model that has {len(self.outputs)} outputs")
        return decode_json(self._outputs_decoder, text, "outputs is not a list of outputs")

    def _requested_outputs(
        self, requested: Sequence[RequestedOutput], binary: bool, embed: bool
    ) -> tuple[dict[str, bool], dict[str, int]]:
        """Return whether each requested output is sent as binary data, and how many classes of it are asked for."""
        outputs, classified = {EMBEDDING: binary} if embed else {}, dict[str, int]()
        if not requested:
            return dict.fromkeys(self.outputs, binary) | outputs, classified
        seen = set[str]()
        for output in requested:
            if output.name not in self.outputs and output.name not in outputs:
                name = shorten(output.name)
                raise BadRequestError(f"there is no output {name!r}; outputs are {', '.join(self.outputs)}")
            if output.name in seen:
                raise BadRequestError(f"output {output.name!r} is requested twice")
            seen.add(output.name)
            parameters = dict(output.parameters or {})
            count = read_count(parameters, "classification")
            parameters.pop("classification", None)
            check_served(parameters, f"output {output.name!r}")
            outputs[output.name] = read_flag(parameters, "binary_data", binary)
            if count:
                spec = self.outputs.get(output.name)
                if spec is None or not self._has_classes(spec):
                    raise BadRequestError(
                        f"output {output.name!r} has the parameter classification = {count}, but not a number for each "
                        "class: ask for the classes of an output that has, such as probabilities"
                    )
                classified[output.name] = count
        return outputs, classified

    def _output(self, array: Array, name: str, binary: bool, blobs: list[bytes]) -> OutputTensor:
        shape = list(array.shape)
        datatype = self.datatype(name, array)
        if not binary:
            return OutputTensor(name, datatype, shape, data=write_json(array))
        blobs.append(write_binary(array))
        return OutputTensor(name, datatype, shape, {"binary_data_size": len(blobs[-1])})


def input_spec(feature: Feature) -> TensorSpec:
    """Return the input that takes a feature: strings are encoded here, not by the client."""
    dtype = None if feature.is_string else feature.wire
    return TensorSpec(feature.name, dtype, feature.shape, may_be_nan=feature.may_be_nan)


def _check_sizes(document: InferBody, text_bytes: int) -> None:
    """Check the size of a request besides its data."""
    other = text_bytes - sum(len(tensor.data) for tensor in document.inputs)
    if other > _MOST_OTHER_BYTES:
        raise TooLargeError(f"the request's JSON has {other} bytes besides its data; it may have {_MOST_OTHER_BYTES}")
    if document.id is not None and len(document.id) > _LONGEST_ID:
        raise BadRequestError(f"id has {len(document.id)} characters; it may have {_LONGEST_ID}")


def _read_tensors(
    specs: Mapping[str, TensorSpec], tensors: Sequence[InputTensor], rows: int, binary: memoryview
) -> dict[str, Array]:
    arrays: dict[str, Array] = {}
    position = 0
    for tensor in tensors:
        spec = specs[tensor.name]
        data = bytes(tensor.data)
        parameters = check_served(read_parameters(tensor.parameters), f"input {tensor.name!r}")
        size = parameters.get("binary_data_size")
        if size is None:
            if not data:
                raise BadRequestError(f"input {tensor.name!r} has neither data nor binary_data_size")
            arrays[tensor.name] = read_json(spec, data, rows)
            continue
        if data:
            raise BadRequestError(f"input {tensor.name!r} has both data and binary_data_size")
        if type(size) is not int or not 0 <= size <= len(binary) - position:
            raise BadRequestError(
                f"input {tensor.name!r} has binary_data_size {shorten(repr(size))}, but {len(binary) - position} bytes "
                f"are left after the JSON (its length is {HEADER_LENGTH})"
            )
        arrays[tensor.name] = read_binary(spec, binary[position : position + size], rows)
        position += size
    if position != len(binary):
        raise BadRequestError(f"{len(binary) - position} bytes of binary data belong to no input")
    return arrays


def _column(feature: Feature, array: Array) -> Array:
    if feature.encoder is None:
        column = feature.from_wire(array)
        if feature.outside(column) is not None:
            raise BadRequestError(f"input {feature.name!r} has a value that is not {feature.allowed}")
        return column
    try:
        ids = feature.encoder.encode(array.reshape(-1).tolist())
    except UnencodableError as exc:
        raise BadRequestError(f"input {feature.name!r}: {exc}") from exc
    return ids.reshape(len(array), *feature.column_shape)


def _default(feature: Feature, rows: int) -> Array:
    assert feature.default is not None
    return np.broadcast_to(feature.default, (rows, *feature.column_shape))
