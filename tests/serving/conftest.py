"""Fixtures of serving: tiny models, their versions, and a server over loopback."""

import functools
import shutil
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import httpx
import pytest
import torch

from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.learner.settings.model import ModelSettings
from anabranch.learner.stream.trained_through import NewlyTrained, PartitionProgress
from anabranch.learner.versions.format import Manifest, ModelReference, Verdict
from anabranch.serving.model.deployment import Deployment
from anabranch.serving.reporting.report import read_report
from anabranch.serving.server import serve
from anabranch.serving.settings import ServingSettings
from tests.support import waiting
from tests.support.waiting import PATIENCE_SECONDS

MODULE = "anabranch_serving_test_models"

MODELS = '''
import pathlib
import threading
import time
import torch
from torch import nn

lost = threading.Event()
running = threading.Event()
go_on = threading.Event()
go_on.set()


class Number(nn.Module):
    """Answers its own number for each row, so that a reply shows its version."""

    def __init__(self):
        super().__init__()
        self.number = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        running.set()
        go_on.wait(100)
        return self.number + 0 * x.sum(dim=1)


class Sluggish(Number):
    """From version 100 on it waits for `go_on`; those before do not."""

    def forward(self, x):
        if self.number >= 100:
            go_on.wait(100)
        return self.number + 0 * x.sum(dim=1)


class Held(Number):
    """Waits in each run while there is a file `hold` in the folder of this module, in whichever process."""

    def forward(self, x):
        while pathlib.Path(__file__).with_name("hold").exists():
            threading.Event().wait(0.005)
        return super().forward(x)


class Mixed(nn.Module):
    """A classifier of a number and a word."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(8, 3)
        self.numbers = nn.Linear(2, 3)

    def forward(self, word, size):
        return self.numbers(size) + self.words(word).sum(dim=1)


class Touchy(nn.Module):
    """Fails on negative input, and has no finite answer above 100."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        if (x < 0).any():
            raise IndexError("index out of range in self")
        return torch.where(x.sum(dim=1) > 100, torch.inf, x.sum(dim=1)) * self.scale


class Pooled(Number):
    """Removes the dimension of a single event."""

    def forward(self, x):
        return super().forward(x[:, :, None].squeeze())


class Squeezed(Number):
    """Once it has learned, it takes one row for none."""

    def forward(self, x):
        if self.number >= 1 and len(x) == 1:
            return super().forward(x[0])
        return super().forward(x)


class Quitting(Number):
    """Ends its script on negative input."""

    def forward(self, x):
        if (x < 0).any():
            raise SystemExit(0)
        return super().forward(x)


class Doomed(Number):
    """Loses its device on a value above 1000: from then on every run of the process fails."""

    def forward(self, x):
        if (x > 1000).any():
            lost.set()
        if lost.is_set():
            raise torch.AcceleratorError("CUDA error: device-side assert triggered")
        return super().forward(x)


class Indexed(nn.Module):
    """Looks up an embedding of ten rows by an index that no schema bounds: a device-side assert on CUDA."""

    def __init__(self):
        super().__init__()
        self.effect = nn.Embedding(10, 1)

    def forward(self, x):
        return self.effect(x[:, 0].long())


class Hungry(Number):
    """Takes 16 MB for each row while it runs."""

    def forward(self, x):
        return super().forward(x.repeat_interleave(1 << 20, dim=1))


class Monthly(nn.Module):
    """An embedding of an integer that begins at 1."""

    def __init__(self):
        super().__init__()
        self.effect = nn.Embedding(12, 3)

    def forward(self, month):
        return self.effect(month - 1)


class HalfFrozen(nn.Module):
    """Learns a layer on a frozen one, and has a buffer that it adds to each answer."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 1)
        self.register_buffer("number", torch.zeros(()))

    def forward(self, x):
        return self.head(self.body(x))[:, 0] + self.number


class Hooked(HalfFrozen):
    """Takes part in loading weights."""

    def __init__(self):
        super().__init__()
        self.register_load_state_dict_pre_hook(lambda *_: None)


def half_frozen():
    return HalfFrozen()


def hooked():
    return Hooked()


def linear(classes=3):
    return nn.Linear(4, classes)


def tagged():
    return linear()


def number():
    return Number()


def sluggish():
    return Sluggish()


def held():
    return Held()


def mixed():
    return Mixed()


def touchy():
    return Touchy()


def indexed():
    return Indexed()


def hungry():
    return Hungry()


def doomed():
    return Doomed()


def pooled():
    return Pooled()


def squeezed():
    return Squeezed()


def quitting():
    return Quitting()


def monthly():
    return Monthly()


def broken():
    raise OSError("the factory fails")
'''

