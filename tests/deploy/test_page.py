"""docs/deploy/kubernetes.md: its commands, values and names are those of the chart and of the program."""

import itertools
import os
import re

import pytest
import yaml
from pydantic import BaseModel

from anabranch.config.loader import examine_config
from anabranch.config.pipeline import Pipeline, alternatives
from tests.deploy.objects import (
    DEFAULTS,
    KUSTOMIZE,
    PAGE,
    ROOT,
    blocks,
    documented,
    helm,
    installed,
    named,
    objects,
    quickstart,
)
from tools import reference

pytestmark = pytest.mark.process

PIPELINE = ROOT / "anabranch/commands/init/template/pipeline.toml"


def option(words, name):
    return words[words.index(name) + 1]


def test_ten_commands_lead_to_a_served_model():
    commands = quickstart()
    assert [words[0] for words in commands] == ["docker", *["kubectl"] * 5, "helm", *["kubectl"] * 3]
    assert len(commands) == 10
    for words in commands[1:]:
        assert option(words, "--namespace" if "--namespace" in words else "namespace") == "pipelines"


def test_their_names_are_those_of_what_they_make():
    commands = quickstart()
    (built,) = [option(words, "--tag") for words in commands if words[:2] == ["docker", "build"]]
    values = installed()
    assert built == f"{values['image']['repository']}:{DEFAULTS['image']['tag']}"
    assert "--push" in commands[0]
    secret = next(words for words in commands if words[1:3] == ["create", "secret"])
    keys = {each.partition("=")[0] for name, each in itertools.pairwise(secret) if name == "--from-literal"}
    tokens = DEFAULTS["tokens"]
    assert (secret[4], keys) == (tokens["secret"], {tokens["readKey"], tokens["adminKey"]})
    # Rendered as release `demo`; the chart's name follows it.
    (learner,) = named("quickstart", "StatefulSet")
    install = next(words for words in commands if words[0] == "helm")
    assert install[2:4] == ["digits", "deploy/helm/anabranch"]
    pods = [words[words.index("--stdin") + 1] for words in commands if "exec" in words]
    pods += [words[-1].removeprefix("pod/") for words in commands if words[-1].startswith("pod/")]
    assert len(pods) == 3
    assert set(pods) == {learner.replace("demo", "digits") + "-0"}
    cluster = next(words[-1] for words in commands if words[1] == "wait")
    assert values["stream"]["bootstrapServers"] == f"{cluster.removeprefix('kafka/')}-kafka-bootstrap:9092"


def test_the_commands_in_pods_exist_and_their_files_too():
    for words in quickstart():
        if "exec" in words:
            command, *arguments = words[words.index("--") + 2 :]
            assert words[words.index("--") + 1] == "anabranch"
            redirected = arguments.index("<")
            reference.commands()[command].make_context(command, arguments[:redirected])
            assert (ROOT / arguments[redirected + 1]).is_file()


def test_the_values_of_the_page_render():
    assert len(documented()) >= 6
    for name in documented():
        assert {each["kind"] for each in objects(name)} >= {"StatefulSet", "Service", "NetworkPolicy"}
        assert [each for each in helm().lint[name] if each["severity"] > 1] == []


def test_the_kustomization_of_the_page_builds(tmp_path):
    (text,) = blocks("kustomization", "yaml")
    folder = os.path.relpath(KUSTOMIZE, tmp_path)
    (tmp_path / "kustomization.yaml").write_text(text.replace("deploy/kustomize", folder), encoding="utf-8")
    for name in ("pipeline.toml", "my_model.py"):
        (tmp_path / name).write_text((PIPELINE.parent / name).read_text(encoding="utf-8"), encoding="utf-8")
    built = objects(str(tmp_path))
    document = yaml.safe_load(text)
    (image,) = document["images"]
    used = {
        container["image"]
        for each in built
        if each["kind"] in ("StatefulSet", "Deployment")
        for container in each["spec"]["template"]["spec"]["containers"]
    }
    assert used == {f"{image['newName']}:{image['newTag']}"}
    assert {each["metadata"].get("namespace", "") for each in built} == {"pipelines"}
    maps = {each["metadata"]["name"]: each for each in built if each["kind"] == "ConfigMap"}
    (settings,) = [each for name, each in maps.items() if name.startswith("settings-")]
    (literals,) = [each["literals"] for each in document["configMapGenerator"] if each["name"] == "settings"]
    assert {tuple(each.split("=", 1)) for each in literals} <= set(settings["data"].items())
    (pipeline,) = [name for name in maps if name.startswith("pipeline-")]
    for each in built:
        if each["kind"] in ("StatefulSet", "Deployment"):
            volumes = each["spec"]["template"]["spec"]["volumes"]
            assert [v["configMap"]["name"] for v in volumes if v["name"] == "pipeline"] == [pipeline]


def test_the_rule_of_the_adapter_keeps_the_name_of_the_metric():
    (text,) = re.findall(r"^```yaml\n(rules:.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (rule,) = yaml.safe_load(text)["rules"]
    (scaler,) = named("HPA", "HorizontalPodAutoscaler").values()
    assert rule["seriesQuery"].startswith(scaler["spec"]["metrics"][0]["pods"]["metric"]["name"] + "{")
    assert "name" not in rule


def test_every_variable_is_a_setting():
    names = set(re.findall(r"\bANABRANCH__[A-Z0-9_.]*[A-Z0-9]", PAGE))
    assert len(names) > 5
    for name in names:
        faults = examine_config(PIPELINE, {name: "1"}).faults
        assert [fault.sentence for fault in faults if "there is no key" in fault.sentence] == []


def test_every_key_is_one_of_the_chart_or_of_the_pipeline():
    names = set(re.findall(r"`([a-z]\w*(?:\.[A-Za-z_]\w*)+)(?:: [^`]*)?`", PAGE))
    assert {"serving.tlsSecret", "learner.stop_timeout"} <= names
    wrong = [
        name
        for name in names
        if name.partition(".")[0] in DEFAULTS
        and name != "pipeline.toml"
        and not in_values(DEFAULTS, name.split("."))
        and not in_settings(Pipeline, name.split("."))
    ]
    assert wrong == []


def in_values(values, path):
    return not path or (isinstance(values, dict) and path[0] in values and in_values(values[path[0]], path[1:]))


def in_settings(model, path):
    if not path:
        return True
    sections = [kind for kind in alternatives(model) if isinstance(kind, type) and issubclass(kind, BaseModel)]
    for section in sections:
        for name, field in section.model_fields.items():
            if path[0] == (field.alias or name):
                return in_settings(field.annotation, path[1:])
    return False
