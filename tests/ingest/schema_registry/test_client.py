"""The client against a real HTTP server that speaks the API of a Schema Registry."""

import base64
import sys
import uuid

import pytest
from pydantic import SecretStr

from anabranch.core.errors import SettingsError
from anabranch.ingest.errors import (
    MissingSchemaError,
    OversizedSchemaError,
    RegistryCertificateError,
    RegistryCredentialsError,
    RegistryError,
)
from anabranch.ingest.schema_registry.client import RegistryClient
from anabranch.ingest.schema_registry.writer_schema import Reference, WriterSchema
from anabranch.ingest.settings.registry import RegistrySettings
from tests.support.registry_server import registry_server

RECORD = {"type": "record", "name": "Payment", "fields": [{"name": "amount", "type": "double"}]}
TEXT = '{"type": "record", "name": "Payment", "fields": [{"name": "amount", "type": "double"}]}'


def client_of(registry, **settings):
    return RegistryClient(RegistrySettings.model_validate({"url": registry.url, "timeout": "5s", **settings}))


class TestSchemas:
    def test_a_schema_is_found_by_number_by_guid_and_as_the_newest_of_its_subject(self, registry):
        registry.register("payments-value", "{}")
        number = registry.register("payments-value", RECORD)
        client = client_of(registry)
        assert client.schema(number) == WriterSchema(number, "avro", TEXT)
        assert client.schema(registry.guid(number)) == WriterSchema(registry.guid(number), "avro", TEXT)
        assert client.newest("payments-value") == WriterSchema("payments-value:2", "avro", TEXT)
        client.close()

    def test_the_kind_is_that_of_the_registry(self, registry):
        numbers = [registry.register("a", "{}", kind) for kind in ("AVRO", "PROTOBUF", "JSON")]
        client = client_of(registry)
        assert [client.schema(number).kind for number in numbers] == ["avro", "protobuf", "json-schema"]
        client.close()

    def test_references_come_after_those_that_they_need_and_once_each(self, registry):
        registry.register("money", "money")
        registry.register("person", "person", references=[{"name": "money.proto", "subject": "money", "version": 1}])
        number = registry.register(
            "payment",
            "payment",
            "PROTOBUF",
            [
                {"name": "person.proto", "subject": "person", "version": 1},
                {"name": "money.proto", "subject": "money", "version": 1},
            ],
        )
        client = client_of(registry)
        assert client.schema(number).references == (
            Reference("money.proto", "money"),
            Reference("person.proto", "person"),
        )
        assert len(registry.requests) == 3
        client.close()

    def test_references_in_a_circle_end(self, registry):
        registry.register("a", "a", references=[{"name": "b", "subject": "b", "version": 1}])
        number = registry.register("b", "b", references=[{"name": "a", "subject": "a", "version": 1}])
        client = client_of(registry)
        assert {reference.name for reference in client.schema(number).references} == {"a", "b"}
        client.close()

    def test_one_that_is_too_long_with_its_references_is_none_that_is_read(self, registry):
        registry.register("a", "a" * 3_000_000)
        registry.register("b", "b" * 3_000_000)
        references = [{"name": name, "subject": name, "version": 1} for name in "ab"]
        fits = registry.register("c", "c" * 1_000_000, references=references)
        large = registry.register("c", "c" * 3_000_000, references=references)
        client = client_of(registry)
        assert client.schema(fits).size == 7_000_000
        with pytest.raises(OversizedSchemaError, match="more than 8000000 bytes with those that it refers to"):
            client.schema(large)
        client.close()

    @pytest.mark.parametrize("version", ["1e999", '"1"', "true", "null", "[]"])
    def test_references_that_cannot_be_read_are_no_answer(self, registry, version):
        registry.register("a", RECORD)
        references = f'[{{"name": "a", "subject": "b", "version": {version}}}]'
        registry.faults.body = f'{{"schema": "{{}}", "references": {references}}}'.encode()
        client = client_of(registry)
        with pytest.raises(RegistryError, match="answers with references that cannot be read, for 1"):
            client.schema(1)
        client.close()

    def test_the_name_of_a_subject_may_hold_any_character(self, registry):
        registry.register("a/b c?d", RECORD)
        client = client_of(registry)
        assert client.newest("a/b c?d").text == TEXT
        client.close()

    def test_protobuf_schemas_are_asked_for_as_descriptors(self, registry):
        number = registry.register("a", "{}", "PROTOBUF")
        client = RegistryClient(RegistrySettings(url=registry.url), are_serialized=True)
        client.schema(number)
        client.newest("a")
        assert [path.partition("?")[2] for path, _ in registry.requests] == ["format=serialized"] * 2
        client.close()