LINEAR = {"features": {"x": {"dtype": "float32", "shape": [4]}}, "label": {"name": "y", "classes": 3}}
NUMBER = {"features": {"x": {"dtype": "float32", "shape": [4]}}, "label": {"name": "y", "dtype": "float32"}}
MIXED = {
    "features": {
        "word": {"dtype": "string", "shape": [2], "encode": {"vocab": ["red", "green", "blue"]}},
        "size": {"dtype": "float32", "shape": [2], "default": [0.5, 1.5]},
    },
    "label": {"name": "y", "classes": 3},
}


PIPELINE = """
name = "tiny"
[stream]
topics = ["events"]
[schema.features.x]
dtype = "float32"
shape = [4]
[schema.label]
name = "y"
dtype = "float32"
[model]
factory = "{module}:{factory}"
task = "regression"
[serving]
port = {port}
"""
MONTHLY = {
    "features": {"month": {"dtype": "int64", "min": 1, "max": 12}},
    "label": {"name": "y", "classes": 3},
}
TAGGED = {"features": LINEAR["features"], "label": {"name": "y", "classes": 3, "multi": True}}

SCHEMAS = {
    "linear": LINEAR,
    "tagged": TAGGED,
    "number": NUMBER,
    "half_frozen": NUMBER,
    "hooked": NUMBER,
    "sluggish": NUMBER,
    "held": NUMBER,
    "touchy": NUMBER,
    "doomed": NUMBER,
    "quitting": NUMBER,
    "squeezed": NUMBER,
    "pooled": NUMBER,
    "hungry": NUMBER,
    "indexed": NUMBER,
    "broken": NUMBER,
    "mixed": MIXED,
    "monthly": MONTHLY,
}


def wait_until(holds, seconds=PATIENCE_SECONDS):
    """Return the first true value of `holds`, which is asked until then."""
    return waiting.wait_until(holds, patience=seconds)


@dataclass
class Publisher:
    """Plays the learner: writes versions of a model whose weights the test chooses."""

    deployment: Deployment

    @property
    def versions(self):
        return self.deployment.versions

    def publish(self, number, weights=None, offsets=None, verdict="inconclusive", reasons=(), **changes):
        """Write a version; by default a `Number` that answers its own number and has learned `10 * number`."""
        offsets = offsets if offsets is not None else {"events:0": 10 * number}
        incarnation = changes.pop("incarnation", 0)
        members = {
            "number": number,
            "generation": 1,
            "parent": None,
            "time": time.time(),
            "step": number,
            "trained_through": {
                name: PartitionProgress(offset, incarnation=incarnation, time_ms=int(time.time() * 1000))
                for name, offset in offsets.items()
            },
            "metrics": {},
            "schema": self.deployment.schema.digest,
            "encoders": {},
            "model": ModelReference(
                self.deployment.model.factory, self.deployment.model.args, self.deployment.model.task
            ),
            "files": {},
            "learned": NewlyTrained(1, [int(time.time() * 1000)]),
        }
        weights = weights if weights is not None else {"number": torch.tensor(float(number))}
        return self.versions.write(weights, Manifest(**{**members, **changes}), Verdict(verdict, [*reasons]))  # type: ignore[arg-type]


