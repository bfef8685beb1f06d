"""`anabranch init --subject`: a pipeline that fits a subject of a registry."""

import base64
import importlib.util
import json
from typing import Any

import pytest
import torch

from anabranch import cli
from anabranch.commands.init.files import UNFIT_NAME, PipelineField
from anabranch.commands.init.subject import SubjectOptions, write_subject
from anabranch.commands.init.subject_fields import fields_of_subject
from anabranch.config.loader import load_config
from anabranch.core.errors import SettingsError
from anabranch.ingest.errors import RegistryError
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats.registry import make_decoder
from anabranch.ingest.schema_registry.client import RegistryClient
from anabranch.ingest.schema_registry.writer_schema import WriterSchema

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
