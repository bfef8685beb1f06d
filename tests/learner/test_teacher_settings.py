"""`[model.teacher]`: one teacher, and one sentence for everything that is wrong with it."""

from datetime import timedelta

import pytest
from pydantic import ValidationError

from anabranch.ingest.settings.stream import StreamSettings
from anabranch.learner.settings.compatibility import conflicts
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.settings.model import ModelSettings, TeacherSettings, teacher_conflicts
from tests.support.facts import facts_of

URL = {"url": "https://models:8000/", "model": "large"}


def test_the_defaults_are_those_of_the_guide():
    teacher = TeacherSettings.model_validate(URL)
    assert (teacher.url, teacher.kind, teacher.weight, teacher.temperature) == ("https://models:8000", "url", 0.5, 2.0)
    assert (teacher.timeout, teacher.retries, teacher.request_rows) == (timedelta(seconds=1), 2, 256)
    assert TeacherSettings.model_validate({"version": {}}).kind == "version"
    assert TeacherSettings.model_validate({"factory": "m:f"}).kind == "factory"


def test_the_token_is_not_shown():
    teacher = TeacherSettings.model_validate({**URL, "token": "secret\n"})
    assert "secret" not in repr(teacher)
    assert teacher.token is not None
    assert teacher.token.get_secret_value() == "secret"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({}, "set exactly one of factory, version and url; there is none of them"),
        ({**URL, "factory": "m:f"}, "there is factory and url"),
        ({"url": "https://models:8000"}, "model is missing: the name of the model on the server of url"),
        ({"factory": "m:f", "timeout": "2s"}, "timeout is for a teacher with url; remove it"),
        ({"version": {}, "args": {"a": 1}}, "args are for factory; remove them, or write version.args"),
        ({"version": {"args": {"a": 1}}}, "version.args are for version.factory; set it too"),
        ({**URL, "precision": "bf16"}, "precision is for a teacher in this process; remove it"),
        ({**URL, "url": "ftp://models"}, "write the address of the server"),
        ({**URL, "url": "https://a:b@models"}, "contains credentials; write them as token"),
        ({**URL, "url": "https://models?x=1"}, "ends with the path"),
        ({**URL, "token": "two words"}, "write the token alone"),
        ({**URL, "model": "../admin"}, "write the name of a model"),
        ({"factory": "m:f", "weight": 0}, "greater than 0"),
        ({"factory": "m:f", "features": []}, "at least 1 item"),
    ],
)
def test_what_is_wrong_is_said_with_the_way_out(settings, sentence):
    with pytest.raises(ValidationError, match=sentence):
        TeacherSettings.model_validate(settings)


def test_the_teacher_has_to_fit_the_stream_and_the_schema():
    (without,) = teacher_conflicts(None, "distil", ("x",))
    assert without[0] == "stream.unlabelled"
    assert "needs a teacher; write [model.teacher]" in without[1]
    teacher = TeacherSettings.model_validate({"factory": "m:f", "features": ["x", "z"]})
    (absent,) = teacher_conflicts(teacher, "distil", ("x", "y"))
    assert absent == (
        "model.teacher.features",
        "model.teacher.features names 'z', which is no feature of the schema; those are x, y",
    )
    assert list(teacher_conflicts(teacher, "skip", ("x", "z"))) == []


@pytest.mark.parametrize(
    ("learner", "labels", "sentence"),
    [
        ({"strategy": "ncm"}, None, 'model.teacher = "url" does not go with learner.strategy = "ncm"'),
        ({"deterministic": True}, None, 'learner.deterministic = true does not go with model.teacher = "url"'),
        (
            {},
            {"topics": ["labels"], "early": "negative-then-correct", "unmatched": "negative", "wait": "1h"},
            'model.teacher = "url" does not go with stream.labels.early = "negative-then-correct"',
        ),
    ],
)
def test_settings_that_exclude_a_teacher_are_said(learner, labels, sentence):
    stream = StreamSettings.model_validate({"topics": ["events"], "labels": labels})
    model = ModelSettings.model_validate({"factory": "m:f", "teacher": URL})
    settings = LearnerSettings.model_validate(learner)
    ((_, said),) = conflicts(facts_of(learner=settings, stream=stream, model=model))
    assert said.startswith(sentence)
    assert not list(conflicts(facts_of(learner=settings, stream=stream)))


def test_events_without_a_label_do_not_wait_for_one_and_for_the_teacher():
    with pytest.raises(ValidationError, match='unlabelled = "distil" contradicts'):
        StreamSettings.model_validate(
            {"topics": ["events"], "unlabelled": "distil", "labels": {"topics": ["labels"], "wait": "1h"}}
        )
