"""Requests for the embedding of their rows."""

import asyncio
import dataclasses
from datetime import timedelta

import httpx
import numpy as np
import pytest
import torch

from anabranch.learner.device.lease import hold_server
from anabranch.learner.errors import ModelError
from anabranch.serving.inference.batcher import Batcher
from anabranch.serving.model.loaded_version import load_version
from anabranch.serving.protocol.codec import EMBEDDING
from anabranch.serving.settings import ServingSettings

SIZES = [[1.0, 2.0], [-3.0, 0.5], [0.0, 1.0]]
WEIGHTS = {
    "words.weight": torch.ones(8, 3),
    "numbers.weight": torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]]),
    "numbers.bias": torch.tensor([0.0, 0.0, 0.5]),
}
EXPECTED = (torch.tensor(SIZES) @ WEIGHTS["numbers.weight"].T + WEIGHTS["numbers.bias"]).tolist()


@pytest.fixture
def embedding(deploy):
    """A deployment whose model has an embedding: what its numbers are mapped to."""
    publisher = deploy("mixed")
    model = publisher.deployment.model.model_copy(update={"embedding": "numbers"})
    publisher.deployment = dataclasses.replace(publisher.deployment, model=model)
    publisher.publish(1, weights=WEIGHTS)
    return publisher


def body(**members):
    inputs = [
        {"name": "word", "shape": [3, 2], "datatype": "BYTES", "data": ["red"] * 6},
        {"name": "size", "shape": [3, 2], "datatype": "FP32", "data": SIZES},
    ]
    return {"inputs": inputs, **members}


@pytest.mark.slow
def test_the_embedding_is_returned_with_the_outputs_when_it_is_requested(embedding, served):
    with served(embedding) as server:
        plain = httpx.post(server.infer, json=body()).json()
        asked = httpx.post(server.infer, json=body(parameters={"return_embedding": True})).json()
        alone = httpx.post(
            server.infer, json=body(parameters={"return_embedding": True}, outputs=[{"name": "embedding"}])
        ).json()
        binary = httpx.post(server.infer, json=body(parameters={"return_embedding": True, "binary_data_output": True}))
        refused = httpx.post(server.infer, json=body(outputs=[{"name": "embedding"}]))
    (found,) = [output for output in asked["outputs"] if output["name"] == EMBEDDING]
    assert found["shape"] == [3, 3]
    assert found["datatype"] == "FP32"
    np.testing.assert_allclose(np.reshape(found["data"], (3, 3)), EXPECTED)
    assert [output for output in asked["outputs"] if output["name"] != EMBEDDING] == plain["outputs"]
    assert alone["outputs"] == [found]
    assert np.array(EXPECTED, "<f4").tobytes() in binary.content
    assert refused.status_code == 400


@pytest.mark.slow
@pytest.mark.parametrize(
    ("value", "sentence"),
    [(True, "this model has no embedding; name one of its modules in model.embedding"), (1, "true")],
)
def test_without_an_embedding_it_is_a_400(numbers, served, body_of, value, sentence):
    numbers.publish(1)
    with served(numbers) as server:
        answer = httpx.post(server.infer, json=body_of(1, parameters={"return_embedding": value}))
        assert answer.status_code == 400
        assert sentence in answer.json()["error"]
        assert httpx.post(server.infer, json=body_of(1, parameters={"return_embedding": False})).status_code == 200


def test_a_missing_module_ends_the_start(embedding):
    model = embedding.deployment.model.model_copy(update={"embedding": "nowhere"})
    with pytest.raises(
        ModelError, match=r'model.embedding = "nowhere": the model has no such module, but words, numbers'
    ):
        dataclasses.replace(embedding.deployment, model=model).check()


class Embeds:
    """A classification whose embedding are the numbers themselves."""

    def embed(self, model, features):
        return features["size"]


def test_a_batch_of_requests_with_and_without_the_embedding_gives_each_its_own(embedding, tmp_path):
    deployment = embedding.deployment
    version = load_version(deployment, deployment.versions.manifest(1), 8)

    async def ask():
        settings = ServingSettings.model_validate({"max_delay": "20ms"})
        with hold_server(tmp_path, timedelta(milliseconds=20)) as mark, Batcher(settings, pytest.fail, mark) as batcher:
            size = np.array(SIZES, np.float32)
            word = np.zeros((1, 2), np.int64)
            return await asyncio.gather(
                *(
                    batcher.predict(version, {"word": word, "size": size[row : row + 1]}, 1, embed=row != 1)
                    for row in range(3)
                )
            )

    first, second, third = asyncio.run(ask())
    assert EMBEDDING not in second
    np.testing.assert_allclose(np.concatenate([first[EMBEDDING], third[EMBEDDING]]), [EXPECTED[0], EXPECTED[2]])


def test_a_task_that_computes_the_embedding_is_used(embedding, monkeypatch):
    model = embedding.deployment.model.model_copy(update={"embedding": ""})
    deployment = dataclasses.replace(embedding.deployment, model=model)
    assert not deployment.embeds
    monkeypatch.setattr(type(deployment.task), "embed", Embeds.embed, raising=False)
    assert deployment.embeds
    version = load_version(deployment, deployment.versions.manifest(1), 8)
    features = {"word": np.zeros((3, 2), np.int64), "size": np.array(SIZES, np.float32)}
    np.testing.assert_allclose(version.run(features, embed=True)[EMBEDDING], SIZES)
    assert EMBEDDING not in version.run(features)
