"""The OpenAPI 3.1 document of serving's HTTP interface: the web framework's own document, completed.

The framework describes paths and methods. The bodies are those that `serving.protocol.codec` reads and writes for the
served model.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from learner.state_dir.version import RegistryState
from serving.protocol.codec import HEADER_LENGTH, InferBody, ReplyBody, Signature
from serving.protocol.tensors import TensorSpec
from serving.rollout.commands import COMMANDS

Document = dict[str, Any]

_SCHEMAS = "#/components/schemas/"
_JSON, _BINARY = "application/json", "application/octet-stream"
_BYTES = {_BINARY: {"schema": {"type": "string", "format": "binary"}}}
_OTHER_CONTENT = {"/": "text/html", "/metrics": "text/plain"}
_INFER = ("/v2/models/{name}/infer", "/v2/models/{name}/versions/{version}/infer")
_EXAMPLE_ROWS = 1
_MODEL, _VERSION = "/v2/models/{name}", "/v2/models/{name}/versions/{version}"
_COMMAND = "/api/versions/{version}:{action}"
_ERRORS: Mapping[str, Sequence[int]] = {
    "/v2/health/ready": [503],
    _MODEL: [404],
    _VERSION: [404],
    f"{_MODEL}/ready": [404, 503],
    f"{_VERSION}/ready": [404],
    **dict.fromkeys(_INFER, (400, 404, 413, 415, 429, 503, 504)),
    "/api/history": [400],
    _COMMAND: [401, 403, 404, 409],
}
"""Statuses of a route besides 200; all have 500, and 401 with tokens, 403 without."""
_RETRY_AFTER = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer", "minimum": 1}}}
_MEANINGS = {
    304: "The page has not changed.",
    400: "Fix the request.",
    401: "Send a token of this server.",
    403: "Send the admin token, from this site; without tokens send a Host that names this machine.",
    404: "Ask for what exists; the sentence names it.",
    409: "First change what the sentence names.",
    413: "Send less at once.",
    415: "Send the body as it is, not compressed.",
    429: "Send fewer requests at a time, and retry.",
    500: "Internal server error; see the server log.",
    503: "Retry, or ask another server: there is no version yet, or the server is stopping.",
    504: "The answer took too long.",
}


def build_openapi(
    document: Document,
    name: str,
    signature: Signature,
    steps: Sequence[int],
    open_paths: frozenset[str],
    *,
    tokens: bool,
) -> Document:
    """Return the framework's document, with bodies, errors and the routes that bypass the framework.

    Args:
        document: of the framework; it is modified.
        name: of the served model.
        signature: of the served model.
        steps: the resolutions of the history, in seconds.
        open_paths: paths that need no token.
        tokens: whether the other paths need a token.
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
    (state,), states = msgspec.json.schema_components([RegistryState], ref_template=_SCHEMAS + "{name}")
    components |= states
    rollout = paths[_COMMAND]["post"]
    rollout["description"] = "Apply a rollout command to a version; the answer is the new state."
    rollout["responses"]["200"]["content"] = {_JSON: {"schema": state}}
    for path, operations in paths.items():
        for operation in operations.values():
            _complete(path, operation, [] if path in open_paths else [401 if tokens else 403])
            for parameter in operation.get("parameters", ()):
                if path.startswith("/v2/models/{name}") and parameter["name"] == "name":
                    parameter["schema"] = {"type": "string", "enum": [name]}
                if parameter["name"] == "action":
                    parameter["schema"] = {"type": "string", "enum": list(COMMANDS)}
            if tokens:
                operation["security"] = [] if path in open_paths else [{"bearer": []}]
    document["paths"] = paths
    document["components"] = {"schemas": components}
    if tokens:
        document["components"]["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    return document


def _complete(path: str, operation: Document, refusals: Sequence[int]) -> None:
    """Add a route's content and error responses, including those of missing tokens."""
    answers = operation["responses"]
    answers.pop("422", None)
    answers["200"].setdefault("content", {_OTHER_CONTENT.get(path, _JSON): {}})
    if path == "/":
        answers["304"] = {"description": _MEANINGS[304]}
    for status in sorted({*_ERRORS.get(path, ()), 500, *refusals}):
        answers[str(status)] = {
            "description": _MEANINGS[status],
            "content": {_JSON: {"schema": {"$ref": f"{_SCHEMAS}Error"}}},
            **({"headers": _RETRY_AFTER} if status in (429, 503) else {}),
        }


def _infer(path: str) -> Document:
    names = ["name", "version"] if "{version}" in path else ["name"]
    return {
        "summary": "Infer",
        "description": "Inference of the Open Inference Protocol v2, answered by one version.",
        "operationId": "infer_version" if "version" in names else "infer",
        "parameters": [
            *({"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names),
            {
                "name": HEADER_LENGTH,
                "in": "header",
                "description": "With binary data: how many bytes of the body are JSON; 0 if the body is one raw input.",
                "schema": {"type": "integer", "minimum": 0},
            },
        ],
        "requestBody": {
            "required": True,
            "content": {_JSON: {"schema": {"$ref": f"{_SCHEMAS}InferBody"}}, **_BYTES},
        },
        "responses": {
            "200": {
                "description": "The predictions; with binary data after the JSON if that was requested.",
                "headers": {HEADER_LENGTH: {"schema": {"type": "integer"}}},
                "content": {_JSON: {"schema": {"$ref": f"{_SCHEMAS}ReplyBody"}}, **_BYTES},
            }
        },
    }


def _query(name: str, schema: Document, description: str) -> Document:
    return {"name": name, "in": "query", "description": description, "schema": schema}


def _name(component: Document, specs: Mapping[str, TensorSpec]) -> None:
    """Restrict a tensor's component to the existing names and datatypes."""
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
