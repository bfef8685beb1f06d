"""Tokens of `stream.token`: asked for in time, whatever the function does, and never shown."""

import itertools
import logging
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from types import ModuleType, SimpleNamespace

import pytest

from anabranch.ingest.errors import CredentialsError
from anabranch.ingest.kafka import tokens
from anabranch.ingest.kafka.tokens import TokenSource
from tests.support.waiting import wait_until

SECRET = "eyJhbGciOiJub25lIn0.c2VjcmV0."


class Clock:
    """Time that a test moves on, both of the day and since the start."""

    def __init__(self):
        self.now = 1_800_000_000.0

    def time(self):
        return self.now

    monotonic = time


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(tokens, "time", found)
    return found


@pytest.fixture
def source(monkeypatch):
    """Makes a source with a function."""

    def make(function):
        module = ModuleType("issuer_of_a_test")
        module.token = function
        monkeypatch.setitem(sys.modules, "issuer_of_a_test", module)
        return TokenSource("issuer_of_a_test:token", "broker:9092")

    return make


def settle(found):
    """Wait until no call is under way."""
    wait_until(lambda: not found._calls)


def test_a_token_is_shared_until_three_quarters_of_its_time_and_then_replaced(source, clock):
    numbers = itertools.count()
    found = source(lambda servers: (f"{servers}-{next(numbers)}", timedelta(seconds=100)))
    assert {found.token().value for _ in range(5)} == {"broker:9092-0"}
    clock.now += 74
    assert found.token().value == "broker:9092-0"
    clock.now += 2
    found.token()  # the old one is returned while the next one is asked for
    settle(found)
    assert found.token().value == "broker:9092-1"
    clock.now += 1000
    assert found.token().value == "broker:9092-2"


def test_a_function_that_fails_is_called_once_a_second_and_the_old_token_is_taken_until_its_end(source, clock, caplog):
    calls = []

    def function(_):
        calls.append(clock.now)
        if len(calls) in (2, 3):
            raise OSError("the issuer is away")
        return SECRET, 100, {"logicalCluster": "lkc-1"}

    caplog.set_level(logging.INFO)
    found = source(function)
    assert found.token().extensions == {"logicalCluster": "lkc-1"}
    clock.now += 80
    for _ in range(10):
        assert found.token().value == SECRET
        settle(found)
    assert len(calls) == 2
    assert found.problem.startswith('stream.token = "issuer_of_a_test:token" fails: OSError: the issuer is away')
    clock.now += 20
    with pytest.raises(CredentialsError, match="the issuer is away"):
        found.token()
    clock.now += 1.5
    assert found.token().value == SECRET
    assert found.problem == ""
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_a_function_that_does_not_return_is_waited_for_ten_seconds_and_called_again_by_few_threads(source, monkeypatch):
    monkeypatch.setattr(tokens, "_PATIENCE_SECONDS", 0.05)
    ended, calls = threading.Event(), []

    def function(_):
        calls.append(threading.current_thread())
        ended.wait(100)
        return SECRET, 100

    found = source(function)

    def is_at_most():
        with pytest.raises(CredentialsError, match="has not returned a token within"):
            found.token()
        return len(calls) == tokens._MOST_CALLS

    try:
        wait_until(is_at_most)
        with pytest.raises(CredentialsError, match="has not returned a token within"):
            found.token()
        assert len(calls) == tokens._MOST_CALLS
    finally:
        ended.set()
    wait_until(lambda: found._is_valid())
    assert found.token().value == SECRET
    for thread in calls:
        thread.join(100)


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (None, "returns a NoneType, not a tuple of a token and the seconds"),
        (SECRET, "returns a str, not a tuple"),
        ((SECRET,), "returns a tuple, not a tuple of a token and"),
        ((SECRET.encode(), 100), "returns bytes as token"),
        ((f"{SECRET}\x01auth=", 100), "returns a text of other than visible ASCII characters as token"),
        (("", 100), "returns a text of other than visible"),
        ((100, SECRET), "returns int as token"),
        ((SECRET, SECRET), "returns str as the seconds that its token is valid"),
        ((SECRET, -1), "returns -1 as the seconds from now on"),
        ((SECRET, float("nan")), "returns nan as the seconds"),
        ((SECRET, 1_800_000_000), "returns 1800000000 as the seconds from now on"),
        ((SECRET, 0.1), "returns tokens that end at once"),
        ((SECRET, 100, SECRET), "extensions that are no dict of texts"),
        ((SECRET, 100, {"a": 1}), "extensions that are no dict of texts"),
    ],
)
def test_an_answer_that_is_no_token_is_named_and_not_shown(source, caplog, answer, sentence):
    with pytest.raises(CredentialsError, match=sentence) as caught:
        source(lambda _: answer).token()
    assert "c2Vjc" not in str(caught.value) + caplog.text


