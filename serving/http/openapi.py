"""The OpenAPI 3.1 document of serving's HTTP interface.

The bodies are those of `serving.protocol.bodies`, for the served model.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from anabranch.learner.versions.format import RegistryState
from anabranch.serving.protocol.bodies import InferBody, ReplyBody
from anabranch.serving.protocol.codec import HEADER_LENGTH, Signature
from anabranch.serving.protocol.tensors import TensorSpec
from anabranch.serving.rollout.commands import COMMANDS

Document = dict[str, Any]

_SCHEMAS = "#/components/schemas/"
_JSON, _BINARY = "application/json", "application/octet-stream"
_BYTES = {_BINARY: {"schema": {"type": "string", "format": "binary"}}}
_TEXT = {"type": "string"}


class Operation(NamedTuple):
    """One route as the document describes it."""

    name: str
    """Of the endpoint."""
    errors: Sequence[int] = ()
    """Statuses besides 500, and besides 401 with tokens or 403 without."""
    method: str = "get"
    content: str = _JSON
    needs_token: bool = True


_COMMAND = "/api/versions/{version}:{action}"
INFER_PATHS = ("/v2/models/{name}/infer", "/v2/models/{name}/versions/{version}/infer")
OPERATIONS: Mapping[str, Operation] = {
    **dict.fromkeys(INFER_PATHS, Operation("infer", [400, 404, 413, 415, 429, 503, 504], "post")),
    "/v2": Operation("server_metadata"),
    "/v2/health/live": Operation("live", [503], needs_token=False),
    "/v2/health/ready": Operation("ready", [503], needs_token=False),
    "/v2/models/{name}": Operation("model_metadata", [404]),
    "/v2/models/{name}/versions/{version}": Operation("version_metadata", [404, 503]),
    "/v2/models/{name}/ready": Operation("model_ready", [404, 503]),
    "/v2/models/{name}/versions/{version}/ready": Operation("version_ready", [404, 503]),
    "/": Operation("dashboard", content="text/html", needs_token=False),
    "/api/status": Operation("status"),
    "/api/history": Operation("history", [400]),
    _COMMAND: Operation("rollout", [401, 403, 404, 409], "post"),
    "/metrics": Operation("exposition", content="text/plain"),
}
"""All routes by path, the most frequent first; except the document's own."""
_PREDICTIONS = {
    "description": "The predictions; with binary data after the JSON if that was requested.",
    "headers": {HEADER_LENGTH: {"schema": {"type": "integer"}}},
    "content": {_JSON: {"schema": {"$ref": f"{_SCHEMAS}ReplyBody"}}, **_BYTES},
}
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
    503: "Retry, or ask another server: no version yet, too little memory, or the server stops or starts again.",
    504: "The answer took too long.",
}


def build_openapi(version: str, name: str, signature: Signature, steps: Sequence[int], *, tokens: bool) -> Document:
    """Return the document.

    Args:
        version: of this server.
        name: of the served model.
        signature: of the served model.
        steps: the resolutions of the history, in seconds.
        tokens: whether requests need a token.
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
    schemas: Document = {"name": _one_of([name]), "version": _TEXT | {"title": "Version"}, "action": _one_of(COMMANDS)}
    paths = {path: {each.method: _describe(path, each, schemas, tokens)} for path, each in OPERATIONS.items()}
    for path in INFER_PATHS:
        paths[path]["post"] |= _infer(path, schemas | {"version": _TEXT})
        paths[path]["post"]["responses"]["200"] = _PREDICTIONS
    paths["/"]["get"]["responses"]["304"] = {"description": _MEANINGS[304]}
    paths["/api/history"]["get"]["parameters"] = [
        _query("since", {"type": "integer", "minimum": 0, "maximum": 10**15 - 1}, "Seconds since 1970."),
        _query("step", {"type": "integer", "enum": list(steps)}, "Seconds between two points."),
    ]
    (state,), states = msgspec.json.schema_components([RegistryState], ref_template=_SCHEMAS + "{name}")
    components |= states
    rollout = paths[_COMMAND]["post"]
    rollout["description"] = "Apply a rollout command to a version; the answer is the new state."
    rollout["responses"]["200"]["content"] = {_JSON: {"schema": state}}
    security = {"securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}} if tokens else {}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Anabranch", "version": version},
        "paths": paths,
        "components": {"schemas": components, **security},
    }


def _describe(path: str, operation: Operation, schemas: Document, tokens: bool) -> Document:
    parameters = _path_parameters(path, schemas)
    refusals = [401 if tokens else 403] if operation.needs_token else []
    responses: Document = {"200": {"description": "Successful Response", "content": {operation.content: {}}}}
    for status in sorted({*operation.errors, 500, *refusals}):
        responses[str(status)] = {
            "description": _MEANINGS[status],
            "content": {_JSON: {"schema": {"$ref": f"{_SCHEMAS}Error"}}},
            **({"headers": _RETRY_AFTER} if status in (429, 503) else {}),
        }
    return {
        "summary": operation.name.replace("_", " ").title(),
        "operationId": re.sub(r"\W", "_", f"{operation.name}{path}_{operation.method}"),
        **({"parameters": parameters} if parameters else {}),
        "responses": responses,
        **({"security": [{"bearer": []}] if operation.needs_token else []} if tokens else {}),
    }


def _infer(path: str, schemas: Document) -> Document:
    return {
        "description": "Inference of the Open Inference Protocol v2, answered by one version.",
        "operationId": "infer_version" if "{version}" in path else "infer",
        "parameters": [
            *_path_parameters(path, schemas),
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
    }


def _path_parameters(path: str, schemas: Document) -> list[Document]:
    names = re.findall(r"{(\w+)}", path)
    return [{"name": name, "in": "path", "required": True, "schema": schemas[name]} for name in names]


def _one_of(values: Iterable[str]) -> Document:
    return _TEXT | {"enum": list(values)}


def _query(name: str, schema: Document, description: str) -> Document:
    return {"name": name, "in": "query", "description": description, "schema": schema}


def _name(component: Document, specs: Mapping[str, TensorSpec]) -> None:
    """Restrict a tensor's component to the existing names and datatypes."""
    component["properties"]["name"]["enum"] = list(specs)
    component["properties"]["datatype"]["enum"] = sorted({spec.datatype for spec in specs.values()})


def _example(signature: Signature) -> Document:
    """Return a request of one row."""
    return {
        "inputs": [
            {
                "name": spec.name,
                "shape": [1, *spec.shape],
                "datatype": spec.datatype,
                "data": ["" if spec.dtype is None else spec.dtype.type(0).item()] * spec.row_elements,
            }
            for spec in signature.inputs.values()
        ]
    }
