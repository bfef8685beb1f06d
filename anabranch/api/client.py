"""Predictions of a running server, for data as notebooks have it. Loads no torch.

Legend: N events of a call, B rows of a request.
"""

import http.client
import json
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from http.client import HTTPMessage
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar
from urllib.parse import quote, unquote, urlsplit

import msgspec
import numpy as np
from numpy.typing import NDArray

from anabranch.api.data import NO_EVENT, arrays_of, frame_like, plain
from anabranch.commands.versions.rollout import body_of, refusal_error, refusal_in
from anabranch.core.errors import DependencyError, SettingsError
from anabranch.core.failures import UNDECODABLE
from anabranch.core.socket_deadline import SocketDeadline
from anabranch.ingest.events.schema import UNITS, Schema
from anabranch.serving.errors import BadRequestError
from anabranch.serving.protocol.bodies import OutputTensor, ReplyBody
from anabranch.serving.protocol.codec import HEADER_LENGTH, LABEL
from anabranch.serving.protocol.tensors import BYTES, DATATYPES, Array, TensorSpec, read_binary, write_binary

_AT_ONCE = 256
"""Rows of a request."""
_DTYPES = {datatype: np.dtype(name) for name, datatype in DATATYPES.items()}
_LATER = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
_MODELS = "/v2/models/"
_T = TypeVar("_T")


class _Input(msgspec.Struct):
    """A tensor of the model's metadata."""

    name: str
    datatype: str
    shape: list[int]


class _ModelInputs(msgspec.Struct):
    """What is read of the answer to `GET /v2/models/NAME`."""

    inputs: list[_Input]


class _Status(msgspec.Struct):
    """What is read of the answer to `GET /api/status`."""

    name: str


