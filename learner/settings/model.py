"""The sections `[task]` and `[model]`, with `[model.adapter]` and `[model.teacher]`, a model whose outputs the trained
one, its student, learns from. Imports no torch."""

import math
import re
from collections.abc import Collection, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from anabranch.core.durations import PositiveDuration
from anabranch.core.settings import BearerToken, Section, http_address, written
from anabranch.core.users_code import IMPORT_STRING


class AdapterSettings(Section):
    """Which parts of a pretrained model train. All others are frozen: they are stored once, and are in no version."""

    kind: Literal["lora"] = "lora"
    """`lora` adds to each layer of `targets` the product of two small matrices, which train. Needs the extra `hf`."""
    rank: Annotated[int, Field(ge=1, le=1024)] = 8
    """Inner size of the two matrices."""
    alpha: Annotated[float, Field(gt=0, lt=math.inf)] = 16.0
    """The product is scaled by `alpha / rank`."""
    targets: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = "all-linear"
    """Layers to adapt: names of modules or their ends, such as `query`, or `all-linear` for all linear layers outside
    `train`."""
    train: tuple[str, ...] = ()
    """Names of modules that train in full, such as `classifier`."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of a layer's inputs that the adapter ignores in training."""
    base_precision: Literal["fp32", "bf16", "nf4"] = "fp32"
    """How frozen layers store their weights: `bf16` in 16 bits; `nf4` linear layers and embeddings in 4.5 bits (QLoRA,
    extra `nf4`), others as `bf16`."""


Factory = Annotated[str, written(IMPORT_STRING, 'module:function, such as "my_model:build"')]
TASK_NAMES = ("classification", "multilabel", "regression", "token-classification")
"""The tasks that come with the learner."""
_OF_URL = ("model", "output", "logits", "token", "ca", "timeout", "request_rows", "retries")
"""The keys that only an endpoint has."""


class TeacherVersion(Section):
    """A version that a learner has published."""

    state_dir: Path | None = None
    """The `state_dir` of its pipeline, relative to the config's folder. Absent: that of this pipeline."""
    number: Annotated[int, Field(ge=1)] | None = None
    """Number of the version. Absent: the one that is served when the learner starts."""
    factory: Factory | None = None
    """Builds the module of the version, as `model.factory` does for its pipeline. Absent: `model.factory`, with
    `model.args`."""
    args: dict[str, Any] = {}
    """Keyword arguments of `factory`."""
    adapter: AdapterSettings | None = None
    """`[model.adapter]` of its pipeline, for a version with adapters; goes with `factory`."""


