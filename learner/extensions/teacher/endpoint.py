"""A teacher behind the Open Inference Protocol v2: asks a server over HTTP.

What it answers is untrusted: bytes, time, shapes and values are bounded, redirects are not followed, and the token is
sent to the configured server alone. Texts of it are shortened, and have no control characters.

Legend: N new events of a batch.
"""

import contextlib
import http.client
import itertools
import logging
import socket
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from anabranch.core.backoff import Backoff
from anabranch.core.durations import format_duration
from anabranch.core.errors import SettingsError
from anabranch.core.socket_deadline import SocketDeadline
from anabranch.ingest.events.block import Array
from anabranch.ingest.events.schema import Feature
from anabranch.learner.errors import TeacherError
from anabranch.learner.extensions.teacher.extension import Teacher, without_unusable
from anabranch.learner.extensions.teacher.messages import (
    HEADER_LENGTH,
    MessageError,
    ModelMetadata,
    error_in,
    fitting,
    read_extensions,
    read_metadata,
    read_output,
    write_request,
)
from anabranch.learner.model.task import Classification, MultiLabel, Task, TokenClassification
from anabranch.learner.settings.model import TeacherSettings

_THREADS = 4
_FIRST_RETRY, _LONGEST_RETRY = timedelta(milliseconds=50), timedelta(seconds=1)
_PIECE_BYTES = 65536
_MOST_OTHER_BYTES = 262_144
"""Bytes of an answer besides its numbers."""
_BYTES_OF_NUMBER = 32
"""Of one number in JSON, at most."""
_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
_SMALLEST = 1e-7
"""Probabilities are not taken as less: their logits are finite."""
_SOON, _LATE = 1 / 8, 1 / 2
"""Parts of the timeout: what is answered sooner than the first may be twice as much, and than the second not more."""
_SUM_TOLERANCE = 0.02
"""By how much the probabilities of an event may miss 1 in sum, as those in half precision do."""


_Part = tuple[NDArray[np.float32], str | None]
"""The outputs for some events, NaN for those whose values the server cannot take, and a clause on one of these."""

log = logging.getLogger(__name__)


class _RetriableError(Exception):
    """A request failed in a way that may pass."""


class _Connection(http.client.HTTPConnection):
    """A connection whose exchanges have a deadline, from the moment when it is open: before TLS begins."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """As http.client's."""
        super().__init__(*args, **options)
        self.deadline = SocketDeadline()

    @override
    def connect(self) -> None:
        super().connect()
        self.deadline.watch(self.sock)

    def end(self) -> None:
        """Close it permanently: `close` is also called while an answer without a length is read."""
        self.close()
        self.deadline.close()


class _TLSConnection(http.client.HTTPSConnection, _Connection):
    """The same with TLS, whose class connects by the one after it here."""


