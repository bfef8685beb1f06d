"""HTTP clients request predictions continuously while parts of the pipeline are killed repeatedly."""

import http.client
import json
import random
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.figures import Figures
from tests.faults.pipeline import POLL_SECONDS, Pipeline, Supervised, make_topic, producer
from tests.pipelines import LINEAR
from tests.support.ports import first_free_port

TEXT = """
{{stream}}
[schema.features.x]
dtype = "float32"
shape = [3]
[schema.label]
name = "y"
classes = 3
[model]
factory = "faulty_model:build"
{{learner}}
batch_size = 16
device = "cpu"
[versions]
publish_every = "200ms"
[checkpoints]
every = "1s"
[serving]
port = {port}
"""
BODY = json.dumps({"inputs": [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1.0, 0.0, 0.0]}]})
_CLIENTS = 3
_TIMEOUT_SECONDS = 60.0


@dataclass
class Asked:
    """The results of the clients.

    Attributes:
        requests: number of requests.
        failures: errors of the requests without a prediction.
        versions: those that answered.
        longest: the slowest reply, in seconds.
        kills: number of kills of the learner.
    """

    requests: int = 0
    failures: list[str] = field(default_factory=list)
    versions: set[int] = field(default_factory=set)
    longest: float = 0.0
    kills: int = 0


class Clients:
    """Threads that send requests without a pause, half of them over a kept-alive connection."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._done = threading.Event()
        self._lock = threading.Lock()
        self.asked = Asked()
        self._threads = [threading.Thread(target=self._run, args=(client % 2 == 0,)) for client in range(_CLIENTS)]

    def __enter__(self) -> "Clients":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join()

    def _run(self, kept_alive: bool) -> None:
        connection = self._connect()
        while not self._done.wait(POLL_SECONDS):
            begin = time.monotonic()
            failure = version = None
            try:
                version = predict(connection)
            except (OSError, http.client.HTTPException, ValueError, KeyError) as exc:
                failure = f"{type(exc).__name__}: {exc}"
            with self._lock:
                self.asked.requests += 1
                self.asked.longest = max(self.asked.longest, time.monotonic() - begin)
                if failure is not None:
                    self.asked.failures.append(failure)
                elif version is not None:
                    self.asked.versions.add(version)
            if failure is not None or not kept_alive:
                connection.close()
                connection = self._connect()
        connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self._port, timeout=_TIMEOUT_SECONDS)


def predict(connection: http.client.HTTPConnection) -> int:
    """Request one prediction, and return the version that answered; raises ValueError for any other reply."""
    connection.request("POST", "/v2/models/faults/infer", BODY, {"Content-Type": "application/json"})
    response = connection.getresponse()
    content = response.read()
    if response.status != 200:
        raise ValueError(f"{response.status} {content[:200]!r}")
    return int(json.loads(content)["model_version"])


def ready(port: int) -> bool:
    """Return whether serving answers with a prediction."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_SECONDS)
    try:
        predict(connection)
    except (OSError, http.client.HTTPException, ValueError):
        return False
    finally:
        connection.close()
    return True


def asked_while_the_learner_is_killed(folder: Path, bootstrap: str, kills: int, seed: int) -> Asked:
    """Kill the learner `kills` times, each at a random time after its first step; return the results of clients."""
    port = first_free_port()
    topic = make_topic(bootstrap, "asked")
    pipeline = Pipeline(folder, bootstrap, topic, LINEAR, TEXT.format(port=port))
    dice = random.Random(seed)
    with Supervised(pipeline, ("learner", "serving")) as parts, Trickle(bootstrap, topic):
        parts.until(lambda: ready(port), "a prediction")
        with Clients(port) as clients:
            for _ in range(kills):
                time.sleep(dice.uniform(0.0, 1.5))
                gone = parts.kill()
                parts.wait_for(lambda report: report.steps_since_start > 0, "a step after the kill", no_more=gone)
                clients.asked.kills += 1
        return clients.asked


class Trickle:
    """Sends a few hundred events a second until the context ends."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self._address = bootstrap, topic
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        with producer(*self._address) as sender:
            number = 0
            while not self._done.wait(POLL_SECONDS):
                for _ in range(8):
                    x = [float(number % 3 == column) for column in range(3)]
                    sender.send(json.dumps({"x": x, "y": number % 3}).encode())
                    number += 1


def run(folder: Path, bootstrap: str, figures: Figures, *, quick: bool, minutes: float) -> None:
    """Measure the part `serving`."""
    kills = 4 if quick else 40
    figures.part("serving", f"{_CLIENTS} HTTP clients while the learner is killed {kills} times")
    asked = asked_while_the_learner_is_killed(folder, bootstrap, kills, seed=int(time.time()))
    remark = f"of {asked.requests}, by {len(asked.versions)} versions"
    figures.add("failed_requests", len(asked.failures), " ".join([remark, *asked.failures[:1]]))
    figures.add("requests", asked.requests)
    figures.add("slowest_request_seconds", asked.longest)
