"""`anabranch init --history`: a pipeline that fits the files that it was written from."""

import json
from datetime import timedelta
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from anabranch import cli
from anabranch.commands.init.command import write_history
from anabranch.config.loader import load_config
from anabranch.core.errors import SettingsError
from anabranch.ingest.backfill.history import FileHistory
from anabranch.ingest.backfill.row_decoder import RowDecoder
from anabranch.ingest.events.schema import Schema
from anabranch.learner.model.factory import build_model, check_model, make_task


def columns(rows=6):
    return {
        "amount": np.linspace(0, 1e6, rows),
        "items": pa.array([1, None, *range(2, rows)], pa.int16()),
        "weekend": [row % 2 == 0 for row in range(rows)],
        "pixels": pa.FixedSizeListArray.from_arrays(pa.array(np.ones(rows * 4, np.float32)), 4),
        "country": pa.array(["CH", None, *["DE"] * (rows - 2)]).dictionary_encode(),
        "tags": [["a"]] * rows,
        "class": ["a"] * rows,
        "at": pa.array(np.arange(rows), pa.timestamp("ms")),
        "fraud": [row % 2 for row in range(rows)],
        "two words": np.zeros(rows),
    }


@pytest.fixture
def history(tmp_path):
    (tmp_path / "lake").mkdir()
    pq.write_table(pa.table(columns()), tmp_path / "lake" / "part-0.parquet")
    return tmp_path / "lake"


def loaded(history, label="fraud"):
    folder = history.parent / "fraud eu"
    write_history(folder, f"{history}/*.parquet", label)
    return load_config(folder / "pipeline.toml", {})


def test_the_pipeline_fits_the_files_and_its_model_fits_the_schema(history, monkeypatch):
    config = loaded(history)
    pipeline, schema = config.pipeline, Schema(config.pipeline.events)
    assert RowDecoder(schema, None, 1_000_000).problem(pq.read_schema(history / "part-0.parquet")) is None
    assert pipeline.name == "fraud-eu"
    assert pipeline.stream.backfill is not None
    assert pipeline.stream.backfill.files == (f"{history}/*.parquet",)
    described = {
        name: (feature.dtype, feature.shape, feature.default) for name, feature in pipeline.events.features.items()
    }
    assert described == {
        "amount": ("float32", (), None),
        "items": ("int16", (), 0),
        "weekend": ("bool", (), None),
        "pixels": ("float32", (4,), None),
        "country": ("string", (), ""),
        "class": ("string", (), None),
    }
    assert (pipeline.events.label.name, pipeline.events.label.classes) == ("fraud", 2)
    assert pipeline.events.time is not None
    assert pipeline.events.time.name == "at"
    text = config.path.read_text()
    assert '"tags" is left out: no feature is of Arrow type list' in text
    assert '"two words" is left out: its name is not that of a field' in text
    monkeypatch.syspath_prepend(str(config.folder))
    model = build_model(pipeline.model.factory, pipeline.model.args, config.folder)
    assert check_model(model, make_task(pipeline.model.task), schema, torch.device("cpu")) == (2,)


def test_a_label_of_floats_is_a_regression_and_one_of_strings_has_its_classes(history):
    regression = loaded(history, "amount").pipeline
    assert (regression.events.label.classes, regression.model.args["outputs"]) == (None, 1)
    assert regression.model.task == "regression"
    write_history(history.parent / "b", f"{history}/*.parquet", "country")
    words = load_config(history.parent / "b" / "pipeline.toml", {}).pipeline
    assert words.events.label.classes == ("CH", "DE")


def test_columns_of_kafka_connect_are_the_identity_and_no_features(history):
    table = pa.table(columns() | {"kafka_topic": ["t"] * 6, "kafka_partition": [0] * 6, "kafka_offset": list(range(6))})
    pq.write_table(table, history / "part-0.parquet")
    pipeline = loaded(history).pipeline
    assert pipeline.stream.backfill is not None
    identity = pipeline.stream.backfill.identity
    assert identity is not None
    assert (identity.topic, identity.partition, identity.offset) == ("kafka_topic", "kafka_partition", "kafka_offset")
    assert not {"kafka_partition", "kafka_offset"} & pipeline.events.features.keys()


@pytest.mark.parametrize(
    ("label", "sentence"),
    [
        ("nothing", r"part-0\.parquet has no column nothing; --label takes one of amount, items"),
        ("tags", r"the label tags is of Arrow type list.*, not a number or a string"),
        ("class", r"the label class has 1 classes, not 2 to 1000"),
    ],
)
def test_a_column_that_is_no_label_is_named(history, label, sentence):
    with pytest.raises(SettingsError, match=sentence):
        loaded(history, label)


def test_a_file_that_is_no_parquet_and_options_that_lack_each_other_are_one_sentence(history, capsys):
    assert cli.main(["init", str(history.parent / "a"), "--label", "fraud"]) == 2
    assert "--history and --label go together" in capsys.readouterr().err
    (history / "part-0.parquet").write_bytes(b"PAR1, but no more")
    assert cli.main(["init", str(history.parent / "a"), "--history", f"{history}/*", "--label", "fraud"]) == 2
    assert "part-0.parquet cannot be read as Parquet" in capsys.readouterr().err
    assert not (history.parent / "a").exists()


INJECTED = 'a\nstorage = {url = "s3:\\u002F\\u002Fevil"}\ntracing = {setup = "os:abort"}\n#'


