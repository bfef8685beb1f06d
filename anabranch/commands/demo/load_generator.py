"""Requests for held-out digits over HTTP, all the time: what a user of the served model would see."""

import http.client
import json
import random
import time
from collections.abc import Callable
from typing import Any

from typing_extensions import override

from anabranch.commands.demo.dataset import Digits, rounded
from anabranch.learner.stream.trained_through import parse_trained_through
from anabranch.runtime.rate_limiter import PacedThread

_TIMEOUT_SECONDS = 10.0
_POLL_SECONDS = 0.05
_IDLE_SECONDS = 2.0


class LoadGenerator(PacedThread):
    """One thread with one connection that is kept alive; finishes the request on its way when it is stopped.

    Requests count from the first moment at which serving is ready. Its figures may be read at any time.
    """

    def __init__(self, host: str, port: int, model: str, digits: Digits, rate: float, seed: int) -> None:
        self._address = (host, port)
        self._path = f"/v2/models/{model}/infer"
        self._bodies = [request_body(pixels) for pixels in digits.request_pixels]
        self._labels = digits.request_labels.tolist()
        self._random = random.Random(seed)  # noqa: S311 which digit is asked for is no secret
        super().__init__("load-generator", rate)
        self.classes_seen = 1
        """Only digits below it are requested; set by the demo, which follows the stream."""
        self.requests = 0
        self.failures = 0
        self.last_failure: str | None = None
        self.trained_through: dict[str, int] = {}

    @override
    def _run(self) -> None:
        while not self._stop.is_set() and not answers(*self._address, "/v2/health/ready"):
            self._stop.wait(_POLL_SECONDS)
        connection, last = http.client.HTTPConnection(*self._address, timeout=_TIMEOUT_SECONDS), 0.0
        while not self._stop.is_set():
            self._pacer.pace()
            if self._stop.is_set():
                break
            if time.monotonic() - last > _IDLE_SECONDS:
                # A server may close an idle connection at any moment, which is not a failure of its.
                connection.close()
            self._count(lambda: self._ask(connection))
            last = time.monotonic()
            if self.last_failure:
                connection.close()
        connection.close()

    def _count(self, ask: Callable[[], str | None]) -> None:
        try:
            failure = ask()
        except (OSError, http.client.HTTPException, ValueError, KeyError, IndexError, TypeError) as exc:
            failure = f"{type(exc).__name__}: {exc}"
        self.requests += 1
        if failure:
            self.failures += 1
        self.last_failure = failure or None

    def _ask(self, connection: http.client.HTTPConnection) -> str | None:
        """Send one request, and return what is wrong with its reply."""
        row = self._pick()
        connection.request("POST", self._path, self._bodies[row], {"Content-Type": "application/json"})
        response = connection.getresponse()
        content = response.read()
        if not 200 <= response.status < 300:
            return f"{response.status} {content[:200].decode(errors='replace')}"
        reply: dict[str, Any] = json.loads(content)
        if not any(output["name"] == "prediction" for output in reply["outputs"]):
            return "the reply has no prediction"
        learned = reply["parameters"]["trained_through"]
        self.trained_through = parse_trained_through(learned) if learned else {}
        return None

    def _pick(self) -> int:
        while True:
            row = self._random.randrange(len(self._labels))
            if self._labels[row] < self.classes_seen:
                return row


def request_body(pixels: Any) -> bytes:
    """Return the JSON of an inference request for one digit."""
    tensor = {"name": "x", "shape": [1, 64], "datatype": "FP32", "data": rounded(pixels)}
    return json.dumps({"inputs": [tensor]}).encode()


def answers(host: str, port: int, path: str) -> bool:
    """Whether a GET is answered with 200."""
    connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT_SECONDS)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
