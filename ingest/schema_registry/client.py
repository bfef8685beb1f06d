"""A client of a Schema Registry: Confluent's API, of which only schemas are read.

Credentials are sent to the configured host alone: answers that redirect to another one are refused.
"""

import base64
import json
import re
import ssl
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

import requests

from anabranch.core.bounded_session import BoundedSession, LateAnswerError, LongAnswerError
from anabranch.core.durations import format_duration
from anabranch.core.errors import SettingsError
from anabranch.ingest.errors import (
    MissingSchemaError,
    OversizedSchemaError,
    RegistryCertificateError,
    RegistryCredentialsError,
    RegistryError,
)
from anabranch.ingest.schema_registry.writer_schema import Reference, SchemaKind, WriterSchema
from anabranch.ingest.settings.registry import RegistrySettings

_MOST_BYTES = 4_000_000
"""Bytes of the longest answer that is read."""
_MOST_SCHEMA_BYTES = 8_000_000
"""Bytes of a schema with all that it refers to."""
_MOST_REDIRECTS = 3
_MOST_REFERENCES = 200
_KINDS: dict[str, SchemaKind] = {"AVRO": "avro", "PROTOBUF": "protobuf", "JSON": "json-schema"}
_MISSING = re.compile("404[0-9]{2}")
"""Error codes with which a registry says that it has no such schema, subject or version; 404 alone is any server's."""


class _NotFoundError(RegistryError):
    """A 404 without an error code of a registry."""


