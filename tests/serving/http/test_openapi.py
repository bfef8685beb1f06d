"""The OpenAPI document, and schemathesis, which tests the server against it."""

import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import torch

TOKENS = {"read": "a-token", "admin": "another"}
BEARER = {"Authorization": "Bearer a-token"}
OPEN = {"/", "/v2/health/live", "/v2/health/ready"}
ZEROS = {"words.weight": (8, 3), "numbers.weight": (3, 2), "numbers.bias": (3,)}


@pytest.fixture
def mixed(deploy):
    """A deployment with a version whose inputs are strings and numbers."""
    publisher = deploy("mixed")
    publisher.publish(1, weights={name: torch.zeros(shape) for name, shape in ZEROS.items()})
    return publisher


@pytest.mark.slow
def test_every_route_is_described_with_its_errors_and_what_it_answers(mixed, served):
    with served(mixed, tokens=TOKENS) as server:
        assert httpx.get(f"{server.url}/openapi.json").status_code == 401
        document = httpx.get(f"{server.url}/openapi.json", headers=BEARER).json()
        metadata = httpx.get(f"{server.url}/v2/models/tiny", headers=BEARER).json()
    assert {
        "/v2",
        "/v2/health/live",
        "/v2/models/{name}/infer",
        "/v2/models/{name}/versions/{version}/infer",
        "/metrics",
        "/api/history",
    } <= document["paths"].keys()
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert "500" in operation["responses"], path
            assert ("401" in operation["responses"]) == (path not in OPEN), path
            assert operation["responses"]["200"]["content"], path
            assert operation["security"] == ([] if path in OPEN else [{"bearer": []}])
    infer = document["paths"]["/v2/models/{name}/infer"]["post"]["responses"]
    assert infer.keys() == {"200", "400", "401", "404", "413", "415", "429", "500", "503", "504"}
    assert "Retry-After" in infer["429"]["headers"]
    order = document["paths"]["/api/versions/{version}:{action}"]["post"]
    assert order["responses"].keys() == {"200", "401", "403", "404", "409", "500"}
    assert order["parameters"][1]["schema"]["enum"] == ["promote", "reject", "rollback", "pin", "unpin"]
    tensor = document["components"]["schemas"]["InputTensor"]["properties"]
    assert tensor["name"]["enum"] == [spec["name"] for spec in metadata["inputs"]] == ["word", "size"]
    assert tensor["datatype"]["enum"] == ["BYTES", "FP32"]


@pytest.mark.slow
def test_the_example_in_the_description_is_answered(mixed, served):
    with served(mixed) as server:
        document = httpx.get(f"{server.url}/openapi.json").json()
        example = document["components"]["schemas"]["InferBody"]["example"]
        response = httpx.post(server.infer, json=example)
        elsewhere = httpx.post(server.infer, json=example, headers={"Host": "elsewhere.example"})
    assert response.status_code == 200, response.text
    assert elsewhere.status_code == 403
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert "security" not in operation
            assert ("403" in operation["responses"]) == (path not in OPEN), path


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("token", "paths"), [("admin", "."), ("read", "/api/versions")])
def test_schemathesis_finds_no_violation_and_no_5xx(mixed, served, tmp_path, token, paths):
    program = Path(sys.executable).with_name("schemathesis")
    # That data has as many elements as its shape says cannot be written as a schema: not all that fits is accepted.
    options = ["--max-examples", "5", "--phases", "examples,coverage,fuzzing", "--include-path-regex", paths]
    options += ["--exclude-checks", "positive_data_acceptance"]
    with served(mixed, tokens=TOKENS) as server:
        done = subprocess.run(
            [program, "run", f"{server.url}/openapi.json", "-H", f"Authorization: Bearer {TOKENS[token]}", *options],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        counted = server.report().requests
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    assert token == "read" or counted["200"] > 0
    assert not [code for code in counted if code.startswith("5")]