def test_the_names_of_files_and_columns_write_no_setting(history):
    inner = pa.struct([(INJECTED, pa.int32()), ("b", pa.string())])
    table = pa.table({**columns(), INJECTED: [0] * 6, "nested": pa.array([None] * 6, inner), "\x7f\u2028": [0] * 6})
    pq.write_table(table, history / "part-0.parquet")
    (history / "part-0.parquet").rename(history / "0 \"#'.parquet")
    pipeline = loaded(history).pipeline
    assert (pipeline.storage, pipeline.tracing) == (None, None)
    assert "amount" in pipeline.events.features


@pytest.mark.parametrize("name", [f"{INJECTED}.parquet", "\x1b[2J.parquet", "a\u2028.parquet", "\udcff.parquet"])
def test_a_file_whose_name_is_no_plain_text_is_refused(history, name):
    (history / "part-0.parquet").rename(history / name)
    with pytest.raises(SettingsError, match=r"has control characters or is not UTF-8: .*; rename it") as raised:
        loaded(history)
    assert str(raised.value).isascii()
    assert str(raised.value).isprintable()


def init(history, label, capsys, **table):
    """Return the pipeline for a table, which its file fits, and what the command printed."""
    if table:
        pq.write_table(pa.table(table), history / "part-0.parquet")
    folder = history.parent / "new"
    assert cli.main(["init", str(folder), "--history", f"{history}/*", "--label", label, "--force"]) == 0
    config = load_config(folder / "pipeline.toml", {})
    assert config.pipeline.stream.backfill is not None
    source = FileHistory(config.pipeline.stream.backfill, Schema(config.pipeline.events), 0, 1000)
    source.list_files(None)
    rows = source.poll(timedelta(seconds=20))
    source.close()
    assert rows is not None
    assert not rows.decoded.rejects
    return config, capsys.readouterr().out


def test_the_index_of_pandas_is_no_feature(history, capsys):
    table = pa.table({"x": [1.0, 2.0], "y": [0, 1], "__index_level_0__": [7, 3], "row": [0, 1]})
    described = {"index_columns": ["__index_level_0__", "row", {"kind": "range", "start": 0}]}
    unusable = ("[", "[]", '{"index_columns": 1}')
    for metadata, left_out in ((json.dumps(described), True), *((each, False) for each in unusable)):
        pq.write_table(table.replace_schema_metadata({"pandas": metadata}), history / "part-0.parquet")
        config, printed = init(history, "y", capsys)
        assert list(config.pipeline.events.features) == (["x"] if left_out else ["x", "__index_level_0__", "row"])
        assert ('"row" is left out: it is the index of pandas' in printed) == left_out
        assert ('# "row" is left out' in config.path.read_text()) == left_out


def test_an_index_of_times_is_the_time(history, capsys):
    table = pa.table({"x": [1.0, 2.0], "y": [0, 1], "at": pa.array([1, 2], pa.timestamp("ns"))})
    described = json.dumps({"index_columns": ["at"]})
    pq.write_table(table.replace_schema_metadata({"pandas": described}), history / "part-0.parquet")
    assert init(history, "y", capsys)[0].pipeline.events.time is not None


def test_decimals_are_numbers(history, capsys):
    amounts = pa.array([Decimal("1.25"), Decimal("-3.50")], pa.decimal128(12, 2))
    counts = pa.array([Decimal(3), Decimal(2**60)], pa.decimal128(38, 0))
    features = init(history, "y", capsys, amount=amounts, count=counts, y=[0, 1])[0].pipeline.events.features
    assert {name: each.dtype for name, each in features.items()} == {"amount": "float32", "count": "int64"}
    assert init(history, "amount", capsys, amount=amounts, count=counts)[0].pipeline.events.label.classes is None
    label = init(history, "y", capsys, x=[1, 2], y=pa.array([0, 2], pa.decimal128(38, 0)))[0].pipeline.events.label
    assert label.classes == 3


def test_a_label_that_is_true_or_false_or_0_0_and_1_0_has_two_classes(history, capsys):
    for label, remark in (([True, False], ""), ([1.0, None], "0.0 and 1.0 alone"), ([0.0, 1.0], "0.0 and 1.0 alone")):
        config, printed = init(history, "y", capsys, x=[1.0, 2.0], y=label)
        assert (config.pipeline.events.label.classes, config.pipeline.model.args["outputs"]) == (2, 2)
        assert remark in printed
    config, printed = init(history, "y", capsys, x=[1.0, 2.0], y=[0.0, 2.5])
    assert config.pipeline.events.label.classes is None
    assert "the label y has numbers such as 2.5: the model is a regression" in printed


def test_views_of_strings_are_strings(history, capsys):
    words = pa.array(["CH", None, "DE"]).cast(pa.string_view())
    config, _ = init(history, "y", capsys, country=words, y=words.cast(pa.string()))
    assert config.pipeline.events.features["country"].dtype == "string"


def test_a_name_that_is_no_field_and_types_without_a_feature_are_said(history, capsys):
    _, printed = init(history, "y", capsys, **{"device-type": ["a", "b"], "x": [1, 2], "y": [0, 1]})
    assert '"device-type" is left out: its name is not that of a field: rename it' in printed
    pq.write_table(pa.table({"day": [[1], [2]], "y": [0, 1]}), history / "part-0.parquet")
    assert cli.main(["init", str(history.parent / "b"), "--history", f"{history}/*", "--label", "y"]) == 2
    assert 'besides y; "day" is left out: no feature is of Arrow type list<' in capsys.readouterr().err
