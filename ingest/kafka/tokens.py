"""Tokens for SASL/OAUTHBEARER (RFC 7628), and the functions that get those of three clouds. Imports no Kafka client.

The function that `stream.token` names is called with `stream.bootstrap_servers`. It returns a token and how long that
is valid, in seconds or as a timedelta, and if need be a third value: SASL extensions, a dict of texts.
"""

import base64
import functools
import json
import logging
import os
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, timedelta
from typing import Any

from anabranch.core.errors import AnabranchError
from anabranch.core.extras import needs
from anabranch.core.users_code import imported, in_one_line
from anabranch.ingest.errors import CredentialsError
from anabranch.ingest.settings.stream import StreamSettings

_PATIENCE_SECONDS = 10.0
"""How long to wait for the function; then it is called again, by another thread."""
_PAUSE_SECONDS = 1.0
"""Between two calls, where the first fails."""
_MOST_CALLS = 4
"""That may be under way at once, where none returns."""
_FRESH = 0.75
"""The part of a token's time after which the next one is asked for: before librdkafka asks, at 0.8."""
_LAST_SECONDS = 0.2
"""Before its end, in which a token is no longer sent."""
_LONGEST = timedelta(days=366)

log = logging.getLogger(__name__)

Answer = tuple[str, float | timedelta]
"""What a function of `stream.token` returns, here without extensions."""


@dataclass(frozen=True)
class Token:
    """A token, which is secret, and its extensions; `due` and `end` are in seconds since 1970."""

    value: str = field(repr=False)
    extensions: Mapping[str, str]
    due: float
    end: float


class TokenSource:
    """Returns valid tokens, whatever the function that gets them does. Used by any thread.

    The function runs in a separate thread. It is called again once three quarters of a token's time are over. While
    it fails or takes long, the old token is returned until its end.
    """

    def __init__(self, reference: str, servers: str) -> None:
        """`reference` is the import string of a function, `servers` what it is called with."""
        self._function = imported(reference)
        self._name = f'stream.token = "{reference}"'
        self._servers = servers
        self._changed = threading.Condition()
        self._token: Token | None = None
        self._calls = set[object]()
        """Those under way, the last one or older ones too."""
        self._last = object()
        self._called = -_PATIENCE_SECONDS
        self.problem = ""
        """One sentence on why there is no new token; empty after one."""

    def token(self) -> Token:
        """Return a valid token; waits up to ten seconds for a call. Raises CredentialsError with the problem."""
        with self._changed:
            if self._token is None or time.time() >= self._token.due or not self._is_valid():
                self._call()
            if not self._changed.wait_for(self._is_answered, self._called + _PATIENCE_SECONDS - time.monotonic()):
                self._report(f"{self._name} has not returned a token within {_PATIENCE_SECONDS:.0f} s")
            if not self._is_valid():
                raise CredentialsError(self.problem or f"{self._name} returns tokens that end at once")
            assert self._token is not None
            return self._token

    def _is_valid(self) -> bool:
        return self._token is not None and time.time() < self._token.end - _LAST_SECONDS

    def _is_answered(self) -> bool:
        return self._is_valid() or self._last not in self._calls

    def _call(self) -> None:
        now = time.monotonic()
        pause = _PATIENCE_SECONDS if self._last in self._calls else _PAUSE_SECONDS if self.problem else 0.0
        if now >= self._called + pause and len(self._calls) < _MOST_CALLS:
            self._called, self._last = now, object()
            self._calls.add(self._last)
            threading.Thread(target=self._run, args=(self._last,), name="token", daemon=True).start()

    def _run(self, call: object) -> None:
        token, problem = None, ""
        try:
            token = _checked(self._function(self._servers))
        except _NonsenseError as exc:
            problem = f"{self._name} returns {exc}"
        except AnabranchError as exc:
            problem = f"{self._name}: {exc}"
        except BaseException as exc:  # noqa: BLE001 the user's own code may raise anything, and a panic of Rust is no Exception
            problem = f"{self._name} fails: {in_one_line(exc)}"
        with self._changed:
            self._calls.discard(call)
            self._token = token or self._token
            self._report(problem)
            self._changed.notify_all()

    def _report(self, problem: str) -> None:
        """Log a problem once, and its end."""
        if problem and problem != self.problem:
            log.warning("%s", problem)
        elif self.problem and not problem:
            log.info("%s returns tokens again", self._name)
        self.problem = problem


class _NonsenseError(ValueError):
    """What a function returns is no token; the sentence goes on after "returns" and does not have the token."""


