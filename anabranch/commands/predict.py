"""`anabranch predict`: asks the running server for a prediction for each event of a file. Loads no torch."""

import http.client
import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from anabranch.commands.event_files.files import FileRecord, SourceFormat, open_source
from anabranch.commands.rollout import connect, refusal_error
from anabranch.config.loader import Config
from anabranch.core.errors import DependencyError, SettingsError
from ingest.events.schema import Feature, Schema
from ingest.formats.json_text import decoded
from serving.reporting.report import read_report

_JSON = {"Content-Type": "application/json"}


def predict(
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
        inputs = {tensor["name"]: tensor for tensor in _ask(connection, "GET", url, None, headers)["inputs"]}
        with open_source(path, kind, delimiter, schema, checked=True) as source:
            for record in source:
                event = _event(record)
                body = json.dumps({"inputs": tensors_of(schema, event, inputs, record.location)}, allow_nan=False)
                reply = _ask(connection, "POST", f"{url}/infer", body, headers)
                yield {
                    "version": reply["model_version"],
                    **{output["name"]: _first(output) for output in reply["outputs"]},
                }
    except (OSError, http.client.HTTPException, KeyError, ValueError) as exc:
        raise DependencyError(f"serving at {report.address} does not answer as expected: {exc!r}") from exc
    finally:
        connection.close()


def _ask(connection: http.client.HTTPConnection, method: str, url: str, body: str | None, headers: Any) -> Any:
    connection.request(method, url, body, {**_JSON, **headers})
    reply = connection.getresponse()
    content = json.loads(reply.read())
    if reply.status != http.HTTPStatus.OK:
        raise refusal_error(reply.status)(f"the server answered {reply.status}: {content.get('error', content)}")
    return content


def _event(record: FileRecord) -> Mapping[str, Any]:
    if record.fault:
        raise SettingsError(f"{record.location}: {record.fault}")
    if not isinstance(record.content, bytes):
        return record.content
    try:
        return decoded(partial(msgspec.json.decode, type=dict[str, Any]), record.content)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise SettingsError(f"{record.location}: it is not a JSON object: {exc}") from exc


def tensors_of(
    schema: Schema, event: Mapping[str, Any], inputs: Mapping[str, Any], location: str
) -> list[dict[str, Any]]:
    """Return the features of one event as input tensors of the Open Inference Protocol.

    A feature that it lacks and that has a default, or may be missing, is left out: serving fills it in.

    Raises:
        SettingsError: another feature is missing; the sentence names it and the location.
    """
    given = [feature for feature in schema.features if event.get(feature.name) is not None or feature.default is None]
    return [_tensor(feature, event, inputs, location) for feature in given]


def _tensor(feature: Feature, event: Mapping[str, Any], inputs: Mapping[str, Any], location: str) -> dict[str, Any]:
    value = event.get(feature.name)
    if value is None:
        raise SettingsError(f'{location}: the feature "{feature.name}" is missing')
    data = [None if each != each else each for each in np.asarray(value, object).ravel().tolist()]  # JSON has no NaN
    datatype = inputs[feature.name]["datatype"]
    return {"name": feature.name, "datatype": datatype, "shape": [1, *feature.shape], "data": data}


def _first(output: Mapping[str, Any]) -> Any:
    """Return the output for the one event: a number, or a list of them."""
    data = np.asarray(output["data"], object).reshape(output["shape"])[0]
    return data.tolist() if isinstance(data, np.ndarray) else data