class RegistryClient:
    """Reads schemas; each method raises RegistryError where the registry gives no answer. Used by one thread."""

    def __init__(self, settings: RegistrySettings, *, are_serialized: bool = False) -> None:
        """Connect to nothing yet; with `are_serialized`, ask for Protobuf schemas as descriptors instead of text.

        Raises:
            SettingsError: the file of authorities cannot be read, or the proxy of the environment cannot be used.
        """
        self._settings = settings
        self._parameters = {"format": "serialized"} if are_serialized else {}
        self._seconds = settings.timeout.total_seconds()
        self._verify = _authorities(settings)
        self._http = BoundedSession(_MOST_BYTES)
        self._http.headers["Accept"] = "application/vnd.schemaregistry.v1+json, application/json"
        self._http.auth = _authorization(settings)
        try:
            self._http.check_proxy(settings.url)
        except ValueError as exc:
            raise SettingsError(
                "the proxy of stream.registry cannot be used: HTTPS_PROXY, HTTP_PROXY and ALL_PROXY must be "
                "http://host:port, or socks5://host:port after pip install 'requests[socks]'"
            ) from exc

    def schema(self, schema_id: int | str) -> WriterSchema:
        """Return the schema with this number, or with this GUID.

        Registries without GUIDs answer such a path with a plain 404, as any other server does: whether there is a
        registry is asked then.

        Raises:
            MissingSchemaError: the registry has none.
            OversizedSchemaError: it is too long.
        """
        path = f"/schemas/{'ids' if isinstance(schema_id, int) else 'guids'}/{schema_id}"
        try:
            answer = self._get(path, self._parameters)
        except _NotFoundError as exc:
            try:
                self._get("/schemas/types", kind=list)
            except _NotFoundError:
                raise exc from None
            raise MissingSchemaError(f"{self._named} has no {path.lstrip('/')}") from exc
        return self._writer_schema(schema_id, answer)

    def newest(self, subject: str) -> WriterSchema:
        """Return the newest schema of a subject, with `subject:version` as its id.

        Raises:
            MissingSchemaError: the registry answers that it has no such subject.
            OversizedSchemaError: its schema is too long.
        """
        answer = self._get(f"/subjects/{quote(subject, safe='')}/versions/latest", self._parameters)
        version = answer.get("version")
        if type(version) is not int:  # True is one of its subclass
            raise RegistryError(f"{self._named} answers with no version of {subject}: check stream.registry.url")
        return self._writer_schema(f"{subject}:{version}", answer)

    def subjects(self) -> list[str]:
        """Return the names of all subjects."""
        return [str(name) for name in self._get("/subjects", kind=list)]

    def close(self) -> None:
        """Disconnect."""
        self._http.close()

    def _writer_schema(self, schema_id: int | str, answer: dict[str, Any]) -> WriterSchema:
        kind = _KINDS.get(str(answer.get("schemaType") or "AVRO"))
        text = answer.get("schema")
        if kind is None or not isinstance(text, str):
            raise RegistryError(f"{self._named} answers with no schema for {schema_id}: check stream.registry.url")
        references: dict[tuple[str, str, int], Reference] = {}
        try:
            self._add_references(answer, references, {("", "", 0): len(text)})
        except (KeyError, TypeError, ValueError) as exc:
            raise RegistryError(f"{self._named} answers with references that cannot be read, for {schema_id}") from exc
        return WriterSchema(schema_id, kind, text, tuple(references.values()))

    def _add_references(
        self,
        answer: dict[str, Any],
        found: dict[tuple[str, str, int], Reference],
        begun: dict[tuple[str, str, int], int],
    ) -> None:
        """Add what a schema refers to, those that they refer to first; `begun` has the bytes of all so far."""
        for each in answer.get("references") or ():
            key = str(each["name"]), str(each["subject"]), each["version"]
            if type(key[2]) is not int:
                raise ValueError(f"the version {key[2]!r} is no number")
            if key in found or key in begun:
                continue
            if len(begun) > _MOST_REFERENCES:
                raise OversizedSchemaError(
                    f"{self._named} has a schema that refers to more than {_MOST_REFERENCES} others"
                )
            begun[key] = 0
            try:
                # A schema that was deleted is still referred to.
                path = f"/subjects/{quote(key[1], safe='')}/versions/{key[2]}"
                inner = self._get(path, {"deleted": "true", **self._parameters})
            except MissingSchemaError as exc:
                raise RegistryError(f"{self._named} lacks a schema that another one refers to: {exc}") from exc
            begun[key] = len(str(inner.get("schema")))
            if sum(begun.values()) > _MOST_SCHEMA_BYTES:
                raise OversizedSchemaError(
                    f"{self._named} has a schema that has more than {_MOST_SCHEMA_BYTES} bytes with those that it "
                    "refers to"
                )
            self._add_references(inner, found, begun)
            found[key] = Reference(key[0], str(inner.get("schema")))

    @property
    def _named(self) -> str:
        return f"the registry at {self._settings.url}"

    def _get(self, path: str, parameters: Mapping[str, str] | None = None, kind: type[Any] = dict) -> Any:
        """Return the JSON at a path, of the type `kind`."""
        try:
            status, body = self._fetch(f"{self._settings.url}{path}", parameters)
        except LateAnswerError as exc:
            within = format_duration(self._settings.timeout)
            raise RegistryError(f"{self._named} does not answer within {within} (stream.registry.timeout)") from exc
        except LongAnswerError as exc:
            is_schema = kind is dict and exc.response is not None and exc.response.status_code == 200
            error = OversizedSchemaError if is_schema else RegistryError
            raise error(f"{self._named} answers with more than {_MOST_BYTES} bytes, which are not read") from exc
        except (requests.RequestException, ValueError) as exc:
            cause = _cause(exc)
            if isinstance(cause, ssl.SSLCertVerificationError):
                why = cause.verify_message
                sentence = f"the certificate of {self._named} is not trusted ({why}): set stream.registry.ca"
                raise RegistryCertificateError(sentence) from exc
            # Not the text of `exc`, which may have a secret.
            why = (cause.strerror if isinstance(cause, OSError) else None) or type(cause).__name__
            raise RegistryError(f"{self._named} cannot be reached: {why}") from exc
        if status in (401, 403):
            sent = "credentials" if self._settings.user or self._settings.token else "a request without credentials"
            keys = "stream.registry.user and password, or token"
            raise RegistryCredentialsError(f"{self._named} refuses {sent} ({status}): check {keys}")
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError):
            answer = None
        if status == 404 and isinstance(answer, dict) and _MISSING.fullmatch(str(answer.get("error_code"))):
            raise MissingSchemaError(f"{self._named} has no {path.lstrip('/')}")
        if status != 200 or not isinstance(answer, kind):
            what = f"answers {status}" if status != 200 else "answers with something else than a schema"
            error = _NotFoundError if status == 404 else RegistryError
            raise error(f"{self._named} {what} for {path}: is stream.registry.url right?")
        return answer

    def _fetch(self, url: str, parameters: Mapping[str, str] | None) -> tuple[int, bytes]:
        """Return status and body, after redirects within the host."""
        for _ in range(_MOST_REDIRECTS + 1):
            answer = self._http.get(url, params=parameters, timeout=self._seconds, verify=self._verify)
            if not answer.is_redirect:
                return answer.status_code, answer.content
            target, parameters = urljoin(answer.url, answer.headers["Location"]), None
            if _origin(target) != _origin(url):
                where = "{}://{}:{}".format(*_origin(target))
                sentence = f"{self._named} redirects to {where}, which is not followed: is stream.registry.url right?"
                raise RegistryError(sentence)
            url = target
        raise RegistryError(f"{self._named} redirects {_MOST_REDIRECTS + 1} times")


def _authorization(settings: RegistrySettings) -> Callable[[requests.PreparedRequest], requests.PreparedRequest]:
    """Return what adds the credentials to a request, in place of those that a `.netrc` may have for the host."""
    value = None
    if settings.token is not None:
        value = f"Bearer {settings.token.get_secret_value()}"
    elif settings.user is not None and settings.password is not None:
        pair = f"{settings.user}:{settings.password.get_secret_value()}"
        value = f"Basic {base64.b64encode(pair.encode()).decode()}"

    def authorized(request: requests.PreparedRequest) -> requests.PreparedRequest:
        if value is not None:
            request.prepare_headers({**request.headers, "Authorization": value})  # which refuses what is no header
        return request

    return authorized


def _authorities(settings: RegistrySettings) -> str | bool:
    if settings.ca is None:
        return True
    try:
        ssl.create_default_context(cafile=settings.ca)
    except OSError as exc:  # ssl.SSLError is one too
        raise SettingsError(f"stream.registry.ca = {settings.ca} cannot be read as PEM: {exc.strerror or exc}") from exc
    return str(settings.ca)


def _origin(url: str) -> tuple[str, str, int]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


def _cause(exc: BaseException) -> BaseException:
    """Return the first error, of which others were made."""
    while (before := exc.__cause__ or exc.__context__) is not None:
        exc = before
    return exc