class TeacherSettings(Section):
    """A frozen model. The model learns from its outputs for new events and from labels (knowledge distillation).
    Exactly one of `factory`, `version` and `url` names it."""

    factory: Factory | None = None
    """Import string of a callable that returns the teacher, an `nn.Module` with its weights, as `model.factory`."""
    args: dict[str, Any] = {}
    """Keyword arguments of `factory`."""
    version: TeacherVersion | None = None
    """A published version as the teacher."""
    url: Annotated[str, http_address("the address of the server", "https://models:8000", "token")] | None = None
    """Address of a server with the Open Inference Protocol v2 over HTTP, without credentials."""
    model: (
        Annotated[str, written(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", 'the name of a model, such as "teacher"')] | None
    ) = None
    """Name of the model on the server of `url`."""
    output: Annotated[str, Field(min_length=1, max_length=100)] | None = None
    """Name of the endpoint's output. Absent: `probabilities`, or `prediction` for regression."""
    logits: bool = False
    """Whether the endpoint's output has logits instead of probabilities, for classification and multilabel."""
    token: BearerToken | None = None
    """Bearer token for the endpoint."""
    ca: Path | None = None
    """PEM file of the authorities for the endpoint's certificate, relative to the config's folder."""
    timeout: PositiveDuration = timedelta(seconds=1)
    """Longest wait for the outputs of a step's events, retries included; then the step learns without them."""
    request_rows: Annotated[int, Field(ge=1, le=65536)] = 256
    """Events of one request to the endpoint, of a step or of several; those of a larger step are divided evenly."""
    retries: Annotated[int, Field(ge=0, le=10)] = 2
    """How often a failed request is repeated within `timeout`, with back-off."""
    features: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """Names of the features that the teacher takes. Absent: all of the schema."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "fp32"
    """Arithmetic of a teacher in this process, as in `learner.precision`."""
    weight: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Weight of the teacher's output against the label, for an event that has both; 1: of the output alone."""
    temperature: Annotated[float, Field(ge=0.01, le=100)] = 2.0
    """Both models' logits are divided by it before they are compared; more than 1 gives unlikely classes more weight.
    Regression has none."""

    @property
    def kind(self) -> str:
        """Which key names the teacher."""
        return "factory" if self.factory is not None else "version" if self.version is not None else "url"

    @model_validator(mode="after")
    def _one_teacher(self) -> Self:
        named = [name for name in ("factory", "version", "url") if getattr(self, name) is not None]
        if len(named) != 1:
            found = "none of them" if not named else " and ".join(named)
            raise ValueError(f"set exactly one of factory, version and url; there is {found}")
        given = self.model_fields_set
        if self.url is not None and self.model is None:
            raise ValueError("model is missing: the name of the model on the server of url")
        only = [name for name in _OF_URL if name in given]
        if self.url is None and only:
            raise ValueError(f"{only[0]} is for a teacher with url; remove it")
        if self.factory is None and "args" in given:
            raise ValueError("args are for factory; remove them, or write version.args")
        if self.version is not None and self.version.factory is None and self.version.args:
            raise ValueError("version.args are for version.factory; set it too")
        if self.version is not None and self.version.factory is None and self.version.adapter is not None:
            raise ValueError("version.adapter is for version.factory; set it too, or leave out both")
        if self.url is not None and "precision" in given:
            raise ValueError("precision is for a teacher in this process; remove it")
        return self


def _task(value: str) -> str:
    if value not in TASK_NAMES and not re.fullmatch(IMPORT_STRING, value):
        raise ValueError(f'it is neither {" nor ".join(TASK_NAMES)} nor an import string such as "my_model:MyTask"')
    return value


class ModelSettings(Section):
    """The model to train and to serve."""

    factory: Factory
    """Import string of a callable that returns an `nn.Module`; the config's folder is on the path, last."""
    args: dict[str, Any] = {}
    """Keyword arguments of the factory. A factory with a parameter `config_folder` also gets the config's folder."""
    task: Annotated[str, AfterValidator(_task)] = "classification"
    """The meaning of the model's output: logits `[B, classes]` for `classification` and `multilabel`,
    `[B, length, classes]` for `token-classification`, one number per event for `regression`, or a custom task, by
    import string like the factory."""
    embedding: str = ""
    """Name of the submodule whose output is the embedding of an event, such as `body.2`; the last but one is best. For
    policies of `[replay]` that compare events, and requests with `return_embedding`. Empty: none."""
    stages: list[str] = []
    """Names of the modules at which the stages of `learner.mesh.pipeline` begin, such as `body.4`, without the first:
    as many stages as ranks, or with `interleaved` a multiple."""
    parallel: dict[str, Literal["column", "row", "expert"]] = {}
    """How ranks split modules, by name or pattern, such as `{"*.up" = "column", "*.down" = "row"}`. Along
    `learner.mesh.tensor`, each rank computes some outputs of a `column` module, and a `row` module takes them as
    inputs. Along `learner.mesh.expert`, ranks divide the experts of an `expert` module."""
    channels_last: bool = False
    """Whether 4-D weights and features have their channels last, with which convolutions in half precision are faster
    on GPUs. Versions and checkpoints do not depend on it."""
    adapter: AdapterSettings | None = None
    """What trains of a pretrained model; absent: all that the factory has not frozen."""
    teacher: TeacherSettings | None = None
    """The model whose outputs the trained model learns from besides labels; absent: none. Serving needs none."""


Cost = Annotated[float, Field(ge=0, lt=math.inf)]
_MOST_BIASED = 50
"""Classes with which `platt` learns a bias for each."""


class TaskSettings(Section):
    """What a version answers of one class out of several: its probabilities, and the class that it decides for."""

    calibrate: Literal["none", "temperature", "platt", "isotonic"] = "none"
    """How probabilities are corrected, by the newest 10,000 events before training on them. `temperature` learns one
    number; `platt` also a bias for each class, which `class-balanced` replay and rare classes need; `isotonic`, for two
    classes, a rising curve."""
    costs: tuple[Cost | tuple[Cost, ...], ...] | None = None
    """Cost of each decision, by label and decision: the class with the least expected cost is the prediction. Two
    numbers, of two classes: the cost of a false 1, and that of a missed 1. Absent: the most likely class."""
    threshold: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Of two classes: probability from which the prediction is 1."""
    alert_budget: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Of two classes: fraction of the events that may have the prediction 1; each version learns the threshold from the
    newest events."""

    @model_validator(mode="after")
    def _one_decision(self) -> Self:
        named = [name for name in ("costs", "threshold", "alert_budget") if getattr(self, name) is not None]
        if len(named) > 1:
            raise ValueError(f"{' and '.join(named)} each decide the prediction; keep one of them")
        return self

    @property
    def learns(self) -> bool:
        """Whether versions learn from how the newest events were predicted."""
        return self.calibrate != "none" or self.alert_budget is not None

    @property
    def cost_matrix(self) -> list[list[float]]:
        """The costs by label and decision; empty without any."""
        rows = [[*row] if isinstance(row, tuple) else [row] for row in self.costs or ()]
        return [[0.0, *rows[0]], [*rows[1], 0.0]] if [len(row) for row in rows] == [1, 1] else rows

    def conflicts(self, task: str, label: int | Collection[str] | None) -> Iterator[tuple[str, str]]:
        """Yield each key that does not fit `model.task` and the classes of the label, and one sentence on it."""
        classes = label if label is None or isinstance(label, int) else len(label)
        given = self.calibrate != "none", self.costs, self.threshold, self.alert_budget
        named = [name for name, value in zip(type(self).model_fields, given, strict=True) if value]
        if task != "classification" or classes is None:
            for name in named:
                yield name, f'task.{name} is for model.task = "classification", and it is "{task}"; remove it'
            return
        of_two = [("calibrate", 'calibrate = "isotonic"', self.calibrate == "isotonic")]
        of_two += [(name, name, getattr(self, name) is not None) for name in ("threshold", "alert_budget")]
        for name, written_as, is_given in of_two:
            if is_given and classes != 2:
                out = 'write "platt"' if name == "calibrate" else "write costs"
                yield name, f"task.{written_as} is for two classes, and schema.label has {classes}; {out}"
        if self.calibrate == "platt" and classes > _MOST_BIASED:
            sentence = f'task.calibrate = "platt" learns a bias for each of {_MOST_BIASED} classes at most, and schema.'
            yield "calibrate", f'{sentence}label has {classes}; write "temperature"'
        if self.costs is not None and [len(row) for row in self.cost_matrix] != [classes] * classes:
            yield "costs", f"task.costs has to be {classes} rows of {classes} numbers: schema.label has as many classes"


def teacher_conflicts(
    teacher: TeacherSettings | None, unlabelled: str, features: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Yield each key that does not fit the other sections, and one sentence on it.

    `teacher`: `[model.teacher]`; `unlabelled`: `stream.unlabelled`; `features`: names of the schema's features.
    """
    if teacher is None and unlabelled == "distil":
        yield (
            "stream.unlabelled",
            'stream.unlabelled = "distil" needs a teacher; write [model.teacher], or set it to "skip" or "store"',
        )
    absent = [name for name in (teacher and teacher.features) or () if name not in features]
    if absent:
        names = ", ".join(features)
        sentence = f"model.teacher.features names {absent[0]!r}, which is no feature of the schema; those are {names}"
        yield "model.teacher.features", sentence