class TestWhatARegistryLacks:
    def test_is_named(self, registry):
        client = client_of(registry)
        with pytest.raises(MissingSchemaError, match=f"the registry at {registry.url} has no schemas/ids/99$"):
            client.schema(99)
        with pytest.raises(MissingSchemaError, match="has no schemas/guids/"):
            client.schema(str(uuid.uuid4()))
        with pytest.raises(MissingSchemaError, match="has no subjects/payments-value/versions/latest"):
            client.newest("payments-value")
        client.close()

    def test_is_named_where_the_registry_has_no_guids(self, registry):
        registry.has_guids = False
        client = client_of(registry)
        with pytest.raises(MissingSchemaError, match=f"the registry at {registry.url} has no schemas/guids/"):
            client.schema(str(uuid.uuid4()))
        client.close()

    def test_a_404_of_another_server_or_path_is_no_answer_of_a_registry(self, registry):
        """A proxy that answers so while the registry is away must not make dead letters."""
        client = client_of(registry, url=f"{registry.url}/wrong")
        with pytest.raises(RegistryError, match=r"answers 404 for /schemas/ids/1.*: is stream.registry.url right"):
            client.schema(1)
        client.close()
        registry.faults.status, registry.faults.body = 404, b"<html>not found</html>"
        client = client_of(registry)
        with pytest.raises(RegistryError, match="answers 404"):
            client.schema(1)
        client.close()

    def test_a_schema_that_refers_to_a_missing_one_is_no_missing_schema(self, registry):
        number = registry.register("a", "a", references=[{"name": "b", "subject": "b", "version": 1}])
        client = client_of(registry)
        with pytest.raises(RegistryError, match="lacks a schema that another one refers to"):
            client.schema(number)
        client.close()