@pytest.mark.parametrize("error", [SystemExit(3), BaseException(), ValueError("a\nb"), RecursionError()])
def test_whatever_a_function_raises_is_one_sentence(source, error):
    def function(_):
        raise error

    with pytest.raises(CredentialsError, match=f"fails: {type(error).__name__}") as caught:
        source(function).token()
    assert "\n" not in str(caught.value)


def test_a_token_is_not_in_its_representation(source):
    assert "c2Vjc" not in repr(source(lambda _: (SECRET, 100)).token())


def module(monkeypatch, name, **members):
    """Install a module that a test has made, and those above it."""
    path, _, leaf = name.rpartition(".")
    made = ModuleType(name)
    vars(made).update(members)
    monkeypatch.setitem(sys.modules, name, made)
    if path and path not in sys.modules:
        module(monkeypatch, path)
    if path:
        monkeypatch.setattr(sys.modules[path], leaf, made, raising=False)


@pytest.mark.parametrize(
    ("servers", "variable", "region"),
    [
        ("b-1.demo.ab12.c2.kafka.eu-west-1.amazonaws.com:9098,b-2:9098", "us-east-1", "eu-west-1"),
        ("boot-x.c1.kafka-serverless.us-east-2.amazonaws.com:9098", "", "us-east-2"),
        ("kafka.internal:9098", "us-east-1", "us-east-1"),
    ],
)
def test_amazon_signs_for_the_region_of_the_brokers(monkeypatch, servers, variable, region):
    pytest.importorskip("aws_msk_iam_sasl_signer")  # it signs without a network
    for name, value in {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": variable}.items():
        monkeypatch.setenv(name, value)
    token, seconds = tokens.msk(servers)
    signed = tokens.base64.urlsafe_b64decode(token + "==").decode()
    assert signed.startswith(f"https://kafka.{region}.amazonaws.com/?Action=kafka-cluster%3AConnect")
    assert 800 < seconds <= 900


def test_amazon_needs_a_region(monkeypatch):
    module(monkeypatch, "aws_msk_iam_sasl_signer", MSKAuthTokenProvider=None)
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="kafka:9098 does not name a region: set AWS_REGION"):
        tokens.msk("kafka:9098")


def test_google_gets_its_own_form_of_an_access_token(monkeypatch):
    end = datetime.now(UTC).replace(tzinfo=None) + timedelta(minutes=30)
    asked = []
    credentials = SimpleNamespace(token=None, expiry=None, service_account_email="learner@demo.iam")

    def refresh(request):
        asked.append(request)
        credentials.token, credentials.expiry = "ya29.secret", end

    credentials.refresh = refresh
    module(monkeypatch, "google.auth", default=lambda scopes: asked.append(scopes) or (credentials, "demo"))
    module(monkeypatch, "google.auth.transport.urllib3", Request=lambda pool: pool)
    tokens._google.cache_clear()
    try:
        token, seconds = tokens.gcp("bootstrap.demo.europe-west1.managedkafka.demo.cloud.goog:9092")
    finally:
        tokens._google.cache_clear()
    header, claims, access = (tokens.base64.urlsafe_b64decode(part + "==").decode() for part in token.split("."))
    assert tokens.json.loads(header)["alg"] == "GOOG_OAUTH2_TOKEN"
    assert access == "ya29.secret"
    claims = tokens.json.loads(claims)
    assert (claims["iss"], claims["sub"]) == ("Google", "learner@demo.iam")
    assert claims["exp"] == pytest.approx(end.replace(tzinfo=UTC).timestamp())
    assert 1000 < seconds <= 1800
    assert asked[0] == ["https://www.googleapis.com/auth/cloud-platform"]


def test_azure_asks_for_the_scope_of_the_namespace(monkeypatch):
    scopes = []

    class DefaultAzureCredential:
        def get_token(self, scope):
            scopes.append(scope)
            return SimpleNamespace(token="secret", expires_on=int(time.time()) + 3600)

    module(monkeypatch, "azure.identity", DefaultAzureCredential=DefaultAzureCredential)
    tokens._azure.cache_clear()
    try:
        token, seconds = tokens.azure("demo.servicebus.windows.net:9093")
    finally:
        tokens._azure.cache_clear()
    assert (token, scopes) == ("secret", ["https://demo.servicebus.windows.net/.default"])
    assert 3000 < seconds <= 3600


@pytest.mark.parametrize(
    ("cloud", "package"), [("msk", "aws_msk_iam_sasl_signer"), ("gcp", "google.auth"), ("azure", "azure.identity")]
)
def test_a_cloud_whose_package_is_missing_names_the_extra(monkeypatch, cloud, package):
    monkeypatch.setitem(sys.modules, package, None)
    if cloud == "gcp":
        monkeypatch.setitem(sys.modules, "google.auth.transport.urllib3", None)
    for cached in (tokens._google, tokens._azure):
        cached.cache_clear()
    found = TokenSource(f"anabranch.ingest.kafka.tokens:{cloud}", "demo.kafka.eu-west-1.amazonaws.com:9098")
    with pytest.raises(CredentialsError, match=rf"pip install 'anabranch\[{cloud}\]'$"):
        found.token()
