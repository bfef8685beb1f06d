"""`[stream.properties]`: librdkafka's names for either client, and a way out for each that is not taken."""

import logging
import re
import sys
from pathlib import Path

import confluent_kafka
import pytest
from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer
from pydantic import ValidationError

from anabranch.core.errors import SettingsError
from anabranch.ingest.kafka.kafka_python.connection import client_options
from anabranch.ingest.kafka.registry import CLIENTS
from anabranch.ingest.settings.kafka_properties import OF_OTHERS, PROPERTIES, REFUSED
from anabranch.ingest.settings.stream import StreamSettings

SAMPLE = {"string": "sample", "whole number": "4000", "true or false": "true"}
SPECIAL = {
    "broker.address.family": "v4",
    "client.dns.lookup": "use_all_dns_ips",
    "fetch.max.bytes": "200000",
    "fetch.wait.max.ms": "400",
    "sasl.mechanism": "PLAIN",
    "sasl.mechanisms": "PLAIN",
    "sasl.oauthbearer.method": "oidc",
    "security.protocol": "sasl_plaintext",
    "ssl.endpoint.identification.algorithm": "none",
}


def settings(client="kafka-python", **properties):
    named = {name.replace("__", "."): value for name, value in properties.items()}
    return StreamSettings.model_validate({"topics": ["events"], "client": client, "properties": named})


def sample(name):
    return SPECIAL.get(name, SAMPLE[PROPERTIES[name].kind])


@pytest.mark.parametrize("name", sorted(PROPERTIES))
def test_librdkafka_accepts_every_name(name):
    message = ""
    try:
        confluent_kafka.Consumer({"group.id": "g", name: sample(name)}, logger=logging.getLogger("unheard")).close()
    except confluent_kafka.KafkaException as exc:
        message = str(exc)  # for example a missing file
    assert "No such configuration property" not in message


@pytest.mark.parametrize("name", sorted(name for name, known in PROPERTIES.items() if known.kafka_python))
def test_kafka_python_gets_its_own_option(name):
    option = PROPERTIES[name].kafka_python
    stream = settings(**{name: sample(name)})
    assert option in KafkaConsumer.DEFAULT_CONFIG
    assert option in client_options(KafkaConsumer, stream)
    for kind in (KafkaProducer, KafkaAdminClient):
        assert client_options(kind, stream).keys() <= kind.DEFAULT_CONFIG.keys()


def test_values_are_converted_for_kafka_python():
    stream = settings(
        **{
            "security.protocol": "sasl_ssl",
            "sasl.mechanism": "plain",
            "ssl.endpoint.identification.algorithm": "none",
            "fetch.min.bytes": 10,
            "check.crcs": False,
        }
    )
    options = client_options(KafkaConsumer, stream, check_me=1)
    assert options["security_protocol"] == "SASL_SSL"
    assert options["sasl_mechanism"] == "PLAIN"
    assert options["ssl_check_hostname"] is False
    assert options["fetch_min_bytes"] == 10
    assert options["check_crcs"] is False


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_name_that_would_break_a_promise_is_refused(name):
    with pytest.raises(ValidationError, match="is not taken here: "):
        settings(**{name: "x"})
    assert name not in PROPERTIES


@pytest.mark.parametrize("name", sorted(name for name, known in PROPERTIES.items() if not known.kafka_python))
def test_a_property_that_kafka_python_does_not_support_is_named(name):
    with pytest.raises(ValidationError, match=f'kafka-python cannot do {re.escape(name)}; set stream.client = "conf'):
        settings(**{name: sample(name)})
    stream = settings("confluent", **{name: sample(name)})
    with pytest.raises(SettingsError, match=f"what writes events is kafka-python, and .* {re.escape(name)}"):
        client_options(KafkaProducer, stream)


def test_bearer_tokens_need_the_other_client():
    with pytest.raises(ValidationError, match=r"kafka-python cannot do sasl\.mechanism = OAUTHBEARER"):
        settings(sasl__mechanism="oauthbearer")


