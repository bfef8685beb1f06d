"""The sentence on how a pipeline does."""

import msgspec
import pytest

from learner.report import LearnerReport
from serving.health import judge
from serving.report import ServingReport

LEARNER = LearnerReport(pid=1, epoch=1, started=0, time=1000, steps=7)
SERVING = ServingReport(pid=2, started=0, time=1000, address="http://127.0.0.1:8000", ready=True, version=3)


@pytest.mark.parametrize(
    ("learner", "serving", "state", "sentence"),
    [
        ({}, {}, "well", "All is well."),
        (None, {}, "starting", "No learner has reported yet"),
        ({}, {"version": None, "ill": ["no version can be served yet"]}, "starting", "The first version is on its way"),
        ({"ill": ["the broker is gone"]}, {}, "ill", "Learner: the broker is gone"),
        ({"time": 960}, {}, "ill", "The learner does not report"),
        ({"ill": ["a"]}, {"ill": ["b"]}, "ill", "2 things are wrong."),
    ],
)
def test_it_is_told_in_one_sentence(learner, serving, state, sentence):
    report = None if learner is None else msgspec.structs.replace(LEARNER, **learner)
    health = judge(report, msgspec.structs.replace(SERVING, **serving), 1000)
    assert health.state == state
    assert health.sentence.startswith(sentence)
    assert bool(health.ill) == (state == "ill")
    assert health.silent == ("does not report" in sentence)
