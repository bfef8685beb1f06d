"""`anabranch predict`: asks the running server for a prediction for each event of a file. Loads no torch.

Events are sent in batches of those that have the same features, since serving fills in defaults for a whole input.
"""

import http.client
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import typer

from anabranch.command import AsJson, command, output
from anabranch.commands.event_files.files import (
    Delimiter,
    FileArgument,
    FileFormat,
    FileRecord,
    SourceFormat,
    open_source,
)
from anabranch.commands.versions.rollout import answer_of, connect, refusal_error, refusal_in
from anabranch.config.loader import Config
from anabranch.core.errors import DependencyError, SettingsError
from anabranch.core.failures import UNDECODABLE
from anabranch.ingest.events.schema import Feature, Schema
from anabranch.ingest.formats.event_fields import event_of, in_units
from anabranch.ingest.formats.json_text import decoded
from anabranch.serving.reporting.report import read_report

_T = TypeVar("_T")
_JSON = {"Content-Type": "application/json"}
_AT_ONCE = 256
"""Events of a request."""


@command("anabranch predict events.jsonl")
def predict(
    source: FileArgument,
    config: Config,
    format_: FileFormat = None,
    delimiter: Delimiter = None,
    as_json: AsJson = False,
) -> None:
    """Ask the running server for a prediction for each event of a file, and print one JSON object a line."""
    found = predictions(config, source, kind=format_, delimiter=delimiter)
    if as_json:
        output(list(found), lambda: None)
    for prediction in () if as_json else found:
        typer.echo(json.dumps(prediction))


def predictions(
    config: Config, path: Path, *, kind: SourceFormat | None = None, delimiter: str | None = None
) -> Iterator[dict[str, Any]]:
    """Yield for each event its prediction, with its key and the version that made it, as JSON values.

    Numbers have four digits.

    Raises:
        SettingsError: the file cannot be read, an event is not usable, or the server refuses it.
        DependencyError: serving does not run, does not answer, or refuses for now.
    """
    schema, name = Schema(config.pipeline.events), config.pipeline.name
    report = read_report(config.state_dir)
    if report is None or not report.ready:
        raise DependencyError(f'serving of {config.path} is not ready; start it: "anabranch serve -c {config.path}"')
    token = config.pipeline.serving.tokens.read.get_secret_value()
    connection, headers = connect(config, report, token)
    url = f"/v2/models/{name}"
    try:
        metadata = _ask(connection, "GET", url, None, headers, _Metadata)
        inputs = {tensor.name: tensor.datatype for tensor in metadata.inputs}
        envelope = config.pipeline.stream.envelope
        with open_source(path, kind, delimiter, schema, checked=True, envelope=envelope) as source:
            ask = partial(_ask, connection, "POST", f"{url}/infer", headers=headers, kind=_Reply)
            asked = (_asked(schema, record, inputs) for record in source)
            # Events of a pipe are answered as they come.
            most = 1 if str(path) == "-" else min(_AT_ONCE, config.pipeline.serving.max_queue)
            for batch in _batches(asked, most):
                yield from _answered(batch, ask)
    except (OSError, http.client.HTTPException, LookupError, ValueError, *UNDECODABLE) as exc:
        raise DependencyError(f"serving at {report.address} does not answer as expected: {exc!r}") from exc
    finally:
        connection.close()


class _Asked(NamedTuple):
    """An event to ask about."""

    location: str
    key: Any
    tensors: list[dict[str, Any]]


def _asked(schema: Schema, record: FileRecord, inputs: Mapping[str, str]) -> _Asked:
    event = _event(schema, record)
    key = None if schema.key is None else event.get(schema.key)
    return _Asked(record.location, key, tensors_of(schema, event, inputs, record.location))


def _batches(asked: Iterable[_Asked], most: int) -> Iterator[list[_Asked]]:
    """Yield events in their order, at most so many at once, of which all have the same features.

    Those before an event that cannot be used are yielded before its error.
    """
    batch: list[_Asked] = []
    try:
        for each in asked:
            if batch and (len(batch) == most or _inputs_of(each) != _inputs_of(batch[0])):
                yield batch
                batch = []
            batch.append(each)
    except SettingsError:
        if batch:
            yield batch
        raise
    if batch:
        yield batch