class Client:
    """Asks a running server for predictions, over one connection. Used by one thread.

    A request is sent again only where the server has not begun to answer it: it said 429 or 503 with the time to wait,
    or it had closed an idle connection.

    Example:
        >>> client = Client("http://127.0.0.1:8000")
        >>> client.predict({"x": np.zeros((2, 3), np.float32)})["prediction"]
        array([0, 0])
    """

    def __init__(
        self,
        url: str,
        token: str = "",
        *,
        model: str | None = None,
        schema: Schema | None = None,
        timeout: float = 60.0,
        ca: str | Path | None = None,
    ) -> None:
        """Name the server; nothing is sent yet.

        Args:
            url: of the server, such as `http://127.0.0.1:8000`, or of a model of it, `.../v2/models/NAME`.
            token: a bearer token that may read.
            model: name of the model, where the URL has none. By default the server is asked.
            schema: by which times become numbers of their unit. By default they become seconds since 1970.
            timeout: seconds that each request may take, with all that is tried again.
            ca: file of certificates that are trusted for `https`, in place of the system's.

        Raises:
            SettingsError: it is no URL of a server, no token, or the certificates cannot be read.
        """
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if not host or parts.scheme not in ("http", "https"):
            raise SettingsError(f"Client: url = {url!r} is no address of a server, such as http://127.0.0.1:8000")
        if not (token.isascii() and token.isprintable()):
            raise SettingsError("Client: token has a line break or another character that no token has")
        if not timeout > 0:
            raise SettingsError(f"Client: timeout = {timeout!r} has to be more than 0 seconds")
        self._base, _, named = parts.path.rstrip("/").partition(_MODELS)
        self._model = model or (unquote(named) if named else None)
        self._url, self._timeout = url, timeout
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        units = {} if schema is None else {each.name: each.unit for each in schema.features if each.is_time}
        self._counts = {name: UNITS[unit][0] for name, unit in units.items()}
        if parts.scheme == "https":
            try:
                context = ssl.create_default_context(cafile=None if ca is None else str(ca))
            except OSError as exc:
                raise SettingsError(f"Client: ca = {str(ca)!r} cannot be read: {exc.strerror or exc}") from exc
            self._connection: http.client.HTTPConnection = http.client.HTTPSConnection(host, port, context=context)
        else:
            self._connection = http.client.HTTPConnection(host, port)
        self._deadline = SocketDeadline()
        self._inputs: list[_Input] | None = None

    def predict(self, data: Any) -> Any:
        """Return the predictions for events, in their order.

        Args:
            data: N events: a dict of arrays `[N, ...]`, or a data frame of pandas, polars or Arrow. Columns that the
                model does not take are left out. Where a value is missing, the server takes the schema's default.

        Returns:
            What the server answers, and `model_version`, int64 `[N]`: of a dict a dict of arrays, as `Learner.predict`
            returns; of a frame one of its kind, with a column for each number, such as `probabilities.0`, and pandas'
            index. `prediction` is the name of the class where it has one.

        Raises:
            SettingsError: the data does not fit the model, or the server refuses it; the sentence is the server's.
            DependencyError: the server cannot be reached, does not answer in time, or refuses for now.
        """
        arrays = arrays_of(data)
        inputs = self._model_inputs()
        given = {each.name: _column(each, arrays[each.name], self._counts) for each in inputs if each.name in arrays}
        if not given:
            raise SettingsError(f"the data has none of the model's inputs: {', '.join(each.name for each in inputs)}")
        rows = len(next(iter(given.values()))[0])
        if not rows:
            raise SettingsError(NO_EVENT)
        found: dict[str, list[Array]] = {}
        order = [np.zeros(0, np.int64)]
        for which, names in _alike({name: missing for name, (_, missing) in given.items()}, rows):
            order.append(which)
            tensors = [(each, given[each.name][0][which]) for each in inputs if each.name in names]
            for name, array in self._infer(tensors, len(which)).items():
                found.setdefault(name, []).append(array)
        back = np.argsort(np.concatenate(order))
        return frame_like(data, {name: np.concatenate(parts)[back] for name, parts in found.items()})

    def close(self) -> None:
        """Close the connection; the next call opens it again."""
        self._connection.close()
        self._deadline.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _model_inputs(self) -> list[_Input]:
        if self._model is None:
            self._model = self._decoded(self._ask("GET", "/api/status")[0], _Status).name
        if self._inputs is None:
            self._inputs = self._decoded(self._ask("GET", self._path())[0], _ModelInputs).inputs
            if unknown := [each.datatype for each in self._inputs if each.datatype not in {BYTES, *_DTYPES}]:
                raise DependencyError(f"{self._url} has inputs of {unknown[0]}, which this release does not know")
        return self._inputs

    def _path(self, action: str = "") -> str:
        return f"{_MODELS}{quote(self._model or '', safe='')}{action}"

    def _infer(self, tensors: Sequence[tuple[_Input, Array]], rows: int) -> dict[str, Array]:
        """Return the outputs for B rows, by name."""
        blobs = [write_binary(array) for _, array in tensors]
        described = [
            {
                "name": each.name,
                "datatype": each.datatype,
                "shape": list(array.shape),
                "parameters": {"binary_data_size": len(blob)},
            }
            for (each, array), blob in zip(tensors, blobs, strict=True)
        ]
        text = json.dumps({"inputs": described, "parameters": {"binary_data_output": True}}).encode()
        headers = {"Content-Type": "application/octet-stream", HEADER_LENGTH: str(len(text))}
        body, length = self._ask("POST", self._path("/infer"), b"".join((text, *blobs)), headers)
        try:
            end = int(length or len(body))
            reply = self._decoded(body[:end], ReplyBody)
            outputs = dict(_outputs(reply.outputs, memoryview(body)[end:], rows))
            outputs["model_version"] = np.full(rows, int(reply.model_version))
        except (BadRequestError, ValueError, KeyError, TypeError) as exc:
            self._unexpected(exc)
        if "prediction" in outputs and outputs.get(LABEL, outputs["prediction"]).dtype == object:
            outputs["prediction"] = outputs.pop(LABEL)
        return outputs

    def _ask(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[bytes, str | None]:
        """Return the body of an answer, and how much of it is JSON where it says so."""
        end = time.monotonic() + self._timeout
        while True:
            status, content, answered = self._exchange(method, path, body, {**self._headers, **(headers or {})}, end)
            if status == HTTPStatus.OK:
                return content, answered.get(HEADER_LENGTH)
            after = answered.get("Retry-After", "")
            if status in _LATER and after.isdecimal() and time.monotonic() + int(after) < end:
                time.sleep(int(after))
                continue
            sentence = refusal_in(content) or "no reason"
            raise refusal_error(status)(f"{self._url} answered {status}: {sentence}")

    def _exchange(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str], end: float
    ) -> tuple[int, bytes, HTTPMessage]:
        """Send a request, and return status, body and headers of its answer."""
        connection: Any = self._connection  # typeshed has no `sock` of one that is closed
        is_reused = connection.sock is not None
        left = max(0.001, end - time.monotonic())
        try:
            with self._deadline.ends_within(left):
                if not is_reused:
                    connection.timeout = left
                    connection.connect()
                    self._deadline.watch(connection.sock)
                connection.sock.settimeout(left)
                connection.request(method, self._base + path, body, dict(headers))
                reply = connection.getresponse()
                answer = reply.status, body_of(reply), reply.headers
                if self._deadline.expired:  # an answer without a length ends where the connection does
                    raise TimeoutError
                return answer
        except (OSError, http.client.HTTPException, UnicodeError) as exc:  # the last of a host that is no name
            connection.close()
            if self._deadline.expired or isinstance(exc, TimeoutError):
                raise DependencyError(f"{self._url} has not answered within {self._timeout:g} s") from exc
            if is_reused and isinstance(exc, ConnectionError):  # it had been closed while it was idle
                return self._exchange(method, path, body, headers, end)
            raise DependencyError(f"{self._url} cannot be reached: {exc or type(exc).__name__}") from exc

    def _decoded(self, body: bytes, kind: type[_T]) -> _T:
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.DecodeError, *UNDECODABLE) as exc:
            self._unexpected(exc)

    def _unexpected(self, exc: Exception) -> NoReturn:
        raise DependencyError(f"{self._url} does not answer as a server of Anabranch: {exc}") from exc


