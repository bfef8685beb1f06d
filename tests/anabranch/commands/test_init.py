"""`anabranch init`: the example, and pipelines that fit a subject of a registry or the files of a history."""

import base64
import importlib.util
import json
from datetime import timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from anabranch import cli
from anabranch.commands.init.command import FILES, next_commands, write_example, write_history
from anabranch.commands.init.files import UNFIT_NAME, PipelineField
from anabranch.commands.init.subject import SubjectOptions, write_subject
from anabranch.commands.init.subject_fields import fields_of_subject
from anabranch.config.loader import load_config
from anabranch.core.errors import SettingsError
from anabranch.ingest.backfill.history import FileHistory
from anabranch.ingest.backfill.row_decoder import RowDecoder
from anabranch.ingest.errors import RegistryError
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats.json import JsonFormat
from anabranch.ingest.formats.registry import make_decoder
from anabranch.ingest.schema_registry.client import RegistryClient
from anabranch.ingest.schema_registry.writer_schema import WriterSchema
from anabranch.learner.model.factory import build_model, check_model, make_task

AVRO = {
    "type": "record",
    "name": "Payment",
    "fields": [
        {"name": "amount", "type": "double"},
        {"name": "count", "type": ["null", "int"]},
        {"name": "country", "type": ["null", {"type": "enum", "name": "Country", "symbols": ["DE", "FR"]}]},
        {"name": "merchant", "type": "string"},
        {"name": "is_new", "type": "boolean"},
        {"name": "history", "type": {"type": "array", "items": "float"}},
        {"name": "tags", "type": {"type": "map", "values": "string"}},
        {"name": "account", "type": "string"},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "fraud", "type": ["null", "int"]},
    ],
}
PROTOBUF = """
syntax = "proto3";
import "google/protobuf/timestamp.proto";
enum Country { UNKNOWN = 0; DE = 1; }
message Payment {
  double amount = 1;
  optional int32 count = 2;
  Country country = 3;
  string merchant = 4;
  bool is_new = 5;
  repeated float history = 6;
  map<string, string> tags = 7;
  string account = 8;
  google.protobuf.Timestamp at = 9;
  optional int32 fraud = 10;
}
"""
JSON_SCHEMA = {
    "type": "object",
    "required": ["amount", "merchant", "is_new", "account"],
    "properties": {
        "amount": {"type": "number"},
        "count": {"type": ["null", "integer"]},
        "country": {"enum": ["DE", "FR"], "type": "string"},
        "merchant": {"type": "string"},
        "is_new": {"type": "boolean"},
        "history": {"type": "array", "items": {"type": "number"}},
        "tags": {"type": "object"},
        "account": {"type": "string"},
        "fraud": {"type": ["integer", "null"]},
    },
}
KINDS = [("AVRO", json.dumps(AVRO)), ("PROTOBUF", PROTOBUF), ("JSON", json.dumps(JSON_SCHEMA))]
SUBJECT = "payments-value"


def write(folder, registry, environment=None, **options):
    chosen = {"subject": SUBJECT, "label": "fraud", "classes": "2", "key": "account", **options}
    write_subject(folder, SubjectOptions(url=registry.url, **chosen), environment or {}, force=True)
    return load_config(folder / "pipeline.toml", {})


