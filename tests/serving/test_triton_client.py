"""The stock client of the protocol, unchanged: `tritonclient[http]`."""

import warnings

import numpy as np
import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of gevent and its event loop, at import
    tritonclient = pytest.importorskip("tritonclient.http")


@pytest.fixture
def client(deploy, served):
    publisher = deploy("mixed")
    generator = torch.Generator().manual_seed(0)
    weights = {
        "words.weight": torch.randn(8, 3, generator=generator),
        "numbers.weight": torch.randn(3, 2, generator=generator),
        "numbers.bias": torch.randn(3, generator=generator),
    }
    publisher.publish(4, weights=weights)
    with served(publisher) as server:
        client = tritonclient.InferenceServerClient(server.address)
        yield client, weights
        client.close()


def inputs(words, sizes, binary):
    word = tritonclient.InferInput("word", [len(words), 2], "BYTES")
    word.set_data_from_numpy(np.array(words, dtype=object), binary_data=binary)
    size = tritonclient.InferInput("size", [len(words), 2], "FP32")
    size.set_data_from_numpy(np.array(sizes, np.float32), binary_data=binary)
    return [word, size]


def expected(weights, words, sizes):
    ids = torch.tensor([[{"red": 1, "green": 2, "blue": 3}.get(word, 0) for word in pair] for pair in words])
    logits = torch.tensor(sizes) @ weights["numbers.weight"].T + weights["numbers.bias"]
    return (logits + weights["words.weight"][ids].sum(dim=1)).softmax(dim=1).numpy()


WORDS = [["red", "blue"], ["green", "ünknown"], ["", "blue"]]
SIZES = [[1.0, 2.0], [-3.0, 0.5], [0.0, 0.0]]


@pytest.mark.slow
def test_it_finds_the_server_ready_and_reads_its_metadata(client):
    triton, _ = client
    assert triton.is_server_live()
    assert triton.is_server_ready()
    assert triton.is_model_ready("tiny")
    assert triton.is_model_ready("tiny", "4")
    assert not triton.is_model_ready("tiny", "5")
    assert triton.get_server_metadata()["name"] == "anabranch"
    metadata = triton.get_model_metadata("tiny")
    assert metadata["versions"] == ["4"]
    assert metadata["inputs"][0] == {"name": "word", "datatype": "BYTES", "shape": [-1, 2]}


@pytest.mark.slow
@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
def test_it_gets_the_same_predictions_in_json_and_in_binary(client, binary_in, binary_out):
    triton, weights = client
    outputs = [
        tritonclient.InferRequestedOutput(name, binary_data=binary_out) for name in ("probabilities", "prediction")
    ]
    result = triton.infer("tiny", inputs(WORDS, SIZES, binary_in), outputs=outputs, request_id="r1", model_version="4")
    reference = expected(weights, WORDS, SIZES)
    np.testing.assert_allclose(result.as_numpy("probabilities"), reference, rtol=1e-5)
    assert result.as_numpy("probabilities").dtype == np.float32
    assert result.as_numpy("prediction").tolist() == reference.argmax(axis=1).tolist()
    response = result.get_response()
    assert response["id"] == "r1"
    assert response["model_version"] == "4"
    assert response["parameters"]["trained_through"] == "events:0=40"


@pytest.mark.slow
def test_without_outputs_it_gets_all_of_them_and_defaults_fill_what_it_leaves_out(client):
    triton, weights = client
    result = triton.infer("tiny", inputs(WORDS, SIZES, True)[:1])
    np.testing.assert_allclose(result.as_numpy("probabilities"), expected(weights, WORDS, [[0.5, 1.5]] * 3), rtol=1e-5)
    assert result.as_numpy("prediction").dtype == np.int64


@pytest.mark.slow
def test_it_requests_its_own_writes_and_reads_error_sentences(client):
    triton, _ = client
    asked = inputs(WORDS, SIZES, True)
    triton.infer("tiny", asked, parameters={"min_trained_through": "events:0=40"})
    for arguments, sentence in (
        ({"parameters": {"min_trained_through": "events:0=41", "timeout_ms": 20}}, "the time is over"),
        ({"model_version": "9"}, "version 9 is not resident; resident: 4"),
        ({"parameters": {"min_trained_through": "?"}}, "min_trained_through"),
    ):
        with pytest.raises(tritonclient.InferenceServerException, match=sentence):
            triton.infer("tiny", asked, **arguments)
