"""What is given to Kubernetes is what its schemas allow, and wrong values are refused before."""

import functools
import json
import re
import tomllib
from pathlib import Path
from typing import Any
from unittest import mock

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.deploy import objects as deployed
from tests.deploy.objects import DEFAULTS, SETS, SOURCES, helm, objects

pytestmark = pytest.mark.process

VERSIONS = ("1.33.0", "1.34.0", "1.35.0", "1.36.0", "1.37.0")
CUSTOM: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "custom_resources.yaml").read_text(encoding="utf-8"))


@functools.cache
def distinct():
    """Each object that any source has, once; of a JobSet also the Job that it makes."""
    found = [each for source in SOURCES for each in objects(source)]
    found += [
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": each["metadata"], "spec": job["template"]["spec"]}
        for each in found
        if each["kind"] == "JobSet"
        for job in each["spec"]["replicatedJobs"]
    ]
    return list({json.dumps(each, sort_keys=True): each for each in found}.values())


def kind_of(each):
    return f"{each['apiVersion']} {each['kind']}"


@pytest.fixture(scope="module")
def _schemas_are_read_once():
    """Each call would parse all definitions of a version."""
    contents = functools.cache(kubernetes_validate.utils.schema_contents)
    with mock.patch.object(kubernetes_validate.utils, "schema_contents", contents):
        yield


def test_there_are_forty_sets_of_values_which_render_differently():
    assert len(SETS) == 40
    assert len({json.dumps(helm().rendered[name], sort_keys=True) for name in SETS}) == 40


def test_every_value_is_in_one_of_them():
    def leaves(values, path=()):
        found = set()
        for key, value in values.items():
            if (*path, key) in tables and isinstance(value, dict):
                found |= leaves(value, (*path, key))
            else:
                found.add((*path, key))
        return found

    tables = set(deployed.sections())
    given = set.union(*(leaves(values) for values in SETS.values()))
    assert sorted(leaves(DEFAULTS) - given) == []


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.usefixtures("_schemas_are_read_once")
def test_every_object_is_valid(version):
    wrong = []
    for each in distinct():
        if kind_of(each) in CUSTOM:
            continue
        try:
            kubernetes_validate.validate(each, version, strict=True)
        except kubernetes_validate.ValidationError as exc:
            wrong.append(f"{kind_of(each)} {each['metadata']['name']}: {list(exc.path)}: {exc.message}")
    assert wrong == []


@pytest.mark.usefixtures("_schemas_are_read_once")
def test_a_field_that_kubernetes_lacks_is_found():
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": {"containers": [], "grace": 1}}
    with pytest.raises(kubernetes_validate.ValidationError, match="grace"):
        kubernetes_validate.validate(pod, VERSIONS[0], strict=True)


def test_every_custom_resource_has_the_fields_of_its_project():
    wrong, seen = [], set()
    for each in distinct():
        name = kind_of(each)
        if name in CUSTOM:
            seen.add(name)
            assert set(each) == {"apiVersion", "kind", "metadata", "spec"}
            schema = {"$defs": CUSTOM["$defs"], **CUSTOM[name]}
            errors = jsonschema.Draft202012Validator(schema).iter_errors(each["spec"])
            wrong += [f"{name} {each['metadata']['name']}: {list(error.path)}: {error.message}" for error in errors]
    assert wrong == []
    assert seen == set(CUSTOM) - {"$defs"}


def test_helm_finds_no_fault():
    severe = {name: found for name in SETS if (found := [each for each in helm().lint[name] if each["severity"] > 1])}
    assert severe == {}


def test_a_misspelt_key_is_refused_in_every_table():
    wrong = {name: helm().refused[name] for name in deployed.misspelt()}
    assert len(wrong) > 25
    assert [name for name, said in wrong.items() if "additional properties 'misspelt' not allowed" not in said] == []


def test_contradicting_values_are_refused_with_a_way_out():
    for name in deployed.contradicting():
        assert name.rpartition(" ")[0] in helm().refused[name]


def test_a_secret_is_refused_as_a_plain_setting():
    names = list(deployed.secret_settings())
    assert {"ANABRANCH__SERVING__TOKENS__ADMIN", "ANABRANCH__REPLAY__REDIS__URL"} < set(names)
    assert [name for name in names if f"invalid propertyName '{name}'" not in helm().refused[name]] == []


def test_every_table_of_the_schema_allows_only_what_it_names():
    def tables(node, path=""):
        if isinstance(node, dict):
            if node.get("type") == "object" and path not in ("/properties/global",):
                yield path, node
            for key, value in node.items():
                yield from tables(value, f"{path}/{key}")
        elif isinstance(node, list):
            for n, value in enumerate(node):
                yield from tables(value, f"{path}/{n}")

    free = [path for path, node in tables(deployed.SCHEMA) if "additionalProperties" not in node]
    # What is in an affinity is checked by Kubernetes' own schemas.
    assert [path for path in free if not re.search(r"/affinity/properties/\w+$", path)] == []


def test_defaults_are_what_the_schema_describes():
    def keys(values, path=()):
        schema = deployed.schema_at(path)
        if schema.get("additionalProperties") is False and path[-1:] != ("affinity",):
            assert set(schema["properties"]) == set(values) | ({"requests", "limits"} & set(schema["properties"])), path
            for key, value in values.items():
                if isinstance(value, dict):
                    keys(value, (*path, key))

    keys(DEFAULTS)


def test_the_version_of_the_chart_is_that_of_the_program():
    chart = yaml.safe_load((deployed.CHART / "Chart.yaml").read_text(encoding="utf-8"))
    project = tomllib.loads((deployed.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert chart["version"] == chart["appVersion"] == project["version"]
    assert chart["kubeVersion"] == f">={VERSIONS[0]}-0"


def test_an_archive_of_the_chart_has_its_rules_and_its_dashboard():
    assert helm().packaged == helm().rendered["monitoring"]


def test_generated_files_are_what_the_chart_renders():
    assert len(helm().generated) == 3
    stale = [path for path, text in helm().generated if Path(path).read_text(encoding="utf-8") != text]
    assert stale == [], "run python tools/kustomize.py"
