"""A server with the Open Inference Protocol v2 that does as the test says: to inject faults into what a client gets."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

HEADER = "Inference-Header-Content-Length"


class Reply:
    """An answer: a status, a body (JSON unless it is bytes), and headers."""

    def __init__(self, body: Any, status: int = 200, **headers: str) -> None:
        self.status = status
        self.content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


class InferenceStub:
    """A model with the input `x` and the output `probabilities` of two classes."""

    def __init__(self, *, binary: bool = False) -> None:
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

    def answer(self, x: np.ndarray[Any, Any]) -> Reply:
        """Class 1 has the probability of the first feature."""
        return self.reply(np.stack([1 - x[:, 0], x[:, 0]], axis=1))

    def reply(self, values: np.ndarray[Any, Any], datatype: str = "FP32", shape: list[int] | None = None) -> Reply:
        output: dict[str, Any] = {"name": "probabilities", "datatype": datatype, "shape": shape or list(values.shape)}
        if not self.binary:
            output["data"] = [None if np.isnan(value) else value for value in values.reshape(-1).tolist()]
            return Reply({"model_name": "m", "outputs": [output]})
        content = values.astype("<f4").tobytes()
        output["parameters"] = {"binary_data_size": len(content)}
        head = json.dumps({"model_name": "m", "outputs": [output]}).encode()
        return Reply(head + content, **{HEADER.replace("-", "_"): str(len(head))})

    def handle(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Reply:
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
def serving(stub: InferenceStub) -> Iterator[InferenceStub]:
    """Serve a stub on a free port of loopback, and set its URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            size = int(self.headers.get("Content-Length", 0))
            headers = {name.lower(): value for name, value in self.headers.items()}
            with contextlib.suppress(OSError):  # the client has given up
                reply = stub.handle(self.command, self.path, headers, self.rfile.read(size))
                self.send_response(reply.status)
                for name, value in {"Content-Length": str(len(reply.content)), **reply.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(reply.content)

        do_POST = do_GET

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 the name is the base class's
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    stub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield stub
    finally:
        stub.ended.set()
        server.shutdown()
        server.server_close()
        thread.join()
