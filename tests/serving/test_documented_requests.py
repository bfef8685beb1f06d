"""The requests of docs/guides/serving.md, sent by curl, unchanged, to the model of that page."""

import dataclasses
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "serving.md").read_text(encoding="utf-8")
SCRIPTS = re.findall(r"<!-- run: curl( error)? -->\n```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")


@pytest.fixture
def address(deploy, served):
    publisher = deploy("linear")
    publisher.deployment = dataclasses.replace(publisher.deployment, name="flow")
    weights = {"weight": torch.eye(3, 4), "bias": torch.zeros(3)}
    publisher.publish(17, weights=weights, offsets={"events:0": 4711})
    with served(publisher) as server:
        yield server.address


@pytest.mark.slow
def test_the_documented_requests_get_the_documented_answers(address, tmp_path):
    replies = []
    for error, script in SCRIPTS:
        assert "localhost:8000" in script
        done = subprocess.run(
            ["sh", "-e"],
            input=script.replace("localhost:8000", address),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        if done.stdout:
            replies.append(json.loads(done.stdout))
            assert ("error" in replies[-1]) == bool(error), replies[-1]
    binary = (tmp_path / "reply.bin").read_bytes()
    assert b'"binary_data_size":8' in binary
    shown = [json.loads(text) for text in re.findall(r"```json\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)]
    assert len(SCRIPTS) == 5
    for expected in shown:
        assert any(shape(expected) == shape(reply) for reply in replies), expected


def shape(document):
    """What a document says, without the model's numbers."""
    if isinstance(document, dict):
        return {key: shape(value) for key, value in document.items() if key != "data"}
    return [shape(value) for value in document] if isinstance(document, list) else document
