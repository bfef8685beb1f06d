"""The section `[stream.registry]`."""

import sys

import msgspec
import pytest
from pydantic import ValidationError

from anabranch.command import ConfigFile
from anabranch.commands.config import resolved_config
from anabranch.config.loader import load_config
from anabranch.core.errors import SettingsError
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats.avro import make_decoder
from anabranch.ingest.formats.avro_records.rows import AvroRowsDecoder
from anabranch.ingest.formats.registry import make_format
from anabranch.ingest.schema_registry.cache import writer_schemas
from anabranch.ingest.schema_registry.writer_schema import WriterSchema
from anabranch.ingest.settings.stream import SchemaSettings, StreamSettings
from anabranch.ingest.transport.protocol import revealed

SCHEMA = Schema(
    SchemaSettings.model_validate({"features": {"x": {"dtype": "float32"}}, "label": {"name": "y", "classes": 2}})
)
URL = "https://registry:8081"
PIPELINE = """
name = "payments"
[stream]
topics = ["payments"]
format = "avro"
[stream.registry]
{registry}
[schema.features.x]
dtype = "float32"
[schema.label]
name = "y"
classes = 2
[model]
factory = "my_model:build"
"""


def stream_of(kind="avro", **registry):
    settings = {"topics": ["payments"], "format": kind, "registry": {"url": URL, **registry}}
    return StreamSettings.model_validate(settings)


def load(folder, registry, environment=None):
    (folder / "pipeline.toml").write_text(PIPELINE.format(registry=registry))
    return load_config(folder / "pipeline.toml", environment or {})


def test_the_subject_and_the_path_of_the_authorities_follow_from_topic_and_folder(tmp_path):
    registry = load(tmp_path, f'url = "{URL}/"\nca = "ca.pem"').pipeline.stream.registry
    assert (registry.url, registry.subject, registry.ca) == (URL, "payments-value", tmp_path / "ca.pem")
    assert load(tmp_path, f'url = "{URL}"\nsubject = "s"').pipeline.stream.registry.subject == "s"


@pytest.mark.parametrize(
    ("registry", "sentence"),
    [
        ("", "stream.registry.url is missing"),
        ('url = "registry:8081"', "stream.registry.url = (hidden): write the registry's address, such as"),
        ('url = "https://a:sesame@registry"', "contains credentials; write them as user and password"),
        ('url = "https://registry/?a=b"', 'remove "?" or "#" and what follows'),
        (f'url = "{URL}"\nuser = "a"', "stream.registry: user and password go together"),
        (f'url = "{URL}"\nuser = "a"\npassword = "b"\ntoken = "c"', "set token, or user and password, not both"),
        (f'url = "{URL}"\ntoken = "sesame open"', "stream.registry.token = (hidden): write the token alone"),
        (f'url = "{URL}"\ntoken = "sesam\u00e9"', "ASCII characters without spaces"),
        (f'url = "{URL}"\ntoken = "sesame\\nopen"', "ASCII characters without spaces"),
        (f'url = "{URL}"\ntoken = ""', "ASCII characters without spaces"),
        (f'url = "{URL}"\npassword = 5\nuser = "a"', "stream.registry.password = (hidden): "),
        (f'url = "{URL}"\nsubjekt = "a"', "unknown key stream.registry.subjekt; the nearest known key is"),
    ],
)
def test_what_is_wrong_is_named_and_no_secret_printed(tmp_path, registry, sentence):
    with pytest.raises(SettingsError) as raised:
        load(tmp_path, registry)
    assert sentence in str(raised.value)
    assert "sesame" not in str(raised.value)


def test_the_newline_after_a_token_in_a_file_is_not_sent():
    registry = stream_of(token="sesame\n").registry
    assert registry is not None
    assert registry.token is not None
    assert registry.token.get_secret_value() == "sesame"


def test_the_formats_and_the_registry_need_each_other():
    with pytest.raises(ValidationError, match=r'format = "avro" reads schemas from a registry: set registry.url'):
        StreamSettings.model_validate({"topics": ["payments"], "format": "avro"})
    with pytest.raises(ValidationError, match=r'registry is for the formats "avro", .*, but format = "json"'):
        stream_of("json")


def test_secrets_reach_the_ingest_process_and_nothing_else(tmp_path):
    stream = stream_of(user="reader", password="sesame")
    assert "sesame" not in repr(stream) + stream.model_dump_json()
    passed = StreamSettings.model_validate(msgspec.json.decode(revealed(stream.resolved("test"))))
    assert passed.registry is not None
    assert passed.registry.password is not None
    assert (passed.registry.user, passed.registry.password.get_secret_value()) == ("reader", "sesame")
    load(tmp_path, f'url = "{URL}"\ntoken = "sesame"')
    assert "sesame" not in str(resolved_config(ConfigFile(tmp_path / "pipeline.toml", ())))


def test_a_variable_overrides_each_key(tmp_path):
    environment = {"ANABRANCH__STREAM__REGISTRY__TOKEN": "1e5", "ANABRANCH__STREAM__REGISTRY__FALLBACK": "true"}
    registry = load(tmp_path, f'url = "{URL}"', environment).pipeline.stream.registry
    assert (registry.token.get_secret_value(), registry.fallback) == ("1e5", True)


class TestPackagesThatAreMissing:
    def test_the_client(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "anabranch.ingest.schema_registry.client", None)
        with pytest.raises(SettingsError, match=r"stream.registry needs requests: pip install 'anabranch\[registry\]'"):
            writer_schemas(stream_of())

    @pytest.mark.parametrize("kind", ["avro", "protobuf", "json-schema"])
    def test_a_format(self, monkeypatch, kind):
        monkeypatch.setitem(sys.modules, f"anabranch.ingest.formats.{kind.replace('-', '_')}", None)
        stream = stream_of(kind).resolved("test")
        with pytest.raises(SettingsError, match=rf'stream.format = "{kind}" needs a package: pip install'):
            make_format(stream, SCHEMA, writer_schemas(stream))

    def test_the_fast_decoder_is_done_without(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "anabranch.ingest.formats.avro_records.columns", None)
        text = '{"type": "record", "name": "E", "fields": [{"name": "x", "type": "double"}]}'
        assert isinstance(make_decoder(WriterSchema(1, "avro", text), SCHEMA), AvroRowsDecoder)
