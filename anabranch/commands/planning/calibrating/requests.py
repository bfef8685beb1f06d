"""Requests of one row, to time serving."""

import http.client
import time
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np

from ingest.events.schema import Schema

_TIMEOUT_SECONDS = 30.0
_KINDS = {"b": "BOOL", "f": "FP", "i": "INT", "u": "UINT"}


def time_requests(address: str, name: str, schema: Schema, seconds: float) -> float | None:
    """Return the median seconds of one request or more, each of one row; None where serving refuses them."""
    body, taken = msgspec.json.encode({"inputs": [_tensor(each) for each in schema.features]}), list[float]()
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=_TIMEOUT_SECONDS)
    try:
        end = time.monotonic() + seconds
        while not taken or time.monotonic() < end:
            begin = time.perf_counter()
            connection.request("POST", f"/v2/models/{name}/infer", body, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            reply.read()
            if reply.status != http.HTTPStatus.OK:
                return None
            taken.append(time.perf_counter() - begin)
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    return float(np.median(taken)) if taken else None


def _tensor(feature: Any) -> dict[str, Any]:
    dtype, count = feature.dtype, int(np.prod(feature.shape))
    values: list[Any] = [False if dtype.kind == "b" else feature.filler] * count
    kind = _KINDS[dtype.kind] + ("" if dtype.kind == "b" else str(8 * dtype.itemsize))
    if feature.is_string:
        kind, values = "BYTES", [""] * count
    return {"name": feature.name, "datatype": kind, "shape": [1, *feature.shape], "data": values}