@pytest.fixture(scope="session", autouse=True)
def _certificates_are_read_once():
    """Each client of httpx reads all root certificates, also one of plain HTTP: 34 ms of CPU a request."""
    with pytest.MonkeyPatch.context() as patch:
        module = httpx._transports.default  # type: ignore[attr-defined]
        patch.setattr(module, "create_ssl_context", functools.cache(module.create_ssl_context))
        yield


@pytest.fixture(scope="session", autouse=True)
def _clients_are_patient():
    """Let requests without a `timeout` wait for more than httpx's five seconds: a machine may be busy."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("connect", "read", "write", "pool"):
            patch.setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, name, PATIENCE_SECONDS)
        yield


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """A folder with the module `MODULE`."""
    folder = tmp_path_factory.mktemp("models")
    (folder / f"{MODULE}.py").write_text(MODELS)
    return folder


@pytest.fixture(scope="session")
def deploy_in(models):
    """Make a deployment of one of the models above, with its state in a folder."""

    def make(factory, folder):
        settings = SchemaSettings.model_validate(SCHEMAS[factory])
        task = "multilabel" if settings.label.multi else "classification" if settings.label.classes else "regression"
        model = ModelSettings(factory=f"{MODULE}:{factory}", task=task)
        return Publisher(Deployment("tiny", Schema(settings), model, models, folder / "var", torch.device("cpu")))

    return make


@pytest.fixture
def deploy(deploy_in, tmp_path):
    """Make a deployment of one of the models above, in a separate state directory."""
    return lambda factory: deploy_in(factory, tmp_path)


@pytest.fixture
def pipeline(models, tmp_path):
    """Write a pipeline of one of the models that take `x` and answer a number, and return the path of its config."""

    def write(port=0, more="", factory="number"):
        shutil.copy(models / f"{MODULE}.py", tmp_path)
        path = tmp_path / "pipeline.toml"
        path.write_text(PIPELINE.format(module=MODULE, factory=factory, port=port) + more)
        return path

    return write


@pytest.fixture
def numbers(deploy):
    """A deployment whose versions answer their own number."""
    return deploy("number")


@dataclass
class Running:
    """A server over loopback."""

    url: str
    deployment: Deployment

    @property
    def infer(self):
        return f"{self.url}/v2/models/tiny/infer"

    @property
    def address(self):
        return self.url.partition("://")[2]

    def report(self):
        report = read_report(self.deployment.state_dir)
        assert report is not None
        return report


@pytest.fixture(autouse=True)
def _frequent_reports(monkeypatch):
    """Let servers in this process write a report with each poll: tests wait for the next one."""
    monkeypatch.setattr("anabranch.serving.server.REPORT_EVERY", timedelta(milliseconds=50))


@pytest.fixture
def eventually():
    """Ask a callable until it returns something true, and return that."""
    return wait_until


@pytest.fixture
def served():
    """Serve a deployment on a free port: `with served(publisher, **settings) as running`."""
    return serve_it


@pytest.fixture
def body_of():
    """Make a JSON request of so many rows for the models that take `x`."""
    return make_body


@contextmanager
def serve_it(publisher, ready=True, **settings):
    """Serve a deployment on a free port, until it is ready if asked; whatever ends it is raised.

    A request may take a minute, not ten seconds, unless the settings say otherwise: a machine may be busy.
    """
    stop = threading.Event()
    errors: list[BaseException] = []
    deployment = publisher.deployment

    def target():
        try:
            serve(deployment, ServingSettings.model_validate({"port": 0, "timeout": "60s", **settings}), stop)
        except BaseException as exc:  # noqa: BLE001 - raised again by the test's thread
            errors.append(exc)

    thread = threading.Thread(target=target)
    thread.start()
    try:
        wait_until(lambda: errors or ((r := read_report(deployment.state_dir)) and (r.ready or not ready)))
        if not errors:
            report = read_report(deployment.state_dir)
            assert report is not None
            yield Running(report.address, deployment)
    finally:
        stop.set()
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def make_body(rows, **members):
    data = [1.0] * (4 * rows)
    return {"inputs": [{"name": "x", "shape": [rows, 4], "datatype": "FP32", "data": data}], **members}
