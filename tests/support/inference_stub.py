"""A server with the Open Inference Protocol v2 that does as the test says: to inject faults into what a client gets."""

import contextlib
import json
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.support import http_server

HEADER = "Inference-Header-Content-Length"


class Reply:
    """An answer: a status, a body (JSON unless it is bytes), and headers."""

    def __init__(self, body, status=200, **headers):
        self.status = status
        self.content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


class InferenceStub:
    """A model with the input `x` and the output `probabilities` of two classes."""

    def __init__(self, *, binary=False):
        self.url = ""
        self.binary = binary
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []
        self.metadata: dict[str, Any] = {
            "name": "m",
            "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}],
            "outputs": [{"name": "probabilities", "datatype": "FP32", "shape": [-1, 2]}],
        }
        self.infer: Callable[[np.ndarray[Any, Any]], Reply] = self.answer
        """Returns the reply to a request for events with these features."""
        self.ended = threading.Event()

    def answer(self, x):
        """Class 1 has the probability of the first feature."""
        return self.reply(np.stack([1 - x[:, 0], x[:, 0]], axis=1))

    def reply(self, values, datatype="FP32", shape=None):
        output: dict[str, Any] = {"name": "probabilities", "datatype": datatype, "shape": shape or list(values.shape)}
        if not self.binary:
            output["data"] = [None if np.isnan(value) else value for value in values.reshape(-1).tolist()]
            return Reply({"model_name": "m", "outputs": [output]})
        content = values.astype("<f4").tobytes()
        output["parameters"] = {"binary_data_size": len(content)}
        head = json.dumps({"model_name": "m", "outputs": [output]}).encode()
        return Reply(head + content, **{HEADER.replace("-", "_"): str(len(head))})

    def handle(self, method, path, headers, body):
        self.requests.append((method, path, headers, body))
        if path == "/v2":
            return Reply({"name": "stub", "extensions": ["binary_tensor_data"] if self.binary else []})
        if path == "/v2/models/m":
            return Reply(self.metadata)
        assert path == "/v2/models/m/infer"
        length = headers.get(HEADER.lower())
        (given,) = json.loads(body if length is None else body[: int(length)])["inputs"]
        binary = b"" if length is None else body[int(length) :]
        x = np.array(given["data"], np.float32) if length is None else np.frombuffer(binary, "<f4")
        return self.infer(x.reshape(given["shape"]))


@contextlib.contextmanager
def serving(stub):
    """Serve a stub on a free port of loopback, and set its URL."""

    class Answering(http_server.Handler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            size = int(self.headers.get("Content-Length", 0))
            headers = {name.lower(): value for name, value in self.headers.items()}
            reply = stub.handle(self.command, self.path, headers, self.rfile.read(size))
            self.reply(reply.content, reply.status, **reply.headers)

        do_POST = do_GET

    with http_server.serving(Answering) as stub.url:
        try:
            yield stub
        finally:
            stub.ended.set()