def _checked(answer: Any) -> Token:
    """Return the token that a function has returned; raises _NonsenseError."""
    if not isinstance(answer, tuple) or len(answer) not in (2, 3):
        raise _NonsenseError(f"a {type(answer).__name__}, not a tuple of a token and the seconds that it is valid")
    value, valid, extensions = answer if len(answer) == 3 else (*answer, {})
    seconds = valid.total_seconds() if isinstance(valid, timedelta) else valid
    if not isinstance(value, str) or not re.fullmatch("[!-~]+", value):
        kind = "a text of other than visible ASCII characters" if isinstance(value, str) else type(value).__name__
        raise _NonsenseError(f"{kind} as token")
    if not isinstance(seconds, int | float):
        raise _NonsenseError(f"{type(seconds).__name__} as the seconds that its token is valid")
    if not 0 < seconds <= _LONGEST.total_seconds():
        raise _NonsenseError(f"{seconds} as the seconds from now on that its token is valid")
    if not isinstance(extensions, Mapping) or not all(isinstance(each, str) for each in sum(extensions.items(), ())):
        raise _NonsenseError("extensions that are no dict of texts")
    now = time.time()
    return Token(value, extensions, now + _FRESH * seconds, now + seconds)


@functools.cache
def _source(reference: str, servers: str) -> TokenSource:
    return TokenSource(reference, servers)


def token_source(settings: StreamSettings) -> TokenSource | None:
    """Return what has the tokens for all clients of this process; None without `stream.token`."""
    return None if settings.token is None else _source(settings.token, settings.bootstrap_servers)


def _hosts(servers: str) -> list[str]:
    return [server.strip().rpartition(":")[0] for server in servers.split(",")]


def msk(servers: str) -> Answer:
    """Return a token of Amazon MSK by IAM, for the identity of AWS's usual chain of credentials.

    The region is that of the brokers' names, `*.kafka.REGION.amazonaws.com`, else that of `AWS_REGION`.
    """
    with needs("a token of Amazon MSK", "aws-msk-iam-sasl-signer-python", "msk"):
        from aws_msk_iam_sasl_signer import MSKAuthTokenProvider
    named = re.search(r"\.kafka(?:-serverless)?\.([a-z0-9-]+)\.amazonaws\.com", _hosts(servers)[0])
    region = named[1] if named else os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if not region:
        raise ValueError(f"{servers} does not name a region: set AWS_REGION")
    token, end_ms = MSKAuthTokenProvider.generate_auth_token(region)
    return token, end_ms / 1000 - time.time()


@functools.cache
def _google() -> Any:
    with needs("a token of Google Cloud", "google-auth", "gcp"):
        import google.auth
    return google.auth.default(scopes=["https://www.googleapis.com/auth/cloud-platform"])[0]


def gcp(_: str) -> Answer:
    """Return a token of Google's Managed Service for Apache Kafka, for the application default credentials.

    The form of the token is that of Google's own client: github.com/googleapis/managedkafka.
    """
    with needs("a token of Google Cloud", "google-auth and urllib3", "gcp"):
        import urllib3
        from google.auth.transport.urllib3 import Request
    credentials = _google()
    request: Any = Request
    credentials.refresh(request(urllib3.PoolManager(timeout=_PATIENCE_SECONDS)))
    account = getattr(credentials, "service_account_email", None)
    if account is None:
        raise ValueError("the application default credentials are not those of a service account")
    end = credentials.expiry.replace(tzinfo=UTC).timestamp()
    claims = {"exp": end, "iat": time.time(), "iss": "Google", "scope": "kafka", "sub": account}
    parts = (json.dumps({"typ": "JWT", "alg": "GOOG_OAUTH2_TOKEN"}), json.dumps(claims), credentials.token)
    encoded = (base64.urlsafe_b64encode(part.encode()).decode().rstrip("=") for part in parts)
    return ".".join(encoded), end - time.time()


@functools.cache
def _azure() -> Any:
    with needs("a token of Azure", "azure-identity", "azure"):
        from azure.identity import DefaultAzureCredential
    return DefaultAzureCredential()


def azure(servers: str) -> Answer:
    """Return a token of Azure Event Hubs, for the identity of Azure's default chain of credentials.

    Its scope is the namespace of the first server, `NAMESPACE.servicebus.windows.net:9093`.
    """
    found = _azure().get_token(f"https://{_hosts(servers)[0]}/.default")
    return found.token, found.expires_on - time.time()