@pytest.mark.parametrize(
    ("token", "properties", "sentence"),
    [
        ("my_auth", {}, "write an import string such as"),
        ("no_such_module:token", {}, "no module named no_such_module"),
        ("os:sep", {}, "has no function or class sep"),
        ("os:getcwd", {"sasl.username": "alice"}, "take sasl.username out of properties"),
        ("os:getcwd", {"security.protocol": "SSL"}, "security.protocol is SASL_SSL"),
    ],
)
@pytest.mark.parametrize("client", ["kafka-python", "confluent"])
def test_a_token_that_cannot_be_is_refused_by_the_settings(client, token, properties, sentence):
    with pytest.raises(ValidationError, match=sentence):
        StreamSettings.model_validate({"topics": ["a"], "client": client, "token": token, "properties": properties})


def test_a_token_decides_the_mechanism_and_goes_over_tls_by_default():
    stream = StreamSettings.model_validate({"topics": ["a"], "token": "os:getcwd"})
    options = client_options(KafkaConsumer, stream)
    assert options["security_protocol"] == "SASL_SSL"
    assert options["sasl_mechanism"] == "OAUTHBEARER"


def test_no_module_makes_a_client_without_its_properties():
    """Else a command would connect without the token, or without TLS."""
    made = re.compile(r"\b(?:Kafka)?(?:AdminClient|Consumer|Producer)\((?!\*\*client_options)")
    code = {path: path.read_text(encoding="utf-8") for path in Path("ingest").rglob("*.py")}
    assert [str(path) for path, text in code.items() if made.search(text)] == []


def test_an_unknown_name_names_the_nearest():
    with pytest.raises(ValidationError, match=r"unknown property; the nearest known one is 'sasl\.password'"):
        settings(sasl__pasword="x")


@pytest.mark.parametrize(("name", "kind"), [("fetch.min.bytes", "a whole number"), ("check.crcs", "true or false")])
def test_a_value_of_the_wrong_kind_is_named_and_not_shown(name, kind):
    with pytest.raises(ValidationError, match=f"{re.escape(name)} is not {kind}"):
        settings(**{name: "x"})


def test_what_librdkafka_makes_of_a_secret_stays_secret():
    client = CLIENTS["confluent"](settings("confluent", security__protocol="hush").resolved("test"))
    with pytest.raises(SettingsError, match=r"invalid stream\.properties") as caught:
        client.open()
    assert "hush" not in str(caught.value)


def test_without_confluent_kafka_the_extra_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "anabranch.ingest.kafka.confluent.client", raising=False)
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    with pytest.raises(SettingsError, match=r"pip install 'anabranch\[fast\]'"):
        CLIENTS["confluent"](settings("confluent"))


@pytest.mark.parametrize("name", sorted(OF_OTHERS))
def test_a_name_of_java_says_what_has_its_meaning_here(name):
    with pytest.raises(ValidationError, match="is a name of Java's client: ") as raised:
        settings("confluent", **{name: "hush"})
    assert "hush" not in str(raised.value.errors()[0]["msg"])
    assert name not in {*PROPERTIES, *REFUSED}
    mine = re.findall(r"(?:ssl|sasl|socket|fetch|topic)[a-z.]+[a-z]", OF_OTHERS[name])
    assert [each for each in mine if each not in PROPERTIES and not each.startswith("sasl.oauthbearer")] == []


@pytest.mark.parametrize(
    ("name", "mine"), [("security_protocol", "security.protocol"), ("sasl_plain_username", "sasl.username")]
)
def test_a_name_of_kafka_python_says_what_has_its_meaning_here(name, mine):
    with pytest.raises(ValidationError, match=f"is a name of kafka-python: use '{re.escape(mine)}', in quotes"):
        StreamSettings.model_validate({"topics": ["events"], "properties": {name: "x"}})


@pytest.mark.parametrize("client", ["kafka-python", "confluent"])
def test_a_mechanism_that_no_client_has_is_refused_by_the_settings(client):
    with pytest.raises(ValidationError, match=r"none of PLAIN, .*; AWS_MSK_IAM is of Java's client alone"):
        settings(client, sasl__mechanism="AWS_MSK_IAM")
    with pytest.raises(ValidationError, match=r"sasl\.mechanisms is none of PLAIN"):
        settings(client, sasl__mechanisms="hush")


def test_advice_does_not_name_a_client_that_is_set():
    stream = settings("confluent", sasl__mechanism="OAUTHBEARER")
    with pytest.raises(SettingsError, match=r"sasl.mechanism = OAUTHBEARER without stream.token; the pipeline itself"):
        client_options(KafkaProducer, stream)