class EndpointTeacher(Teacher):
    """Asks a server, by several threads at once, each over its own connection. Any thread may call it."""

    def __init__(
        self,
        settings: TeacherSettings,
        features: Sequence[Feature],
        task: Task,
        shape: tuple[int, ...],
        step_size: int,
        folder: Path,
    ) -> None:
        """Connect to nothing yet.

        Args:
            settings: `[model.teacher]`, with a url.
            features: those that are sent.
            task: the meaning of the output.
            shape: of the student's output for one event.
            step_size: events of a full step, which the server may take `timeout` for.
            folder: the config's.

        Raises:
            SettingsError: the file of authorities cannot be read.
        """
        assert settings.url is not None
        assert settings.model is not None
        self.name = f"the teacher at {settings.url}"
        self.threads = _THREADS
        self.timeout: timedelta | None = settings.timeout
        self._seconds = settings.timeout.total_seconds()
        self._settings = settings
        self._features = features
        self._task = task
        self._shape = shape
        self._step_size = self._at_once = step_size
        self._address = urlsplit(settings.url)
        self._model = f"/v2/models/{quote(settings.model, safe='')}"
        self._probabilistic = isinstance(task, Classification | MultiLabel | TokenClassification)
        self._output = settings.output or ("probabilities" if self._probabilistic else "prediction")
        self._context = _authorities(settings.ca, folder) if self._address.scheme == "https" else None
        self._headers = {"Accept": "application/json, application/octet-stream", "Accept-Encoding": "identity"}
        if settings.token is not None:
            self._headers["Authorization"] = f"Bearer {settings.token.get_secret_value()}"
        self._metadata: ModelMetadata | None = None
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._has_logged_misfit = False
        self._closed = threading.Event()

    @override
    def answer(self, columns: Mapping[str, Array]) -> NDArray[np.float32]:
        rows, parts = len(columns["offset"]), list[_Part]()
        try:
            while (begin := sum(len(part) for part, _ in parts)) < rows:
                parts += self._answer(columns, begin, min(rows, begin + self._at_once))
        except TeacherError:
            self._metadata, self._at_once = None, self._step_size  # the server may come back as another one
            raise
        misfit = next((each for _, each in parts if each is not None), None)
        output_N = self._usable(np.concatenate([part for part, _ in parts]))
        if np.isnan(output_N.reshape(rows, -1)).any(axis=1).all():
            if misfit is not None:
                self._metadata = None
                raise TeacherError(f"{self.name} {misfit}")
            kind = "probabilities" if self._has_probabilities else "finite numbers"
            raise TeacherError(
                f"{self.name} answers with values of {self._output} that are no {kind}: check model.teacher.output and "
                "model.teacher.logits"
            )
        if misfit is not None and not self._has_logged_misfit:
            self._has_logged_misfit = True
            log.warning("%s %s; it is not asked about such events, which count as unusable", self.name, misfit)
        return output_N

    def _answer(self, columns: Mapping[str, Array], begin: int, end: int) -> Sequence[_Part]:
        """Ask about events `[begin, end)` within `timeout`: those of a step, or of several that a quick server may be
        asked about in one request. A slow one, which answers for each step in time, must not count as away since a
        round has many."""
        since, rows = time.monotonic(), end - begin
        requests = -(-rows // self._settings.request_rows)
        ends = [begin + rows * index // requests for index in range(requests + 1)]
        parts = [self._part(columns, *each, since + self._seconds) for each in itertools.pairwise(ends)]
        share = (time.monotonic() - since) / self._seconds
        if share > _LATE:
            self._at_once = self._step_size
        elif share < _SOON and rows == self._at_once:
            self._at_once = max(self._step_size, min(2 * rows, self._settings.request_rows))
        return parts

    @override
    def close(self) -> None:
        self._closed.set()
        for connection in list(self._busy):  # its thread closes it then
            with contextlib.suppress(OSError, AttributeError):  # not connected, or closed meanwhile
                connection.sock.shutdown(socket.SHUT_RDWR)
        while self._idle:
            self._idle.pop().end()

    @property
    def _has_probabilities(self) -> bool:
        return not self._settings.logits and self._probabilistic

    def _usable(self, output_N: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return outputs as those of the student are, with NaN for events whose values cannot be used."""
        if not self._has_probabilities:
            return without_unusable(output_N)
        one_of = not isinstance(self._task, MultiLabel)
        fits = (output_N >= 0) & (output_N <= 1 + _SUM_TOLERANCE)
        if one_of:
            fits &= np.abs(output_N.sum(axis=-1, keepdims=True) - 1) <= _SUM_TOLERANCE
        fits = np.asarray(fits.all(axis=tuple(range(1, output_N.ndim)), keepdims=True))
        likely = np.clip(output_N, _SMALLEST, 1 if one_of else 1 - _SMALLEST)
        logits = np.log(likely) if one_of else np.log(likely) - np.log1p(-likely)
        return np.where(fits, logits, np.float32(np.nan))

    def _part(self, columns: Mapping[str, Array], begin: int, end: int, until: float) -> _Part:
        """Return what `_ask` does for events `[begin, end)`, after retries where they may help."""
        backoff = Backoff(_FIRST_RETRY, _LONGEST_RETRY)
        for attempt in range(self._settings.retries + 1):
            try:
                return self._ask(columns, begin, end, until)
            except _RetriableError as exc:
                left = until - time.monotonic()
                delay = backoff.next()
                if attempt == self._settings.retries or delay >= left or self._closed.wait(delay):
                    raise TeacherError(f"{self.name} {exc}") from exc
            except MessageError as exc:
                raise TeacherError(f"{self.name} {exc}") from exc
        raise AssertionError

    def _ask(self, columns: Mapping[str, Array], begin: int, end: int, until: float) -> _Part:
        metadata = self._metadata
        if metadata is None:
            extensions = read_extensions(self._request("GET", "/v2", until=until)[0])
            found = self._request("GET", self._model, until=until)[0]
            metadata = read_metadata(found, self._features, self._output, extensions)
            self._metadata = metadata
        arrays = {each.name: columns[f"feature.{each.name}"][begin:end] for each in self._features}
        output_N = np.full((end - begin, *self._shape), np.nan, np.float32)
        fits_N, misfit = fitting(metadata, arrays)
        if not fits_N.any():
            return output_N, misfit
        body, header = write_request(metadata, {name: each[fits_N] for name, each in arrays.items()}, self._output)
        shape = (int(fits_N.sum()), *self._shape)
        most = _MOST_OTHER_BYTES + _BYTES_OF_NUMBER * int(np.prod(shape))
        content, length = self._request("POST", f"{self._model}/infer", body, header, until=until, limit=most)
        output_N[fits_N] = read_output(content, length, self._output, shape)
        return output_N, misfit

    def _request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        header: int | None = None,
        *,
        until: float,
        limit: int = _MOST_OTHER_BYTES,
    ) -> tuple[bytes, str | None]:
        """Return the body of an answer of at most `limit` bytes, and its header HEADER_LENGTH."""
        headers = dict(self._headers)
        if body is not None:
            headers["Content-Type"] = "application/json" if header is None else "application/octet-stream"
        if header is not None:
            headers[HEADER_LENGTH] = str(header)
        connection = self._connection(until)
        self._busy.add(connection)
        try:
            with connection.deadline.ends_within(self._left(until)):
                connection.request(method, self._address.path + path, body, headers)
                reply = connection.getresponse()
                content = self._read(reply, limit)
            if connection.deadline.expired:  # the end of its connection may have seemed to be that of the answer
                raise self._unanswered()
        except (OSError, http.client.HTTPException, _RetriableError, MessageError) as exc:
            connection.end()
            raise (self._unanswered() if connection.deadline.expired else self._failure(exc)) from exc
        finally:
            self._busy.discard(connection)
        if self._closed.is_set():
            connection.end()
        else:
            self._idle.append(connection)
        if reply.status == http.HTTPStatus.OK:
            return content, reply.getheader(HEADER_LENGTH)
        sentence = f"answers {reply.status} to {method} {self._address.path}{path}{error_in(content)}"
        if reply.status in _TRANSIENT:
            raise _RetriableError(sentence)
        if reply.status in (401, 403):
            sentence += ": check model.teacher.token"
        elif 300 <= reply.status < 400:
            sentence += ": redirects are not followed; set model.teacher.url to where it is"
        raise MessageError(sentence)

    def _connection(self, until: float) -> _Connection:
        """Return a connection that no thread uses, whose next calls wait until then at most."""
        left = self._left(until)
        try:
            connection = self._idle.pop()
        except IndexError:
            host, port = self._address.hostname or "", self._address.port
            if self._context is None:
                return _Connection(host, port, timeout=left)
            return _TLSConnection(host, port, timeout=left, context=self._context)
        connection.timeout = left
        if connection.sock is not None:
            connection.sock.settimeout(left)
        return connection

    def _read(self, reply: http.client.HTTPResponse, limit: int) -> bytes:
        content = bytearray()
        while piece := reply.read1(_PIECE_BYTES):
            content += piece
            if len(content) > limit:
                raise MessageError(f"answers with more than {limit} bytes, which are not read")
        reply.close()  # `read1` leaves it open, and then the connection takes no further request
        return bytes(content)

    def _left(self, until: float) -> float:
        left = until - time.monotonic()
        if left <= 0 or self._closed.is_set():
            raise self._unanswered()
        return left

    def _unanswered(self) -> _RetriableError:
        return _RetriableError(
            f"does not answer within {format_duration(self._settings.timeout)} (model.teacher.timeout)"
        )

    def _failure(self, exc: Exception) -> Exception:
        """Return what a failed request raises."""
        if isinstance(exc, _RetriableError | MessageError):
            return exc
        if isinstance(exc, TimeoutError):
            return self._unanswered()
        if isinstance(exc, ssl.SSLCertVerificationError):
            return MessageError(f"has a certificate that is not trusted ({exc.verify_message}): set model.teacher.ca")
        return _RetriableError(f"cannot be reached: {_shown(exc)}")


def _shown(exc: Exception) -> str:
    """Return the reason of an error of the connection: the system's own, or the class where the server has a say."""
    return (exc.strerror if isinstance(exc, OSError) else None) or type(exc).__name__


def _authorities(ca: Path | None, folder: Path) -> ssl.SSLContext:
    if ca is None:
        return ssl.create_default_context()
    try:
        return ssl.create_default_context(cafile=folder / ca)
    except OSError as exc:  # ssl.SSLError is one too
        raise SettingsError(f"model.teacher.ca = {folder / ca} cannot be read as PEM: {exc.strerror or exc}") from exc
