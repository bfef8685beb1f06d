"""The messages of `inference.GRPCInferenceService`, built when this module is imported.

Field numbers are those of https://github.com/kserve/open-inference-protocol. There is no generated code: that of
protoc asks for the version of Protobuf that generated it, or a newer one.
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

SERVICE = "inference.GRPCInferenceService"

_PACKAGE = "inference"
_FIELD = descriptor_pb2.FieldDescriptorProto
_TYPES = {
    "bool": _FIELD.TYPE_BOOL,
    "int32": _FIELD.TYPE_INT32,
    "int64": _FIELD.TYPE_INT64,
    "uint32": _FIELD.TYPE_UINT32,
    "uint64": _FIELD.TYPE_UINT64,
    "float": _FIELD.TYPE_FLOAT,
    "double": _FIELD.TYPE_DOUBLE,
    "string": _FIELD.TYPE_STRING,
    "bytes": _FIELD.TYPE_BYTES,
}
_TENSOR = ("name: string", "datatype: string", "shape: *int64")
_MESSAGES: dict[str, tuple[str, ...]] = {
    "ServerLiveRequest": (),
    "ServerLiveResponse": ("live: bool",),
    "ServerReadyRequest": (),
    "ServerReadyResponse": ("ready: bool",),
    "ModelReadyRequest": ("name: string", "version: string"),
    "ModelReadyResponse": ("ready: bool",),
    "ServerMetadataRequest": (),
    "ServerMetadataResponse": ("name: string", "version: string", "extensions: *string"),
    "ModelMetadataRequest": ("name: string", "version: string"),
    "ModelMetadataResponse.TensorMetadata": _TENSOR,
    "ModelMetadataResponse": (
        "name: string",
        "versions: *string",
        "platform: string",
        "inputs: *ModelMetadataResponse.TensorMetadata",
        "outputs: *ModelMetadataResponse.TensorMetadata",
    ),
    "InferParameter": (
        "bool_param: bool",
        "int64_param: int64",
        "string_param: string",
        "double_param: double",
        "uint64_param: uint64",
    ),
    "InferTensorContents": (
        "bool_contents: *bool",
        "int_contents: *int32",
        "int64_contents: *int64",
        "uint_contents: *uint32",
        "uint64_contents: *uint64",
        "fp32_contents: *float",
        "fp64_contents: *double",
        "bytes_contents: *bytes",
    ),
    "ModelInferRequest.InferInputTensor": (*_TENSOR, "parameters: {}InferParameter", "contents: InferTensorContents"),
    "ModelInferRequest.InferRequestedOutputTensor": ("name: string", "parameters: {}InferParameter"),
    "ModelInferRequest": (
        "model_name: string",
        "model_version: string",
        "id: string",
        "parameters: {}InferParameter",
        "inputs: *ModelInferRequest.InferInputTensor",
        "outputs: *ModelInferRequest.InferRequestedOutputTensor",
        "raw_input_contents: *bytes",
    ),
    "ModelInferResponse.InferOutputTensor": (*_TENSOR, "parameters: {}InferParameter", "contents: InferTensorContents"),
    "ModelInferResponse": (
        "model_name: string",
        "model_version: string",
        "id: string",
        "parameters: {}InferParameter",
        "outputs: *ModelInferResponse.InferOutputTensor",
        "raw_output_contents: *bytes",
    ),
}
"""Fields by message, numbered from 1 in their order: `*` repeats a type, `{}` maps names to it."""
_ONE_OF = {"InferParameter": "parameter_choice"}
"""Messages of which one field at most is set."""


def _declare(file: Any) -> None:
    declared: dict[str, Any] = {}
    for name in sorted(_MESSAGES, key=lambda each: each.count(".")):
        outer, _, inner = name.rpartition(".")
        declared[name] = (declared[outer].nested_type if outer else file.message_type).add(name=inner)
    for name, fields in _MESSAGES.items():
        message = declared[name]
        if name in _ONE_OF:
            message.oneof_decl.add(name=_ONE_OF[name])
        for number, text in enumerate(fields, start=1):
            field_name, _, kind = text.partition(": ")
            many = kind.startswith(("*", "{}"))
            field = message.field.add(name=field_name, number=number)
            field.label = _FIELD.LABEL_REPEATED if many else _FIELD.LABEL_OPTIONAL
            if kind.startswith("{}"):
                kind = _map_entry(message, name, field_name, kind.removeprefix("{}"))
            _set_type(field, kind.removeprefix("*"))
            if name in _ONE_OF:
                field.oneof_index = 0


def _map_entry(message: Any, name: str, field_name: str, kind: str) -> str:
    """Declare the entries of a map from strings, and return their message's name."""
    entry = message.nested_type.add(name=f"{field_name.capitalize()}Entry")
    entry.options.map_entry = True
    key = entry.field.add(name="key", number=1, label=_FIELD.LABEL_OPTIONAL)
    _set_type(key, "string")
    value = entry.field.add(name="value", number=2, label=_FIELD.LABEL_OPTIONAL)
    _set_type(value, kind)
    return f"{name}.{entry.name}"


def _set_type(field: Any, kind: str) -> None:
    if kind in _TYPES:
        field.type = _TYPES[kind]
    else:
        field.type, field.type_name = _FIELD.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"


def _build() -> dict[str, Any]:
    # In a separate pool: a client in the same process may have declared the same messages.
    pool = descriptor_pool.DescriptorPool()
    file = descriptor_pb2.FileDescriptorProto(name="anabranch/inference.proto", package=_PACKAGE, syntax="proto3")
    _declare(file)
    pool.Add(file)
    names = [name for name in _MESSAGES if "." not in name]
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in names}


MESSAGES: dict[str, Any] = _build()
"""The classes of the messages, by name."""