@pytest.mark.parametrize(("kind", "text"), KINDS, ids=[kind for kind, _ in KINDS])
def test_the_pipeline_reads_the_subject_and_its_model_takes_the_features(tmp_path, registry, kind, text):
    registry.register(SUBJECT, text, kind)
    config = write(tmp_path / "new" / "payments", registry)
    pipeline = config.pipeline
    assert pipeline.name == "payments"
    assert pipeline.stream.topics == ("payments",)
    assert {"avro": "AVRO", "protobuf": "PROTOBUF", "json-schema": "JSON"}[pipeline.stream.format] == kind
    assert list(pipeline.events.features) == ["amount", "count", "country", "merchant", "is_new"]
    assert pipeline.events.key is not None
    assert (pipeline.events.label.name, pipeline.events.key.name) == ("fraud", "account")
    assert pipeline.events.features["count"].default == 0
    assert (pipeline.events.time is not None) == (kind != "JSON")
    schema = Schema(pipeline.events)
    client = RegistryClient(pipeline.stream.registry, are_serialized=True)
    make_decoder(client.newest(SUBJECT), schema)  # every field fits
    client.close()
    spec = importlib.util.spec_from_file_location("my_model", config.folder / "my_model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.build(**pipeline.model.args)
    features = {each.name: torch.arange(4) if each.is_string else torch.zeros(4) for each in schema.features}
    features["country"] %= 2
    assert model(**features).shape == (4, 2)


def test_what_is_not_read_is_said_in_the_file(tmp_path, registry):
    registry.register(SUBJECT, AVRO)
    write(tmp_path, registry)
    text = (tmp_path / "pipeline.toml").read_text()
    assert '# "tags" is left out: it is of type map of string' in text
    assert '# "history" is left out: it is of type array of float; to read it, set the number of its values' in text
    assert "# shape = [1]" in text


def test_the_answer_of_a_registry_writes_no_setting(tmp_path, registry):
    words = ["\U0001f600", "\x7f", 'a"\nstorage = 1']
    properties = {"x": {"type": "number"}, "y": {"enum": words, "type": "string"}, "z\nstorage = 1": {"type": "number"}}
    properties["w"] = {"type": "array", "items": {"type": "a\nstorage = 1"}}
    registry.register(SUBJECT, json.dumps({"type": "object", "properties": properties}), "JSON")
    pipeline = write(tmp_path, registry, label="y", classes=None, key=None).pipeline
    assert pipeline.storage is None
    assert pipeline.events.label.classes == tuple(words)


def test_a_version_that_is_no_number_is_refused(tmp_path, registry):
    version = '1".\nstorage = {url = "s3://evil/x"}\ntracing = {setup = "os:abort"}\n#'
    registry.faults.status = 200
    registry.faults.body = json.dumps({"version": version, "schema": AVRO}).encode()
    with pytest.raises(RegistryError, match=f"answers with no version of {SUBJECT}"):
        write(tmp_path, registry)


def test_a_label_with_its_own_classes_needs_no_option(tmp_path, registry):
    registry.register(SUBJECT, AVRO)
    assert write(tmp_path, registry, label="is_new", classes=None).pipeline.events.label.classes == 2
    assert write(tmp_path, registry, label="country", classes=None).pipeline.events.label.classes == ("DE", "FR")
    regression = write(tmp_path, registry, label="amount", classes=None).pipeline
    assert (regression.events.label.classes, regression.model.task) == (None, "regression")
    assert write(tmp_path, registry, label="merchant", classes="a,b,c").pipeline.events.label.classes == ("a", "b", "c")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"label": None}, "name the field to predict with --label: one of amount, count, country, merchant"),
        ({"label": "frod"}, "--label frod is no field of payments-value:1, which has amount, count"),
        ({"key": "who"}, "--key who is no field of payments-value:1"),
        (
            {"classes": None},
            "--label fraud is of type union of null, int: give its classes with --classes, their number",
        ),
        ({"label": "merchant", "classes": None}, "give its classes with --classes, their names, with commas between"),
        ({"label": "tags"}, "--label tags is of type map of string, which init cannot make a label of"),
        ({"subject": "payment"}, "has no subjects/payment/versions/latest"),
    ],
)
def test_what_is_missing_is_asked_for_and_nothing_is_written(tmp_path, registry, options, sentence):
    registry.register(SUBJECT, AVRO)
    with pytest.raises(SettingsError) as raised:
        write(tmp_path, registry, **options)
    assert sentence in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_file_is_refused_by_name(tmp_path, registry):
    (tmp_path / "my_model.py").write_text("mine")
    with pytest.raises(SettingsError, match=r"my_model\.py exists already; --force overwrites it"):
        write_subject(tmp_path, SubjectOptions(SUBJECT, registry.url), {}, force=False)
    assert registry.requests == []


def test_credentials_come_from_the_environment_and_are_not_written(tmp_path, registry):
    registry.credentials = ("reader", "sesame")
    registry.register(SUBJECT, AVRO)
    names = ("ANABRANCH__STREAM__REGISTRY__USER", "ANABRANCH__STREAM__REGISTRY__PASSWORD")
    write(tmp_path, registry, dict(zip(names, ("reader", "sesame"), strict=True)))
    expected = f"Basic {base64.b64encode(b'reader:sesame').decode()}"
    assert registry.requests[0][1]["Authorization"] == expected
    assert "sesame" not in (tmp_path / "pipeline.toml").read_text()
    with pytest.raises(SettingsError, match="user and password go together"):
        write(tmp_path, registry, {names[0]: "reader"})


