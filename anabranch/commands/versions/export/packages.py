"""What surrounds an exported program, so that MLflow and Triton load and run it as their own; and its model card."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from anabranch.config.pipeline import Pipeline
from anabranch.core.atomic_files import write_durably
from anabranch.learner.versions.format import Manifest, Verdict
from anabranch.serving.protocol.tensors import Array

CARD = "README.md"
MOST_ROWS = 1024
"""Rows of a request to Triton, which joins requests up to as many."""
_MLFLOW_CODE = '''"""Loads the program of version {number} of {name} for mlflow.pyfunc. It needs torch alone."""

from pathlib import Path

import numpy as np
import torch

FEATURES = {features!r}
"""Name, dtype and shape of each feature of a row, in the order in which the program takes them."""


class Program:
    def __init__(self, path):
        self._program = torch.export.load(path).module()

    def predict(self, data, params=None):
        """Answer the columns of a frame, or arrays by name: returns arrays by name, with a row for each row."""
        columns = [np.array(list(data[name]), dtype).reshape(-1, *shape) for name, dtype, shape in FEATURES]
        with torch.no_grad():
            answers = self._program(*map(torch.from_numpy, columns))
        return {{name: value.numpy() for name, value in answers.items()}}


def _load_pyfunc(path):
    return Program(Path(path) / "model.pt2")
'''
_TRITON_CODE = '''"""Runs the program of a version in the Python backend of Triton, which needs torch there."""

import json
from pathlib import Path

import torch
import triton_python_backend_utils as triton


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self._inputs, self._outputs = ([each["name"] for each in config[key]] for key in ("input", "output"))
        self._program = torch.export.load(Path(__file__).parent / "model.pt2").module()

    def execute(self, requests):
        responses = []
        for request in requests:
            arrays = [triton.get_input_tensor_by_name(request, name).as_numpy() for name in self._inputs]
            with torch.no_grad():
                answers = self._program(*(torch.tensor(array) for array in arrays))
            tensors = [triton.Tensor(name, answers[name].numpy()) for name in self._outputs]
            responses.append(triton.InferenceResponse(output_tensors=tensors))
        return responses
'''


def write_mlflow(
    folder: Path, name: str, number: int, inputs: Mapping[str, Array], outputs: Mapping[str, Array]
) -> None:
    """Write what `mlflow.pyfunc.load_model` reads besides `model.pt2`.

    Args:
        folder: of the model, which has the program.
        name: of the pipeline.
        number: of the version.
        inputs: features of one row by name, `[1, *shape]`.
        outputs: its answers.
    """

    def signature(arrays: Mapping[str, Array]) -> str:
        specs = [
            {
                "type": "tensor",
                "name": each,
                "tensor-spec": {"dtype": str(array.dtype), "shape": [-1, *array.shape[1:]]},
            }
            for each, array in arrays.items()
        ]
        return json.dumps(specs)

    version = torch.__version__.partition("+")[0]
    model = {
        "flavors": {"python_function": {"loader_module": "anabranch_program", "code": "code"}},
        "signature": {"inputs": signature(inputs), "outputs": signature(outputs)},
        "metadata": {"pipeline": name, "version": number},
    }
    features = [(each, str(array.dtype), array.shape[1:]) for each, array in inputs.items()]
    code = _MLFLOW_CODE.format(number=number, name=name, features=features)
    write_durably(folder / "MLmodel", [json.dumps(model, indent=2).encode()])  # which is YAML
    write_durably(folder / "requirements.txt", [f"torch=={version}\nnumpy\n".encode()])
    (folder / "code").mkdir()
    write_durably(folder / "code" / "anabranch_program.py", [code.encode()])


def write_triton(
    folder: Path, name: str, inputs: Mapping[str, Array], outputs: Mapping[str, Array], *, is_onnx: bool
) -> None:
    """Write the configuration of a model in a repository of Triton, and where the program is not ONNX, what runs it.

    Args:
        folder: of the model, with a folder for the version, which has the program.
        name: of the model.
        inputs: features of one row by name, `[1, *shape]`.
        outputs: its answers.
        is_onnx: whether ONNX Runtime runs the program; else the Python backend does.
    """

    def tensor(each: str, array: Array) -> str:
        shape, kind = array.shape[1:], "BOOL" if array.dtype == np.bool_ else _triton_type(array.dtype)
        # A number without dimensions is not allowed: Triton takes one of a row, and removes that dimension.
        dims = f"dims: [ {', '.join(map(str, shape))} ]" if shape else "dims: [ 1 ] reshape: { shape: [ ] }"
        return f'  {{ name: "{each}" data_type: TYPE_{kind} {dims} }}'

    lines = [f'name: "{name}"', f'backend: "{"onnxruntime" if is_onnx else "python"}"', f"max_batch_size: {MOST_ROWS}"]
    for key, arrays in (("input", inputs), ("output", outputs)):
        lines += [f"{key} [", ",\n".join(tensor(each, array) for each, array in arrays.items()), "]"]
    content = "\n".join([*lines, "dynamic_batching { }", ""])
    write_durably(folder / "config.pbtxt", [content.encode()])
    if not is_onnx:
        for version in folder.iterdir():
            if version.is_dir():
                write_durably(version / "model.py", [_TRITON_CODE.encode()])


def _triton_type(dtype: "np.dtype[np.generic]") -> str:
    return {"f": "FP", "i": "INT", "u": "UINT"}[dtype.kind] + str(8 * dtype.itemsize)


def write_card(
    folder: Path,
    pipeline: Pipeline,
    manifest: Manifest,
    verdict: Verdict | None,
    inputs: Mapping[str, Array],
    usage: str,
) -> None:
    """Write the model card of a version, whose intended use a person has to write.

    Args:
        folder: which gets the card.
        pipeline: of the version.
        manifest: of the version.
        verdict: of the gate; None: there is none yet.
        inputs: features of one row by name, `[1, *shape]`.
        usage: how the folder is loaded, as Markdown.
    """
    measures = [
        f"| {name} | {value:.6g} | {_number(manifest.constant.get(name))} |"
        for name, value in sorted(manifest.metrics.items())
        if math.isfinite(value)
    ]
    features = [f"| `{name}` | {array.dtype} | {list(array.shape[1:])} |" for name, array in inputs.items()]
    through = [f"- `{name}`: {each.offset}" for name, each in sorted(manifest.trained_through.items())]
    said = "none yet" if verdict is None else f"{verdict.verdict}. {'; '.join(verdict.reasons)}".strip()
    learned = "" if manifest.learned is None else f", {manifest.learned.rows:,} of them since version {manifest.parent}"
    text = f"""---
library_name: pytorch
pipeline_tag: other
tags: [anabranch, continual-learning]
---

# {pipeline.name}, version {manifest.number}

A model for {manifest.model.task} from `{manifest.model.factory}`, which learned from a stream of events by
{manifest.step:,} steps{learned}.

## Intended use

*To be written by a person: for what and for whom the model is, and for what it is not.*

## How to use it

{usage}

## Features

| feature | dtype | shape of a row |
| --- | --- | --- |
{chr(10).join(features)}

## Measures

Judged by {manifest.measure or "the score of the task"}; verdict: {said}

| measure | version | one answer for all events, at best |
| --- | --- | --- |
{chr(10).join(measures)}

## Trained through

The offset up to which each event was learned, skipped or held out:

{chr(10).join(through)}
"""
    write_durably(folder / CARD, [text.encode()])


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"