def _column(target: _Input, array: NDArray[Any], counts: Mapping[str, int]) -> tuple[Array, NDArray[np.bool_]]:
    """Return a column as its input has it, `[N, *shape]`, and which of the N values are missing.

    Raises:
        SettingsError: it has values that the input cannot have.
    """
    count, shape = counts.get(target.name, 1), tuple(target.shape[1:])
    missing = np.zeros(len(array), np.bool_)
    if array.dtype.kind in "fM" and array.ndim == 1:
        missing = np.isnat(array) if array.dtype.kind == "M" else np.isnan(array)
        values = array[~missing]
        if array.dtype.kind == "M":
            values = values.astype("datetime64[us]").astype(np.float64) * (count / 1e6)
    else:
        cells = [plain(value) for value in array] if array.dtype.kind == "O" else array
        if array.dtype.kind == "O":
            missing = np.array([cell is None or (isinstance(cell, float) and cell != cell) for cell in cells], np.bool_)
            cells = [_seconds(cell) * count if isinstance(cell, datetime) else cell for cell in cells]
        values = array if cells is array else [cell for cell, gone in zip(cells, missing, strict=True) if not gone]
    try:
        found = _typed(values, None if target.datatype == BYTES else _DTYPES[target.datatype], shape)
    except (ValueError, TypeError, OverflowError) as exc:
        what = f"{target.datatype} {list(shape)}" if shape else target.datatype
        raise SettingsError(f"the column {target.name} cannot be {what}, which the model takes: {exc}") from exc
    column = np.zeros((len(array), *shape), found.dtype)
    column[~missing] = found
    return column, missing


def _seconds(moment: datetime) -> float:
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _typed(values: Any, dtype: np.dtype[np.generic] | None, shape: tuple[int, ...]) -> Array:
    """Return values as an array of an input, strings as objects; raises ValueError where they would be others."""
    if dtype is None:
        array = np.array(values, object)
        wrong = next((value for value in array.reshape(-1).tolist() if not isinstance(value, str)), None)
        if wrong is not None:
            raise ValueError(f"{wrong!r} is no text")
    else:
        array = np.asarray(values) if len(values) else np.zeros((0, *shape), dtype)
        if array.dtype.kind not in {"b": "b", "f": "iuf"}.get(dtype.kind, "iuf"):
            raise ValueError(f"its values are {array.dtype}")
        with np.errstate(invalid="ignore", over="ignore"):
            found = array.astype(dtype)
        if dtype.kind in "iu" and not (found == array).all():
            raise ValueError(f"{array[found != array].tolist()[0]!r} is none")
        array = found
    if array.shape[1:] != shape:
        raise ValueError(f"its values have the shape {list(array.shape[1:])}")
    return array


def _alike(missing: Mapping[str, NDArray[np.bool_]], rows: int) -> Iterator[tuple[NDArray[np.int64], Sequence[str]]]:
    """Yield the rows of each request, and the inputs that all of them have.

    Serving takes the default of an input that is left out, for all rows of a request.
    """
    names = list(missing)
    masks, group = np.unique(np.stack([missing[name] for name in names], axis=1), axis=0, return_inverse=True)
    for number, mask in enumerate(masks):
        which = np.flatnonzero(group.reshape(rows) == number)
        for begin in range(0, len(which), _AT_ONCE):
            yield which[begin : begin + _AT_ONCE], [name for name, gone in zip(names, mask, strict=True) if not gone]


def _outputs(outputs: Sequence[OutputTensor], binary: memoryview, rows: int) -> Iterator[tuple[str, Array]]:
    """Yield the outputs of a reply; raises ValueError, KeyError, TypeError or BadRequestError where it is none."""
    position = 0
    for each in outputs:
        dtype = None if each.datatype == BYTES else _DTYPES[each.datatype]
        if each.shape[:1] != [rows]:
            raise ValueError(f"its output {each.name} has the shape {each.shape}, and {rows} rows were asked")
        size = (each.parameters or {}).get("binary_data_size")
        if isinstance(size, int):
            spec = TensorSpec(each.name, dtype, tuple(each.shape[1:]), may_be_nan=True)
            yield each.name, read_binary(spec, binary[position : position + size], rows)
            position += size
        else:
            yield each.name, np.array(each.data, dtype or object).reshape(each.shape)
