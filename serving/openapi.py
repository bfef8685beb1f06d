"""The description of serving's HTTP interface, OpenAPI 3.1: what the web framework knows of its routes, made whole.

The framework knows paths and methods. Bodies are those that `serving.protocol` reads and writes, for the served model.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from serving.protocol import HEADER_LENGTH, InferBody, ReplyBody, Signature
from serving.tensor import TensorSpec

Document = dict[str, Any]

_SCHEMAS = "#/components/schemas/"
_JSON, _BINARY = "application/json", "application/octet-stream"
_BYTES = {_BINARY: {"schema": {"type": "string", "format": "binary"}}}
_OTHER_CONTENT = {"/": "text/html", "/metrics": "text/plain"}
_INFER = ("/v2/models/{name}/infer", "/v2/models/{name}/versions/{version}/infer")
_EXAMPLE_ROWS = 1


def whole(
    document: Document, name: str, signature: Signature, steps: Sequence[int], open_paths: frozenset[str] | None
) -> Document:
    """Return the framework's document with bodies, errors and the routes that it does not know.

    Args:
        document: the framework's; it is changed.
        name: of the served model.
        signature: of the served model.
        steps: the resolutions of the history, in seconds.
        open_paths: those that need no token; None where none does.
    """
    _, components = msgspec.json.schema_components([InferBody, ReplyBody], ref_template=_SCHEMAS + "{name}")
    components["InferBody"]["example"] = _example(signature)
    components["InferBody"]["properties"]["inputs"]["minItems"] = 1
    _name(components["InputTensor"], signature.inputs)
    _name(components["OutputTensor"], signature.outputs)
    components["Error"] = {
        "type": "object",
        "required": ["error"],
        "properties": {"error": {"type": "string", "description": "One sentence."}},
    }
    paths: Document = document["paths"] | {path: {"post": _infer(path)} for path in _INFER}
    paths["/api/history"]["get"]["parameters"] = [
        _query("since", {"type": "integer", "minimum": 0, "maximum": 10**15 - 1}, "Seconds since 1970."),
        _query("step", {"type": "integer", "enum": list(steps)}, "Seconds between two points."),
    ]
    for path, operations in paths.items():
        for operation in operations.values():
            _complete(path, operation)
            for parameter in operation.get("parameters", ()):
                if path.startswith("/v2/models/{name}") and parameter["name"] == "name":
                    parameter["schema"] = {"type": "string", "enum": [name]}
            if open_paths is not None:
                operation["security"] = [] if path in open_paths else [{"bearer": []}]
    document["paths"] = paths
    document["components"] = {"schemas": components}
    if open_paths is not None:
        document["components"]["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    return document


def _complete(path: str, operation: Document) -> None:
    """Say what a route answers: its content, and errors, which are all alike."""
    answers = operation["responses"]
    answers.pop("422", None)
    answers["200"].setdefault("content", {_OTHER_CONTENT.get(path, _JSON): {}})
    answers["default"] = {
        "description": "No answer: the sentence says why. 429 and 503 carry Retry-After.",
        "content": {_JSON: {"schema": {"$ref": f"{_SCHEMAS}Error"}}},
    }


def _infer(path: str) -> Document:
    names = ["name", "version"] if "{version}" in path else ["name"]
    return {
        "summary": "Infer",
        "description": "Inference of the Open Inference Protocol v2, answered whole by one version.",
        "operationId": "infer_version" if "version" in names else "infer",
        "parameters": [
            *({"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names),
            {
                "name": HEADER_LENGTH,
                "in": "header",
                "description": "With binary data: how many bytes of the body are JSON; 0 where all of it is one input.",
                "schema": {"type": "integer", "minimum": 0},
            },
        ],
        "requestBody": {
            "required": True,
            "content": {_JSON: {"schema": {"$ref": f"{_SCHEMAS}InferBody"}}, **_BYTES},
        },
        "responses": {
            "200": {
                "description": "The predictions; with binary data after the JSON where that was asked for.",
                "headers": {HEADER_LENGTH: {"schema": {"type": "integer"}}},
                "content": {_JSON: {"schema": {"$ref": f"{_SCHEMAS}ReplyBody"}}, **_BYTES},
            }
        },
    }


def _query(name: str, schema: Document, description: str) -> Document:
    return {"name": name, "in": "query", "description": description, "schema": schema}


def _name(component: Document, specs: Mapping[str, TensorSpec]) -> None:
    """Let a tensor's component say which names and datatypes there are."""
    component["properties"]["name"]["enum"] = list(specs)
    component["properties"]["datatype"]["enum"] = sorted({spec.datatype for spec in specs.values()})


def _example(signature: Signature) -> Document:
    """Return a request of one row."""
    inputs = []
    for spec in signature.inputs.values():
        element: Any = "" if spec.dtype is None else spec.dtype.type(0).item()
        inputs.append(
            {
                "name": spec.name,
                "shape": [_EXAMPLE_ROWS, *spec.shape],
                "datatype": spec.datatype,
                "data": [element] * (_EXAMPLE_ROWS * spec.row_elements),
            }
        )
    return {"inputs": inputs}
