"""What is given to KServe has the fields of its definitions, and runs a pod that Kubernetes and Anabranch accept."""

from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from anabranch.config.loader import load_config

FOLDER = Path(__file__).parents[2] / "deploy/kserve"
OBJECTS = [each for path in sorted(FOLDER.glob("*.yaml")) for each in yaml.safe_load_all(path.read_text("utf-8"))]
(RUNTIME,) = (each for each in OBJECTS if each["kind"] == "ServingRuntime")
SERVICES = [each for each in OBJECTS if each["kind"] == "InferenceService"]


def table(required=(), **properties):
    return {"type": "object", "additionalProperties": False, "required": [*required], "properties": properties}


# After the definitions of KServe 0.15; fields that are not here are errors. Containers and volumes are Kubernetes' own.
TEXT = {"type": "string", "minLength": 1}
PROTOCOLS = {"enum": ["v1", "v2", "grpc-v1", "grpc-v2"]}
COUNT = {"type": "integer", "minimum": 0}
LIST = {"type": "array", "items": {"type": "object"}}
SCHEMAS = {
    "serving.kserve.io/v1alpha1 ServingRuntime": table(
        ["containers"],
        supportedModelFormats={
            "type": "array",
            "items": table(["name"], name=TEXT, version=TEXT, autoSelect={"type": "boolean"}, priority=COUNT),
        },
        protocolVersions={"type": "array", "items": PROTOCOLS},
        multiModel={"type": "boolean"},
        containers={"type": "array", "minItems": 1, "items": {"type": "object", "required": ["name"]}},
        volumes=LIST,
    ),
    "serving.kserve.io/v1beta1 InferenceService": table(
        ["predictor"],
        predictor=table(
            ["model"],
            minReplicas=COUNT,
            maxReplicas=COUNT,
            serviceAccountName=TEXT,
            volumes=LIST,
            model=table(
                ["modelFormat"],
                modelFormat=table(["name"], name=TEXT, version=TEXT),
                protocolVersion=PROTOCOLS,
                runtime=TEXT,
                storageUri={"type": "string", "pattern": "^(s3|gs|pvc|hf|https)://"},
            ),
        ),
    ),
}


@pytest.mark.parametrize("each", OBJECTS, ids=lambda each: each["metadata"]["name"])
def test_each_object_has_the_fields_of_kserve(each):
    assert set(each) == {"apiVersion", "kind", "metadata", "spec"}
    schema = SCHEMAS[f"{each['apiVersion']} {each['kind']}"]
    errors = jsonschema.Draft202012Validator(schema).iter_errors(each["spec"])
    assert [f"{list(error.path)}: {error.message}" for error in errors] == []


def test_a_field_that_kserve_lacks_is_found():
    validator = jsonschema.Draft202012Validator(SCHEMAS["serving.kserve.io/v1beta1 InferenceService"])
    assert not validator.is_valid({"predictor": {"model": {"modelFormat": {"name": "triton"}, "storageURI": "s3://a"}}})


def test_the_service_fits_the_runtime():
    (service,) = (each for each in SERVICES if each["spec"]["predictor"]["model"].get("runtime"))
    model = service["spec"]["predictor"]["model"]
    formats = [(each["name"], each["version"]) for each in RUNTIME["spec"]["supportedModelFormats"]]
    assert model["runtime"] == RUNTIME["metadata"]["name"]
    assert (model["modelFormat"]["name"], model["modelFormat"]["version"]) in formats
    assert model["protocolVersion"] in RUNTIME["spec"]["protocolVersions"]


def test_the_pod_is_one_that_kubernetes_takes_with_all_that_is_mounted():
    volumes = [*RUNTIME["spec"]["volumes"], *SERVICES[0]["spec"]["predictor"]["volumes"]]
    (container,) = RUNTIME["spec"]["containers"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "digits"}}
    kubernetes_validate.validate(
        {**pod, "spec": {"containers": [container], "volumes": volumes}}, "1.33.0", strict=True
    )
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in volumes}
    assert container["name"] == "kserve-container"  # which KServe looks for


def test_the_settings_are_those_of_a_server(tmp_path):
    (container,) = RUNTIME["spec"]["containers"]
    environment = {each["name"]: each.get("value", "a" * 32) for each in container["env"]}
    environment["ANABRANCH__SERVING__TOKENS__ADMIN"] = "b" * 32
    (tmp_path / "pipeline.toml").write_text("""
name = "digits"
[stream]
bootstrap_servers = "kafka:9092"
topics = ["digits"]
[schema.features.x]
dtype = "float32"
[schema.label]
name = "y"
classes = 2
[model]
factory = "my_model:build"
[storage]
url = "s3://models/digits"
""")
    serving = load_config(tmp_path / "pipeline.toml", environment).pipeline.serving
    ports = [each["containerPort"] for each in container["ports"]]
    assert ([serving.port], serving.versions_from) == (ports, "storage")
    assert container["args"][:2] == ["serve", "-c"]
