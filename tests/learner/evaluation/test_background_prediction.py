"""Predictions in the background: of the weights when they began, for the events that are left, on a core to spare."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ingest.config import SchemaSettings
from ingest.events.block import Array
from ingest.events.schema import Schema
from learner.evaluation import background_prediction
from learner.evaluation.background_prediction import BackgroundPrediction, has_spare_core
from learner.evaluation.chunks import Chunks
from learner.evaluation.event_time import EventTimePredictor
from learner.model.device import Precision
from learner.model.task import Classification

CPU = torch.device("cpu")
SCHEMA = Schema(
    SchemaSettings.model_validate(
        {"features": {"x": {"dtype": "float32", "shape": [2]}}, "label": {"name": "y", "classes": 2}}
    )
)


class Model(nn.Module):
    """Returns the features times a weight, and raises on features that are NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2, affine=False)
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if x.isnan().any():
            raise ValueError("NaN")
        return self.norm(x) * self.factor


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def background(model: Model) -> Iterator[BackgroundPrediction]:
    background = BackgroundPrediction(model, ["x"], (2,), Chunks(CPU))
    yield background
    background.close()


@pytest.fixture
def predictor(model: Model, background: BackgroundPrediction) -> EventTimePredictor:
    return EventTimePredictor(
        *(model, Classification(), SCHEMA, CPU, Precision("fp32", None), (2,)), background=background
    )


def events(rows: int) -> dict[str, Array]:
    x = np.arange(2 * rows, dtype=np.float32).reshape(rows, 2)
    return {"offset": np.arange(rows), "feature.x": x}


def test_it_predicts_with_the_weights_and_statistics_when_it_began(model: Model, predictor: EventTimePredictor) -> None:
    columns = events(5)
    before = predictor.predict(columns)
    predictor.begin(columns)
    with torch.no_grad():
        model.factor.fill_(3.0)
        model.norm.running_mean.fill_(1.0)  # type: ignore[union-attr,operator]
    assert np.array_equal(predictor.predict(columns), before)
    assert np.array_equal(predictor.predict(columns), before)  # a step that is tried again asks again
    assert not np.array_equal(predictor.predict(events(5)), before)

    predictor.begin(columns)
    assert np.array_equal(predictor.predict(columns), predictor.predict(events(5)))
    assert model.training


def test_events_that_are_erased_meanwhile_are_left_out(predictor: EventTimePredictor) -> None:
    columns = events(6)
    predictor.begin(columns)
    left = np.array([True, False, True, True, False, True])
    output = predictor.predict({name: column[left] for name, column in columns.items()})
    assert np.array_equal(output, predictor.predict(events(6))[left])


def test_events_on_which_the_model_raises_have_no_prediction(predictor: EventTimePredictor) -> None:
    columns = events(4)
    columns["feature.x"][2] = np.nan
    predictor.begin(columns)
    assert np.isnan(predictor.predict(columns)).all(axis=1).tolist() == [False, False, True, False]


def test_where_the_thread_fails_the_caller_predicts(
    predictor: EventTimePredictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    with monkeypatch.context() as patched:
        patched.setattr(background_prediction, "output_of_each", no_memory)
        columns = events(3)
        predictor.begin(columns)
        output = predictor.predict(columns)
    assert np.array_equal(output, predictor.predict(events(3)))
    predictor.begin(columns)
    assert np.array_equal(predictor.predict(columns), output)


@pytest.mark.parametrize(
    ("device", "threads", "ranks", "spare"),
    [("cpu", 1, 1, True), ("cpu", 2, 1, False), ("cpu", 1, 2, False), ("cpu", 3, 1, False), ("cuda", 1, 1, False)],
)
def test_only_training_on_the_cpu_may_leave_a_core_idle(
    monkeypatch: pytest.MonkeyPatch, device: str, threads: int, ranks: int, spare: bool
) -> None:
    monkeypatch.setattr(background_prediction, "usable_cores", lambda: 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert has_spare_core(torch.device(device), ranks) is spare