class TestARegistryThatGivesNoAnswer:
    @pytest.mark.parametrize(
        ("fault", "sentence"),
        [
            ({"away": True}, "cannot be reached"),
            ({"status": 500}, "answers 500 for /schemas/ids/1"),
            ({"status": 503}, "answers 503"),
            ({"body": b"<html>"}, "answers with something else than a schema"),
            ({"body": b"[]"}, "answers with something else than a schema"),
            ({"body": b"{}"}, "answers with no schema for 1"),
            ({"body": b'{"schema": "", "schemaType": "THRIFT"}'}, "answers with no schema for 1"),
            ({"body": b'{"schema": "", "references": [{"name": "a"}]}'}, "references that cannot be read"),
            ({"body": b'{"schema": "", "references": 7}'}, "references that cannot be read"),
            ({"body": b"[" * 100_000}, "answers with something else than a schema"),
            ({"body_bytes": 5_000_000, "status": 502}, "answers with more than 4000000 bytes"),
        ],
    )
    def test_is_an_error_with_one_sentence(self, registry, fault, sentence):
        registry.register("a", RECORD)
        for name, value in fault.items():
            setattr(registry.faults, name, value)
        client = client_of(registry)
        with pytest.raises(RegistryError, match=sentence) as raised:
            client.schema(1)
        assert "\n" not in str(raised.value)
        assert registry.url in str(raised.value)
        client.close()

    def test_one_that_is_slow_is_waited_for_only_as_long_as_configured(self, registry):
        registry.faults.seconds = 60
        client = client_of(registry, timeout="100ms")
        with pytest.raises(RegistryError, match=r"does not answer within 100ms \(stream.registry.timeout\)"):
            client.schema(1)
        client.close()

    @pytest.mark.parametrize(
        ("interim", "sentence"),
        [
            (b"HTTP/1.1 100 Continue\r\n\r\n", r"does not answer within 100ms \(stream.registry.timeout\)"),
            (b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n", "answers 103"),
        ],
    )
    def test_one_that_sends_interim_responses_without_end_is_waited_for_no_longer(self, registry, interim, sentence):
        client = client_of(registry, timeout="100ms")
        registry.register("a", RECORD)
        client.schema(1)  # the connection is open when the endless answer comes
        registry.faults.interim = interim
        with pytest.raises(RegistryError, match=sentence):
            client.schema(1)
        registry.faults.interim = b""
        assert client.schema(1).text == TEXT
        client.close()

    def test_nothing_that_listens_is_named(self):
        with registry_server() as gone:
            pass
        client = client_of(gone)
        with pytest.raises(RegistryError, match=f"the registry at {gone.url} cannot be reached"):
            client.schema(1)
        client.close()


class TestCredentials:
    def test_user_and_password_are_sent(self, registry):
        registry.credentials = ("reader", "sesame")
        registry.register("a", RECORD)
        client = client_of(registry, user="reader", password="sesame")
        assert client.schema(1).text == TEXT
        client.close()

    def test_a_token_is_sent(self, registry):
        registry.token = "t0ken"
        registry.register("a", RECORD)
        client = client_of(registry, token="t0ken")
        assert client.schema(1).text == TEXT
        client.close()

    @pytest.mark.parametrize(
        ("settings", "refused"),
        [
            ({}, "refuses a request without credentials"),
            ({"user": "reader", "password": "wr0ng"}, "refuses credentials"),
            ({"token": "wr0ng"}, "refuses credentials"),
        ],
    )
    def test_a_refusal_names_the_keys_and_no_secret(self, registry, settings, refused):
        registry.credentials = ("reader", "sesame")
        client = client_of(registry, **settings)
        with pytest.raises(RegistryCredentialsError, match=rf"{refused} \(401\): check stream.registry.user") as raised:
            client.schema(1)
        assert "wr0ng" not in str(raised.value)
        client.close()

    def test_a_header_that_cannot_be_sent_is_not_printed(self, registry):
        settings = RegistrySettings(url=registry.url)
        settings = settings.model_copy(update={"token": SecretStr("sesame\n")})  # the settings refuse it
        client = RegistryClient(settings)
        with pytest.raises(RegistryError, match="cannot be reached: InvalidHeader") as raised:
            client.schema(1)
        assert "sesame" not in str(raised.value)
        client.close()

    @pytest.mark.parametrize("settings", [{"user": "reader", "password": "sesame"}, {"token": "t0ken"}])
    def test_another_host_is_never_asked_whatever_the_registry_answers(self, registry, settings):
        with registry_server() as other:
            registry.faults.redirect = other.url
            client = client_of(registry, **settings)
            with pytest.raises(RegistryError, match=f"redirects to {other.url}, which is not followed"):
                client.schema(1)
            client.close()
            assert other.requests == []

    def test_a_redirect_within_the_host_is_followed(self, registry):
        registry.credentials = ("reader", "sesame")
        registry.faults.redirect = "/loop"
        client = client_of(registry, user="reader", password="sesame")
        with pytest.raises(RegistryError, match="redirects 4 times"):
            client.schema(1)
        assert len(registry.requests) == 4
        expected = f"Basic {base64.b64encode(b'reader:sesame').decode()}"
        assert {headers["Authorization"] for _, headers in registry.requests} == {expected}
        client.close()


@pytest.mark.parametrize("proxy", ["socks5://proxy:1080", "tin://proxy:1", "http://u:sesame@proxy:x"])
def test_a_proxy_that_cannot_be_used_is_named(registry, monkeypatch, proxy):
    monkeypatch.setitem(sys.modules, "socksio", None)
    monkeypatch.setenv("ALL_PROXY", proxy)
    with pytest.raises(SettingsError, match=r"the proxy of stream.registry cannot be used: HTTPS_PROXY") as raised:
        client_of(registry)
    assert "sesame" not in str(raised.value)


class TestTls:
    def test_the_authorities_of_ca_are_trusted(self, certificate):
        paths = certificate(days=30)
        with registry_server(paths) as registry:
            registry.register("a", RECORD)
            client = client_of(registry, ca=paths[0])
            assert client.schema(1).text == TEXT
            client.close()

    def test_a_certificate_of_an_unknown_authority_is_named(self, certificate):
        with registry_server(certificate(days=30)) as registry:
            client = client_of(registry)
            with pytest.raises(RegistryCertificateError, match=r"is not trusted \(.*\): set stream.registry.ca"):
                client.schema(1)
            client.close()

    def test_a_file_of_authorities_that_cannot_be_read_is_named(self, registry, tmp_path):
        with pytest.raises(SettingsError, match=r"stream.registry.ca = .*none.pem cannot be read as PEM: No such file"):
            client_of(registry, ca=tmp_path / "none.pem")
        (tmp_path / "empty.pem").write_text("no certificate")
        with pytest.raises(SettingsError, match=r"empty.pem cannot be read as PEM"):
            client_of(registry, ca=tmp_path / "empty.pem")
