"""An MLflow server for tests: a real HTTP server with the part of its REST API that is used. It fails on demand.

Requests and answers are those of MLflow 3.17.
"""

import contextlib
import json
import re
import threading
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest

from tests.support.http_server import Handler, serving

_ROOT = "/api/2.0/mlflow/"


@dataclass
class MlflowServer:
    """What the server holds, and what is wrong with it."""

    url: str = ""
    status: int | None = None
    """Status of each answer, without effect on what it holds."""
    error: str = "INTERNAL_ERROR"
    away: bool = False
    """Connections are closed without an answer."""
    lost: int | None = None
    """The number of the request, from 0, whose answer is lost after it has had its effect."""
    refuses: set[str] = field(default_factory=set)
    """Sources of model versions that it refuses."""
    go_on: threading.Event = field(default_factory=threading.Event)
    """Answers wait for it."""
    asked: threading.Event = field(default_factory=threading.Event)
    requests: list[str] = field(default_factory=list)
    experiments: list[str] = field(default_factory=list)
    models: list[str] = field(default_factory=list)
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    versions: list[dict[str, Any]] = field(default_factory=list)
    aliases: dict[tuple[str, str], str] = field(default_factory=dict)

    def tags(self, index):
        """Return the tags of a model version."""
        return {each["key"]: each["value"] for each in self.versions[index]["tags"]}

    def metrics(self, run):
        """Return the metrics of a run."""
        return {each["key"]: each["value"] for each in self.runs[run]["metrics"]}

    def answer(self, path, given):
        """Return status and content."""
        match path:
            case "experiments/get-by-name":
                name = given["experiment_name"]
                if name not in self.experiments:
                    return 404, _error("RESOURCE_DOES_NOT_EXIST")
                return 200, {"experiment": {"experiment_id": str(self.experiments.index(name)), "name": name}}
            case "experiments/create":
                self.experiments.append(given["name"])
                return 200, {"experiment_id": str(len(self.experiments) - 1)}
            case "registered-models/create":
                if given["name"] in self.models:
                    return 400, _error("RESOURCE_ALREADY_EXISTS")
                self.models.append(given["name"])
                return 200, {"registered_model": {"name": given["name"]}}
            case "registered-models/get":
                if given["name"] not in self.models:
                    return 404, _error("RESOURCE_DOES_NOT_EXIST")
                return 200, {"registered_model": {"name": given["name"]}}
            case "registered-models/alias":
                if given["version"] not in {each["version"] for each in self.versions}:
                    return 404, _error("RESOURCE_DOES_NOT_EXIST")
                self.aliases[given["name"], given["alias"]] = given["version"]
                return 200, {}
            case path if path.startswith("runs/"):
                return self._answer_of_runs(path, given)
            case path if path.startswith("model-versions/"):
                return self._answer_of_versions(path, given)
        return 404, _error("ENDPOINT_NOT_FOUND")

    def _answer_of_runs(self, path, given):
        match path:
            case "runs/create":
                number = f"run{len(self.runs)}"
                info = {"run_id": number, "run_uuid": number, "status": "RUNNING", "experiment_id": "0"}
                self.runs[number] = {"info": info, "tags": given["tags"], "metrics": [], "name": given["run_name"]}
                return 200, {"run": self._run(number)}
            case "runs/search":
                (identity,) = re.findall(r"^tags\.`anabranch\.identity` = '([\w-]+)'$", given["filter"])
                tag = {"key": "anabranch.identity", "value": identity}
                return 200, {"runs": [self._run(each) for each, run in self.runs.items() if tag in run["tags"]]}
            case "runs/get":
                return 200, {"run": self._run(given["run_id"])}
            case "runs/log-batch":
                self.runs[given["run_id"]]["metrics"] += given["metrics"]
                return 200, {}
            case "runs/update":
                self.runs[given["run_id"]]["info"]["status"] = given["status"]
                return 200, {"run_info": self.runs[given["run_id"]]["info"]}
        return 404, _error("ENDPOINT_NOT_FOUND")

    def _answer_of_versions(self, path, given):
        match path:
            case "model-versions/create":
                if given["source"] in self.refuses:
                    return 400, _error("INVALID_PARAMETER_VALUE")
                self.versions.append({**given, "version": str(len(self.versions) + 1)})
                return 200, {"model_version": self.versions[-1]}
            case "model-versions/search":
                (run,) = re.findall(r"^run_id = '(\w+)'$", given["filter"])
                return 200, {"model_versions": [each for each in self.versions if each["run_id"] == run]}
            case "model-versions/set-tag":
                tags = self.versions[int(given["version"]) - 1]["tags"]
                tags.append({"key": given["key"], "value": given["value"]})
                return 200, {}
        return 404, _error("ENDPOINT_NOT_FOUND")

    def _run(self, number):
        run = self.runs[number]
        return {"info": run["info"], "data": {"tags": run["tags"], "metrics": run["metrics"]}}


def _error(code):
    return {"error_code": code, "message": "as the test says"}


@contextlib.contextmanager
def mlflow_server():
    """Run a server on a free port of 127.0.0.1."""
    mlflow = MlflowServer()
    mlflow.go_on.set()

    class Answering(Handler):
        def do_GET(self):
            self._answer(dict(parse_qsl(urlsplit(self.path).query)))

        def do_POST(self):
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, given):
            path = urlsplit(self.path).path.removeprefix(_ROOT)
            mlflow.asked.set()
            mlflow.go_on.wait()
            if mlflow.away:
                return
            mlflow.requests.append(path)
            status, answer = (mlflow.status, _error(mlflow.error)) if mlflow.status else mlflow.answer(path, given)
            if mlflow.lost != len(mlflow.requests) - 1:
                self.reply(json.dumps(answer).encode(), status, Content_Type="application/json")

    with serving(Answering) as mlflow.url:
        try:
            yield mlflow
        finally:
            mlflow.go_on.set()


@pytest.fixture
def mlflow():
    """An MLflow server on this host."""
    with mlflow_server() as running:
        yield running
