"""`anabranch predict`: asks the running server for a prediction for each event of a file. Loads no torch."""

import http.client
import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

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
    """Yield for each event its prediction, with the version that made it, as JSON values.

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
        with open_source(path, kind, delimiter, schema, checked=True) as source:
            for record in source:
                event = _event(schema, record)
                body = json.dumps({"inputs": tensors_of(schema, event, inputs, record.location)}, allow_nan=False)
                reply = _ask(connection, "POST", f"{url}/infer", body, headers, _Reply)
                yield {"version": reply.model_version, **{each.name: _first(each) for each in reply.outputs}}
    except (OSError, http.client.HTTPException, LookupError, ValueError, *UNDECODABLE) as exc:
        raise DependencyError(f"serving at {report.address} does not answer as expected: {exc!r}") from exc
    finally:
        connection.close()


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


def _first(output: _Tensor) -> Any:
    """Return the output for the one event: a number, or a list of them."""
    data = np.asarray(output.data, object).reshape(output.shape)[0]
    return data.tolist() if isinstance(data, np.ndarray) else data
