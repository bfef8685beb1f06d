"""The codec of the Open Inference Protocol: round trips, error sentences, and how far a version is trained."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.serving.errors import BadRequestError, RequestError, TooLargeError
from anabranch.serving.model.loaded_version import progress_of
from anabranch.serving.protocol.codec import Signature
from anabranch.serving.protocol.tensors import DATATYPES, TensorSpec, read_binary, read_json, write_binary, write_json
from tests.support.manifests import manifest_of
from tests.support.tokenizer import write_tokenizer

SCHEMA = Schema(
    SchemaSettings.model_validate(
        {
            "features": {
                "x": {"dtype": "float32", "shape": [2, 2]},
                "word": {"dtype": "string", "encode": {"vocab": ["red", "green"]}, "default": "red"},
                "n": {"dtype": "int8", "shape": [], "default": 3, "max": 99},
            },
            "label": {"name": "y", "classes": 3},
        }
    )
)
OUTPUTS = [
    TensorSpec("prediction", np.dtype(np.int64), ()),
    TensorSpec("probabilities", np.dtype(np.float32), (3,)),
]
SIGNATURE = Signature(SCHEMA, OUTPUTS, max_rows=10)
X = {"name": "x", "shape": [1, 2, 2], "datatype": "FP32", "data": [1, 2, 3, 4]}

numeric = st.sampled_from(sorted(DATATYPES)).map(np.dtype)
shapes = arrays.array_shapes(min_dims=1, max_dims=3, max_side=4)


def body(**members):
    return json.dumps({"inputs": [X], **members}).encode()


def changed(**members):
    return body(inputs=[{**X, **members}])


def finite(dtype, shape):
    elements = {"allow_nan": False, "allow_infinity": False} if dtype.kind == "f" else {}
    return arrays.arrays(dtype, shape, elements=arrays.from_dtype(dtype, **elements))  # type: ignore[arg-type]


@given(st.data(), numeric, shapes)
def test_numbers_survive_json_flat_and_nested_and_binary(data, dtype, shape):
    array = data.draw(finite(dtype, shape))
    spec = TensorSpec("t", dtype, shape[1:])
    for text in (json.dumps(write_json(array)), json.dumps(array.tolist())):
        read = read_json(spec, text.encode(), shape[0])
        assert read.dtype == dtype
        np.testing.assert_array_equal(read, array)
    np.testing.assert_array_equal(read_binary(spec, memoryview(write_binary(array)), shape[0]), array)


@given(st.lists(st.text(), min_size=1, max_size=6))
def test_strings_survive_json_and_binary(texts):
    spec = TensorSpec("t", None, ())
    texts = [text.encode("utf-8", "replace").decode() for text in texts]
    array = np.array(texts, dtype=object)
    assert read_json(spec, json.dumps(texts).encode(), len(texts)).tolist() == texts
    assert read_binary(spec, memoryview(write_binary(array)), len(texts)).tolist() == texts


@given(st.binary(max_size=200), st.none() | st.integers(0, 300))
def test_arbitrary_bytes_are_a_request_error_at_worst(content, header_length):
    with pytest.raises(RequestError):
        SIGNATURE.decode(content, header_length)


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.data())
def test_a_request_with_any_member_replaced_is_answered_or_refused(data):
    document: dict[str, Any] = json.loads(body(id="a", parameters={"p": 1}, outputs=[{"name": "prediction"}]))
    document["inputs"].append({"name": "word", "shape": [1], "datatype": "BYTES", "data": ["red"]})
    members: list[tuple[Any, Any]] = [(document, key) for key in document]
    members += [(tensor, key) for tensor in document["inputs"] for key in (*tensor, "parameters")]
    members += [(document["outputs"][0], key) for key in ("name", "parameters")]
    members += [(document["parameters"], key) for key in ("min_trained_through", "timeout_ms", "binary_data_output")]
    container, key = data.draw(st.sampled_from(range(len(members))).map(lambda i: members[i]))
    container[key] = data.draw(junk)
    try:
        request = SIGNATURE.decode(json.dumps(document).encode(), None)
    except RequestError:
        return
    for name, feature in {feature.name: feature for feature in SCHEMA.features}.items():
        assert request.features[name].shape == (request.rows, *feature.shape)
        assert request.features[name].dtype == feature.dtype


def test_features_with_a_default_may_be_left_out_and_strings_become_ids():
    request = SIGNATURE.decode(body(), None)
    assert request.features["word"].tolist() == [1]
    assert request.features["n"].tolist() == [3]
    word = {"name": "word", "shape": [1], "datatype": "BYTES", "data": ["green"]}
    request = SIGNATURE.decode(body(inputs=[X, word]), None)
    assert request.features["word"].tolist() == [2]


def test_a_value_may_be_missing_where_the_schema_says_so():
    features = {"x": {"dtype": "float32", "shape": [2], "missing": "mean"}}
    schema = Schema(SchemaSettings.model_validate({"features": features, "label": {"name": "y", "classes": 2}}))
    given = TensorSpec("x", schema.features[0].dtype, (2,), may_be_nan=True)
    for data in (b"[1, null, 3, 4]", b"[[1, null], [3, 4]]"):
        np.testing.assert_array_equal(read_json(given, data, 2), np.array([[1, np.nan], [3, 4]], np.float32))
    binary = np.array([1, np.nan], "<f4").tobytes()
    np.testing.assert_array_equal(read_binary(given, memoryview(binary), 1), [[1, np.nan]])
    for spec, value in ((given, np.inf), (TensorSpec("x", given.dtype, (2,)), np.nan)):
        with pytest.raises(BadRequestError, match="NaN or infinit"):
            read_binary(spec, memoryview(np.array([1, value], "<f4").tobytes()), 1)
    with pytest.raises(BadRequestError):
        read_json(TensorSpec("x", given.dtype, (2,)), b"[1, null]", 1)


def test_binary_inputs_follow_the_json_in_their_order():
    x = np.arange(8, dtype="<f4")
    words = write_binary(np.array(["green", "?"], dtype=object))
    header = json.dumps(
        {
            "inputs": [
                {"name": "word", "shape": [2], "datatype": "BYTES", "parameters": {"binary_data_size": len(words)}},
                {"name": "n", "shape": [2], "datatype": "INT8", "data": [7, -7]},
                {"name": "x", "shape": [2, 2, 2], "datatype": "FP32", "parameters": {"binary_data_size": 32}},
            ]
        }
    ).encode()
    request = SIGNATURE.decode(header + words + x.tobytes(), len(header))
    assert request.features["word"].tolist() == [2, 0]
    assert request.features["n"].tolist() == [7, -7]
    np.testing.assert_array_equal(request.features["x"].reshape(-1), x)


def test_a_body_without_json_is_the_one_input():
    settings = {"features": {"x": {"dtype": "int16", "shape": [3], "max": 5}}, "label": {"name": "y", "classes": 3}}
    signature = Signature(Schema(SchemaSettings.model_validate(settings)), OUTPUTS, max_rows=10)
    request = signature.decode(np.arange(6, dtype="<i2").tobytes(), 0)
    assert request.features["x"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert request.outputs == {"prediction": True, "probabilities": True}
    with pytest.raises(BadRequestError, match="'x' has a value that is not 5 or less"):
        signature.decode(np.arange(1, 7, dtype="<i2").tobytes(), 0)
    with pytest.raises(BadRequestError, match="no whole number of rows"):
        signature.decode(b"12345", 0)
    with pytest.raises(BadRequestError, match="one input"):
        SIGNATURE.decode(b"12345678", 0)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "not an inference request"),
        (b"{", "not an inference request"),
        (b"[" * 100_000, "not an inference request"),
        (b'{"inputs":' + b"[" * 100_000, "not an inference request"),
        (b'{"inputs": [{"name": "x", "data":' + b"[" * 100_000, "nested too deeply"),
        (b'{"inputs": [{"name": "\xff"}]}', "not an inference request"),
        (body(inputs=[]), "no inputs; inputs are x, word, n"),
        (body(inputs=[{"name": "n", "shape": [1], "datatype": "INT8", "data": [1]}]), "'x' is missing"),
        (body(inputs=[X, X]), "given twice"),
        (changed(name="z"), "no input 'z'; inputs are x, word, n"),
        (changed(datatype="FP64"), "datatype FP32, not 'FP64'"),
        (changed(datatype="BF16"), "datatype FP32, not 'BF16'"),
        (changed(shape=[]), r"shape \[-1, 2, 2\], not \[\]"),
        (changed(shape=[1, 4]), r"shape \[-1, 2, 2\], not \[1, 4\]"),
        (changed(shape=[0, 2, 2], data=[]), "0 rows"),
        (changed(shape=[-1, 2, 2]), "-1 rows"),
        (changed(data=[1, 2, 3]), "3 elements, but its shape asks for 4"),
        (changed(data=[1, 2, 3, 4, 5]), "5 elements"),
        (changed(data=[[1, 2], [3, 4]]), r"data of shape|not FP32 data"),
        (changed(data=[[[1, 2, 3], [4]]]), "rows differ in length"),
        (changed(data=[1, 2, 3, "4"]), "not FP32 data"),
        (changed(data=[1, 2, 3, True]), "not FP32 data"),
        (changed(data=[1, 2, 3, None]), "not FP32 data"),
        (changed(data=[1, 2, 3, 1e39]), "NaN or infinite as FP32"),
        (changed(data=None), "1 elements"),
        (changed(data={"a": 1, "b": 2, "c": 3, "d": 4}), "not FP32 data"),
        (body().replace(b"3, 4", b"3, NaN"), "NaN are a missing value, which"),
        (body().replace(b"3, 4", b"3, 1e400"), "out of range"),
        (body(inputs=[{"name": "x", "shape": [1, 2, 2], "datatype": "FP32"}]), "neither data nor binary_data_size"),
        (changed(parameters={"binary_data_size": 16}), "both data and binary_data_size"),
        (body(outputs=[{"name": "z"}]), "no output 'z'; outputs are prediction, probabilities"),
        (body(parameters={"min_trained_through": "events"}), "not of the form"),
        (body(parameters={"min_trained_through": 7}), "min_trained_through is 7"),
        (body(parameters={"timeout_ms": -1}), "timeout_ms is -1"),
        (body(parameters={"timeout_ms": 5}), "timeout_ms bounds the wait for min_trained_through"),
        (changed(shape=[-1, 2, 2]), "input 'x' has -1 rows; it needs one at least"),
        (body(parameters={"priority": 1}), "the request has the parameter priority = 1, which this server does not"),
        (body(parameters={"timeout": 1}), "timeout = 1, which this server does not serve: end the call in"),
        (body(parameters={"sequence_id": 7}), "sequence_id = 7, .* requests share no state"),
        (body(parameters={"sequence_start": True}), "sequence_start = True"),
        (body(parameters={"sequence_end": True}), "sequence_end = True"),
        (body(parameters={"binary_data_output": "yes"}), "binary_data_output is 'yes'; write true or false"),
        (body(outputs=[{"name": "prediction"}] * 2), "output 'prediction' is requested twice"),
        (
            body(outputs=[{"name": "prediction", "parameters": {"classification": 2}}]),
            "output 'prediction' has the parameter classification = 2, but not a number for each class",
        ),
        (
            body(outputs=[{"name": "probabilities", "parameters": {"classification": 0}}]),
            "classification is 0; write how many, 1 or more",
        ),
        (body(parameters={"classification": 2}), "the request has the parameter classification = 2, .* at an output"),
        (
            body(outputs=[{"name": "prediction", "parameters": {"shared_memory_region": "a"}}]),
            "shared_memory_region = 'a'",
        ),
        (body(outputs=[{"name": "prediction", "parameters": {"binary_data": 1}}]), "binary_data is 1; write true"),
        (changed(parameters={"shared_memory_region": "a"}), "input 'x' has the parameter shared_memory_region"),
        (body(parameters={"timeout_ms": True}), "timeout_ms is True"),
        (body(parameters={"timeout_ms": "5"}), "timeout_ms is '5'"),
        (body(parameters={"a": {"b": 1}}), "not an inference request"),
        (
            body(inputs=[X, {"name": "n", "shape": [2], "datatype": "INT8", "data": [1, 2]}]),
            "input 'n' has 2 rows, but input 'x' has 1",
        ),
        (body(inputs=[X, {"name": "n", "shape": [1], "datatype": "INT8", "data": [300]}]), "out of bounds for int8"),
        (body(inputs=[X, {"name": "n", "shape": [1], "datatype": "INT8", "data": [100]}]), "'n' has .* not 99 or less"),
        (body(inputs=[X, {"name": "n", "shape": [1], "datatype": "INT8", "data": [1.5]}]), "Expected `int`"),
        (body(inputs=[X, {"name": "word", "shape": [1], "datatype": "BYTES", "data": [1]}]), "Expected `str`"),
    ],
)
def test_invalid_requests_are_refused_in_a_sentence_that_names_the_part(content, sentence):
    with pytest.raises(BadRequestError, match=sentence):
        SIGNATURE.decode(content, None)


WORD = {"name": "word", "shape": [1], "datatype": "BYTES", "data": ["a,b"]}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (changed(shape=[0] * 100_000), r"has shape \[-1, 2, 2\], not \[0, 0, 0.*\.\.\."),
        (body(parameters={f"p{n}": n for n in range(65)}), "65 parameters; there may be 64"),
        (body(parameters={f"p{n}": n for n in range(20_000)}), "parameters has .* bytes; it may have 131072"),
        (changed(parameters={f"p{n}": n for n in range(65)}), "65 parameters; there may be 64"),
        (body(parameters={"min_trained_through": "e:0=1," * 20_000}), "120000 characters; it may have 65536"),
        (body(parameters={"min_trained_through": "e" * 60_000}), "min_trained_through: 'e{99}\\.\\.\\."),
        (body(outputs=[{"name": "prediction"}] * 200), "outputs has 4800 bytes, for a model that has 2 outputs"),
        (body(id="i" * 1025), "id has 1025 characters; it may have 1024"),
        (body(z=[1] * 400_000), "bytes besides its data; it may have 1000000"),
        (body(inputs=[X, {**WORD, "data": [""] * 1000}]), "more elements than its shape asks for, which is 1"),
        (body(inputs=[X, {**WORD, "data": ["\\"] * 1000}]), "'word' (is not|has data|has more)"),
        (changed(name="\1" * 100_000), "no input"),
        (changed(datatype="\1" * 100_000), "datatype FP32, not"),
    ],
)
def test_needlessly_long_requests_are_refused_in_a_short_sentence(content, sentence):
    with pytest.raises(RequestError, match=sentence) as caught:
        SIGNATURE.decode(content, None)
    assert len(str(caught.value)) < 700


def test_strings_may_have_commas_quotes_and_backslashes():
    texts = ["red", 'a","b', "\\", '\\"', ""]
    tensor = {**WORD, "shape": [5], "data": texts}
    found = read_json(TensorSpec("word", None, ()), json.dumps(tensor["data"]).encode(), 5)
    assert found.tolist() == texts


@pytest.mark.parametrize(
    ("size", "tail", "sentence"),
    [
        (16, b"", "0 bytes are left"),
        (16, b"x" * 15, "15 bytes are left"),
        (16, b"x" * 17, "1 bytes of binary data belong to no input"),
        (15, b"x" * 15, "15 bytes, but FP32 of shape"),
        (-1, b"x" * 16, "binary_data_size -1"),
        (True, b"x", "binary_data_size True"),
        ("16", b"x" * 16, "binary_data_size '16'"),
        (16, np.array([1, 2, 3, np.nan], "<f4").tobytes(), "NaN or infinite"),
    ],
)
def test_binary_data_of_the_wrong_size_is_refused(size, tail, sentence):
    tensor = {"name": "x", "shape": [1, 2, 2], "datatype": "FP32", "parameters": {"binary_data_size": size}}
    header = json.dumps({"inputs": [tensor]}).encode()
    with pytest.raises(BadRequestError, match=sentence):
        SIGNATURE.decode(header + tail, len(header))


@pytest.mark.parametrize("header_length", [1, 10**9])
def test_a_header_length_that_does_not_fit_the_body_is_refused(header_length):
    with pytest.raises(BadRequestError):
        SIGNATURE.decode(body(), header_length)


@pytest.mark.parametrize(
    ("blob", "sentence"),
    [
        (b"\x01", "reaches beyond"),
        (b"\x02\0\0\0a", "reaches beyond"),
        (b"\xff\xff\xff\xffabc", "reaches beyond"),
        (b"\x01\0\0\0\xff", "not UTF-8"),
        (b"\x01\0\0\0a\x01\0\0\0b", "1 strings in 5 of 10 bytes"),
        (b"", "0 strings"),
    ],
)
def test_binary_strings_with_wrong_lengths_are_refused(blob, sentence):
    with pytest.raises(BadRequestError, match=sentence):
        read_binary(TensorSpec("t", None, ()), memoryview(blob), 1)


def test_a_bool_byte_is_0_or_1():
    with pytest.raises(BadRequestError, match="neither 0 nor 1"):
        read_binary(TensorSpec("t", np.dtype(np.bool_), ()), memoryview(b"\0\x02"), 2)


def test_more_rows_than_the_queue_are_too_large_before_their_data_is_read():
    with pytest.raises(TooLargeError, match="1000000000 rows"):
        SIGNATURE.decode(changed(shape=[10**9, 2, 2]), None)


ANSWERS = {
    "prediction": np.array([2]),
    "probabilities": np.array([[0.25, 0.25, 0.5]], np.float32),
}


def test_a_reply_echoes_the_id_and_names_its_version():
    request = SIGNATURE.decode(body(id="abc"), None)
    content, length = SIGNATURE.encode(request, ANSWERS, "digits", "7", {"trained_through": "events:0=3"})
    assert length is None
    assert json.loads(content) == {
        "model_name": "digits",
        "model_version": "7",
        "id": "abc",
        "parameters": {"trained_through": "events:0=3"},
        "outputs": [
            {"name": "prediction", "datatype": "INT64", "shape": [1], "data": [2]},
            {"name": "probabilities", "datatype": "FP32", "shape": [1, 3], "data": [0.25, 0.25, 0.5]},
        ],
    }


@pytest.mark.parametrize(
    ("requested", "parameters", "expected"),
    [
        (None, {}, {"prediction": False, "probabilities": False}),
        (None, {"binary_data_output": True}, {"prediction": True, "probabilities": True}),
        ([{"name": "probabilities"}], {}, {"probabilities": False}),
        ([{"name": "probabilities", "parameters": {"binary_data": True}}], {}, {"probabilities": True}),
        (
            [{"name": "prediction", "parameters": {"binary_data": False}}, {"name": "probabilities"}],
            {"binary_data_output": True},
            {"prediction": False, "probabilities": True},
        ),
    ],
)
def test_outputs_are_the_requested_ones_and_binary_where_requested(requested, parameters, expected):
    request = SIGNATURE.decode(body(outputs=requested, parameters=parameters), None)
    assert request.outputs == expected
    content, length = SIGNATURE.encode(request, ANSWERS, "digits", "7", {"trained_through": ""})
    header = json.loads(content[:length])
    position = length or len(content)
    for output in header["outputs"]:
        if expected[output["name"]]:
            size = output["parameters"]["binary_data_size"]
            assert content[position : position + size] == ANSWERS[output["name"]].tobytes()
            position += size
        else:
            assert output["data"] == ANSWERS[output["name"]].reshape(-1).tolist()
    assert position == len(content)


def test_metadata_has_minus_one_for_rows(deploy):
    outputs = [spec.metadata() for spec in deploy("mixed").deployment.outputs()]
    assert outputs == [
        {"name": "prediction", "datatype": "INT64", "shape": [-1]},
        {"name": "probabilities", "datatype": "FP32", "shape": [-1, 3]},
    ]
    assert [spec.metadata() for spec in SIGNATURE.inputs.values()] == [
        {"name": "x", "datatype": "FP32", "shape": [-1, 2, 2]},
        {"name": "word", "datatype": "BYTES", "shape": [-1]},
        {"name": "n", "datatype": "INT8", "shape": [-1]},
    ]
    (output,) = deploy("number").deployment.outputs()
    assert output.metadata() == {"name": "prediction", "datatype": "FP32", "shape": [-1]}


INTEGERS = [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]


@given(st.data(), st.sampled_from(INTEGERS))
def test_no_integer_outside_of_its_bounds_passes_whatever_the_form_of_the_request(data, name):
    dtype = np.dtype(name)
    integers = st.integers(int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
    low, high = sorted(data.draw(st.tuples(integers, integers)))
    bounds = data.draw(st.sampled_from([{"min": low}, {"max": high}, {"min": low, "max": high}]))
    near = st.sampled_from([low - 1, low, high, high + 1]).filter(lambda value: np.iinfo(dtype).min <= value)
    values = data.draw(st.lists(integers | near.filter(lambda value: value <= np.iinfo(dtype).max), min_size=1))
    settings = {"features": {"n": {"dtype": name, **bounds}}, "label": {"name": "y", "classes": 3}}
    signature = Signature(Schema(SchemaSettings.model_validate(settings)), OUTPUTS, max_rows=1000)
    tensor = {"name": "n", "shape": [len(values)], "datatype": DATATYPES[name]}
    raw = np.array(values, dtype.newbyteorder("<")).tobytes()
    head = json.dumps({"inputs": [{**tensor, "parameters": {"binary_data_size": len(raw)}}]}).encode()
    inside = all(bounds.get("min", value) <= value <= bounds.get("max", value) for value in values)
    for request, header_length in (
        (json.dumps({"inputs": [{**tensor, "data": values}]}).encode(), None),
        (head + raw, len(head)),
        (raw, 0),
    ):
        if inside:
            assert signature.decode(request, header_length).features["n"].tolist() == values
        else:
            with pytest.raises(BadRequestError, match="'n' has a value that is not"):
                signature.decode(request, header_length)


@given(st.lists(st.text(max_size=9), min_size=1), st.integers(2, 9))
def test_ids_of_strings_are_always_in_range(texts, buckets):
    for encode, size in (({"hash": buckets}, buckets), ({"vocab": ["red", "green"]}, 3)):
        settings = {"features": {"w": {"dtype": "string", "encode": encode}}, "label": {"name": "y", "classes": 3}}
        signature = Signature(Schema(SchemaSettings.model_validate(settings)), OUTPUTS, max_rows=1000)
        tensor = {"name": "w", "shape": [len(texts)], "datatype": "BYTES", "data": texts}
        ids = signature.decode(json.dumps({"inputs": [tensor]}).encode(), None).features["w"]
        assert ids.dtype == np.int64
        assert (ids >= 0).all()
        assert (ids < size).all()


def test_a_text_that_the_tokenizer_cannot_encode_is_a_bad_request_that_names_its_input(tmp_path):
    backtracks = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    path = write_tokenizer(tmp_path / "tokenizer.json", pre_tokenizer=backtracks)
    feature = {"dtype": "string", "encode": {"tokenizer": str(path), "length": 4}}
    schema = Schema(SchemaSettings.model_validate({"features": {"t": feature}, "label": {"name": "y", "classes": 2}}))
    signature = Signature(schema, OUTPUTS, max_rows=10)
    text = {"name": "t", "shape": [1], "datatype": "BYTES", "data": ["a" * 40 + "!"]}
    with pytest.raises(BadRequestError, match=r"input 't': the tokenizer cannot encode a text: "):
        signature.decode(json.dumps({"inputs": [text]}).encode(), None)


@pytest.mark.parametrize("data", ["[NaN, null, 1.5]", "[[NaN], [null], [1.5]]"])
def test_nan_in_a_body_is_a_missing_value_where_one_may_be_missing(data):
    feature = {"dtype": "float32", "shape": [1], "missing": "mean"}
    schema = Schema(SchemaSettings.model_validate({"features": {"x": feature}, "label": {"name": "y", "classes": 2}}))
    text = '{"inputs": [{"name": "x", "shape": [3, 1], "datatype": "FP32", "data": %s}]}'
    request = Signature(schema, OUTPUTS, max_rows=10).decode((text % data).encode(), None)
    np.testing.assert_array_equal(request.features["x"], np.array([[np.nan], [np.nan], [1.5]], np.float32))


@pytest.mark.parametrize("word", ["NaN", "null"])
def test_a_missing_value_is_named_where_none_may_be_missing(word):
    text = '{"inputs": [{"name": "x", "shape": [1, 2, 2], "datatype": "FP32", "data": [1, 2, 3, WORD]}]}'
    with pytest.raises(BadRequestError, match=r"input 'x' .* got `null`.*; null and NaN are a missing value, which"):
        SIGNATURE.decode(text.replace("WORD", word).encode(), None)


def test_infinity_in_a_body_is_named():
    with pytest.raises(BadRequestError, match="it has Infinity, which is no JSON"):
        SIGNATURE.decode(body().replace(b"[1, 2, 3, 4]", b"[1, 2, 3, Infinity]"), None)


OF_TWO = {
    "prediction": np.array([2, 0]),
    "probabilities": np.array([[0.25, 0.125, 0.625], [0.5, 0.5, 0.0]], np.float32),
}


def signature_of(names=None, outputs=OUTPUTS):
    label = {"name": "y", "classes": list(names) if names else 3}
    settings = {"features": {"n": {"dtype": "int8"}}, "label": label}
    return Signature(Schema(SchemaSettings.model_validate(settings)), outputs, max_rows=10)


def replied(signature, **members):
    """Return the outputs of the reply to a request of two rows, by name."""
    n = {"name": "n", "shape": [2], "datatype": "INT8", "data": [1, 2]}
    request = signature.decode(json.dumps({"inputs": [n], **members}).encode(), None)
    text, _ = signature.encode(request, OF_TWO, "m", "1", {})
    return {each["name"]: each for each in json.loads(text)["outputs"]}


def test_classes_with_names_are_named_in_replies_and_metadata():
    named, numbered = signature_of(("cat", "dog", "emu")), signature_of()
    assert replied(named)["label"] == {"name": "label", "datatype": "BYTES", "shape": [2], "data": ["emu", "cat"]}
    assert replied(named, outputs=[{"name": "prediction"}]).keys() == {"prediction"}
    assert "label" not in replied(numbered)
    assert [each.get("labels") for each in named.describe_outputs()] == [["cat", "dog", "emu"]] * 2 + [None]
    assert not any("labels" in each for each in numbered.describe_outputs())
    own = [*OUTPUTS, TensorSpec("label", np.dtype(np.int64), ())]
    assert signature_of(("cat", "dog", "emu"), own).outputs["label"].datatype == "INT64", "a task's own output stays"


def test_the_likeliest_classes_are_asked_for_by_the_classification_extension():
    asked = [{"name": "probabilities", "parameters": {"classification": 2}}]
    found = replied(signature_of(("cat", "dog", "emu")), outputs=asked)["probabilities"]
    assert (found["datatype"], found["shape"]) == ("BYTES", [2, 2])
    assert found["data"] == ["0.625000:2:emu", "0.250000:0:cat", "0.500000:0:cat", "0.500000:1:dog"]
    asked[0]["parameters"] = {"classification": 9}
    found = replied(signature_of(), outputs=asked)["probabilities"]
    assert (found["shape"], found["data"][:3]) == ([2, 3], ["0.625000:2", "0.250000:0", "0.125000:1"])


def manifest(seen_through=None):
    return manifest_of(1, schema="", through={"labels:0": 4, "events:1": 7}, seen_through=seen_through)


def test_a_reply_says_how_far_the_version_is_trained():
    assert progress_of(manifest()) == {"trained_through": "events:1=7,labels:0=4"}


def test_with_late_labels_it_also_says_how_far_was_read_and_labelled():
    assert progress_of(manifest({"events:1": 20, "labels:0": 6})) == {
        "trained_through": "events:1=7,labels:0=4",
        "labelled_through": "events:1=7,labels:0=4",
        "seen_through": "events:1=20,labels:0=6",
    }