def _inputs_of(asked: _Asked) -> list[str]:
    return [tensor["name"] for tensor in asked.tensors]


def _answered(batch: Sequence[_Asked], ask: Callable[[str], "_Reply"]) -> Iterator[dict[str, Any]]:
    """Yield the answers about a batch. One that is refused is asked about one by one, to say which event is."""
    columns = zip(*(each.tensors for each in batch), strict=True)
    tensors = [
        {**rows[0], "shape": [len(batch), *rows[0]["shape"][1:]], "data": [one for row in rows for one in row["data"]]}
        for rows in columns
    ]
    try:
        reply = ask(json.dumps({"inputs": tensors}, allow_nan=False))
    except SettingsError as exc:
        if len(batch) == 1:
            raise SettingsError(f"{batch[0].location}: {exc}") from exc
        for each in batch:
            yield from _answered([each], ask)
        return
    outputs = {each.name: _rows(each, len(batch)) for each in reply.outputs}
    for index, each in enumerate(batch):
        key = {} if each.key is None else {"key": each.key}
        yield {**key, "version": reply.model_version, **{name: rows[index] for name, rows in outputs.items()}}


class _Tensor(msgspec.Struct):
    """A tensor of the Open Inference Protocol; only those of an answer have a shape and data."""

    name: str
    datatype: str
    shape: list[int]
    data: list[Any] = []


class _Metadata(msgspec.Struct):
    """What is read of the answer to `GET /v2/models/NAME`."""

    inputs: list[_Tensor]


class _Reply(msgspec.Struct):
    """What is read of the answer to an inference request."""

    model_version: str
    outputs: list[_Tensor]


def _ask(
    connection: http.client.HTTPConnection, method: str, url: str, content: str | None, headers: Any, kind: type[_T]
) -> _T:
    connection.request(method, url, content, {**_JSON, **headers})
    status, body = answer_of(connection)
    if status != http.HTTPStatus.OK:
        raise refusal_error(status)(f"the server answered {status}: {refusal_in(body) or 'no reason'}")
    return msgspec.json.decode(body, type=kind)


def _event(schema: Schema, record: FileRecord) -> Mapping[str, Any]:
    if record.fault:
        raise SettingsError(f"{record.location}: {record.fault}")
    if not isinstance(record.content, bytes):
        return record.content
    try:
        document = decoded(partial(msgspec.json.decode, type=dict[str, Any]), record.content)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise SettingsError(f"{record.location}: it is not a JSON object: {exc}") from exc
    try:
        return {name: in_units(schema, name, value) for name, value in event_of(schema, document).items()}
    except ValueError as exc:
        raise SettingsError(f"{record.location}: {exc.args[-1]!r} is no ISO time") from exc


def tensors_of(
    schema: Schema, event: Mapping[str, Any], inputs: Mapping[str, str], location: str
) -> list[dict[str, Any]]:
    """Return the features of one event as input tensors of the Open Inference Protocol.

    A feature that it lacks and that has a default, or may be missing, is left out: serving fills it in.

    Raises:
        SettingsError: another feature is missing; the sentence names it and the location.
    """
    given = [feature for feature in schema.features if event.get(feature.name) is not None or feature.default is None]
    return [_tensor(feature, event, inputs, location) for feature in given]


def _tensor(feature: Feature, event: Mapping[str, Any], inputs: Mapping[str, str], location: str) -> dict[str, Any]:
    value = event.get(feature.name)
    if value is None:
        raise SettingsError(f'{location}: the feature "{feature.name}" is missing')
    data = [None if each != each else each for each in np.asarray(value, object).ravel().tolist()]  # JSON has no NaN
    return {"name": feature.name, "datatype": inputs[feature.name], "shape": [1, *feature.shape], "data": data}


def _rows(output: _Tensor, count: int) -> list[Any]:
    """Return the output for each of the events: a number or text, or a list of them."""
    rows = np.asarray(output.data, object).reshape(count, *output.shape[1:]).tolist()
    return [_short(row) for row in rows]


def _short(value: Any) -> Any:
    if isinstance(value, list):
        return [_short(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value
