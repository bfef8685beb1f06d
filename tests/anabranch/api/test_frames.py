"""Data frames of pandas and polars are the events that dicts of the same values are, and predictions come as frames."""

import numpy as np
import pyarrow as pa
import pytest
from torch import nn

import anabranch
from anabranch.api.data import EventReader
from tests.anabranch.api.test_schema import ORDERS, TABLE, Stream
from tests.support.learner_batches import FIELDS, batches, model_of

pytestmark = pytest.mark.slow


def pandas_of(columns):
    return pytest.importorskip("pandas").DataFrame(columns)


def pandas_nullable_of(columns):
    return pandas_of(columns).convert_dtypes()


def pandas_categories_of(columns):
    texts = {name: "category" for name, values in columns.items() if isinstance(values[0], str)}
    return pandas_of(columns).astype(texts)


def pandas_arrow_of(columns):
    pandas = pytest.importorskip("pandas")
    return pa.table(columns).to_pandas(types_mapper=pandas.ArrowDtype)


def polars_of(columns):
    return pytest.importorskip("polars").DataFrame(columns)


def stream_of(columns):
    return Stream(pa.table(columns))


KINDS = [pandas_of, pandas_nullable_of, pandas_categories_of, pandas_arrow_of, polars_of, stream_of]


@pytest.mark.parametrize("frame_of", KINDS)
def test_a_frame_has_the_events_of_a_dict(frame_of):
    columns = {**ORDERS, "n": [1, None, 3, 4] * 10, "x": [[0.5, 1.5], [2.0, 3.0]] * 20}
    expected, schema = (anabranch.Schema.infer(data, label="fraud") for data in (columns, frame_of(columns)))
    assert schema.digest == expected.digest
    found = EventReader(schema).read(frame_of(columns))
    for name, column in EventReader(expected).read(columns).items():
        np.testing.assert_array_equal(found[name], column, err_msg=name)


@pytest.mark.parametrize("frame_of", KINDS)
def test_a_learner_learns_from_a_frame_and_predicts_one(frame_of):
    (data,) = batches(1)
    frame = frame_of({"x": data["x"].tolist(), "n": data["n"].tolist(), "y": data["y"].tolist()})
    if frame_of is pandas_of:
        frame.index = range(100, 164)
    settings = {"learner": {"batch_size": 16, "device": "cpu"}}
    with anabranch.Learner(model_of(), anabranch.Schema(FIELDS), settings=settings) as learner:
        learner.learn(frame)
        expected, found = learner.predict(data), learner.predict(frame)
    names = ["prediction", "probabilities.0", "probabilities.1", "probabilities.2"]
    assert list(found.column_names if isinstance(found, pa.Table) else found.columns) == names
    assert type(found).__module__.partition(".")[0] == frame_of.__name__.partition("_")[0].replace("stream", "pyarrow")
    np.testing.assert_array_equal(found["prediction"], expected["prediction"])
    np.testing.assert_allclose(found["probabilities.2"], expected["probabilities"][:, 2])
    if frame_of is pandas_of:
        assert (found.index == frame.index).all()


def test_classes_of_a_frame_have_their_names():
    data = {"x": [[0.5], [1.5]] * 20, "kind": ["a", "b"] * 20}
    for frame in (pandas_of(data), polars_of(data)):
        schema = anabranch.Schema.infer(frame, label="kind")
        with anabranch.Learner(nn.Linear(1, 2), schema, "none") as learner:
            learner.learn(frame)
            assert set(learner.predict(frame)["prediction"]) <= {"a", "b"}


def test_what_is_no_frame_of_events_is_said():
    pandas, polars = pytest.importorskip("pandas"), pytest.importorskip("polars")
    twice = pandas.DataFrame([[1, 2]], columns=["a", "a"])
    for data, sentence in [
        (pandas.Series([1, 2]), "data is of type Series, and has to be a dict of arrays by name, or a data frame"),
        (polars.Series([1, 2]), "data is of type Series"),
        (polars.DataFrame({"y": [1]}).lazy(), "data is of type LazyFrame.*: collect it first"),
        (twice, "the data has two columns named a"),
    ]:
        with pytest.raises(anabranch.AnabranchError, match=sentence):
            anabranch.Schema.infer(data, label="y")
    assert anabranch.Schema.infer(pandas_of(TABLE.to_pydict()), label="fraud").label.classes == 2
