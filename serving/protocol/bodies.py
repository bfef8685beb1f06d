"""The JSON bodies of the Open Inference Protocol v2."""

from typing import Any

import msgspec

Scalar = bool | int | float | str | None
Parameters = dict[str, Scalar]


class InputTensor(msgspec.Struct, frozen=True, gc=False):
    """One element of a request's `inputs`."""

    name: str
    shape: msgspec.Raw
    datatype: str
    parameters: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b""))
    data: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b""))


class RequestedOutput(msgspec.Struct, frozen=True, gc=False):
    """One element of a request's `outputs`."""

    name: str
    parameters: Parameters | None = None


class InferBody(msgspec.Struct, frozen=True, gc=False):
    """The JSON of a request; unknown members are ignored, as the protocol requires.

    Members of unbounded size stay text until their length is checked.
    """

    inputs: list[InputTensor]
    id: str | None = None
    parameters: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b""))
    outputs: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b""))


class OutputTensor(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One element of a reply's `outputs`."""

    name: str
    datatype: str
    shape: list[int]
    parameters: Parameters | None = None
    data: list[Any] | None = None


class ReplyBody(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The JSON of a reply."""

    model_name: str
    model_version: str
    outputs: list[OutputTensor]
    parameters: Parameters
    id: str | None = None