def test_names_of_a_registry_cannot_add_lines_to_the_file(tmp_path, registry):
    """Whoever may write a schema must not choose the pipeline's settings."""
    evil = {"name": 'x"\n[model]\nfactory = "os:system"\n#', "type": "double"}
    words = {"type": "enum", "name": "W", "symbols": ['a"]\n[gate]\n', "b"]}
    fields = [
        {"name": "amount", "type": "double"},
        evil,
        {"name": "words", "type": words},
        {"name": "y", "type": "boolean"},
    ]
    registry.register(SUBJECT, {"type": "record", "name": "E", "fields": fields})
    pipeline = write(tmp_path, registry, label="y", key=None).pipeline
    assert list(pipeline.events.features) == ["amount", "words"]
    assert pipeline.model.factory == "my_model:build"


def test_a_single_feature_is_passed_by_position(tmp_path, registry):
    registry.register(
        SUBJECT,
        {"type": "record", "name": "E", "fields": [{"name": "x", "type": "float"}, {"name": "y", "type": "boolean"}]},
    )
    args = write(tmp_path, registry, label="y", key=None).pipeline.model.args
    namespace: dict[str, Any] = {}
    exec((tmp_path / "my_model.py").read_text(), namespace)
    assert namespace["build"](**args)(torch.zeros(5)).shape == (5, 2)


def test_the_command_says_what_comes_next(tmp_path, registry, capsys):
    registry.register(SUBJECT, AVRO)
    arguments = ["init", str(tmp_path / "p"), "--subject", SUBJECT, "--registry", registry.url, "--label", "is_new"]
    assert cli.main(arguments) == 0
    assert 'set stream.bootstrap_servers, then run "anabranch doctor -c' in capsys.readouterr().out
    registry.faults.away = True
    assert cli.main([*arguments, "--force"]) == 3
    assert f"the registry at {registry.url} cannot be reached" in capsys.readouterr().err


def test_a_schema_that_cannot_be_read_is_one_sentence():
    with pytest.raises(SettingsError, match=r"^the schema 7 cannot be read: .*"):
        fields_of_subject(WriterSchema(7, "json-schema", "[]"))
    assert fields_of_subject(WriterSchema(7, "json-schema", '{"properties": {"a-b": {"type": "number"}}}')) == [
        PipelineField("a-b", may_be_missing=True, written="number", why=UNFIT_NAME)
    ]


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


def test_the_example_is_a_valid_pipeline_with_its_model_and_events(tmp_path):
    paths = write_example(tmp_path / "new" / "digits")
    assert sorted(path.name for path in (tmp_path / "new" / "digits").iterdir()) == sorted(FILES)
    assert [path.name for path in paths] == list(FILES)
    config = load_config(paths[0], {})
    assert (config.folder / f"{config.pipeline.model.factory.partition(':')[0]}.py").exists()


def test_every_event_of_the_example_can_be_used(example):
    schema = Schema(load_config(example / "pipeline.toml", {}).pipeline.events)
    lines = (example / "events.jsonl").read_bytes().splitlines()
    decoded = JsonFormat(schema).decode(lines)
    assert (len(decoded.message), list(decoded.rejects), decoded.unknown_fields) == (20, [], 0)
    assert {json.loads(line)["y"] for line in lines} == set(range(10))
    assert all(0 <= value <= 1 for line in lines for value in json.loads(line)["x"])


def test_an_existing_file_is_refused_by_name_and_nothing_is_written(tmp_path):
    (tmp_path / "my_model.py").write_text("mine")
    with pytest.raises(SettingsError, match=r"my_model\.py exists already; --force overwrites it"):
        write_example(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["my_model.py"]


def test_force_overwrites(tmp_path):
    (tmp_path / "my_model.py").write_text("mine")
    write_example(tmp_path, force=True)
    assert "nn.Module" in (tmp_path / "my_model.py").read_text()


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match=r"cannot write .*file"):
        write_example(tmp_path / "file" / "digits")


def test_the_next_commands_begin_with_entering_the_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "cd digits\n" in next_commands(tmp_path.__class__("digits"))
    assert "cd" not in next_commands(tmp_path)
