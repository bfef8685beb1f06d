"""Scores models on the holdout set, in copies on the device with the weights of versions, which share one base.

Legend: G held-out events, C classes.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from anabranch.core.failures import out_of_memory
from anabranch.ingest.events.block import Array
from anabranch.ingest.events.schema import IGNORED, Schema
from anabranch.learner.device.host_staging import CHUNK_BYTES, pieces
from anabranch.learner.device.memory_ledger import SCORER_MODULES
from anabranch.learner.device.out_of_memory import free_cached_memory
from anabranch.learner.evaluate.adwin import winsorized
from anabranch.learner.evaluate.baselines import score_of_constant
from anabranch.learner.evaluate.chunks import Chunks
from anabranch.learner.evaluate.holdout import YOUNG, HoldoutRows
from anabranch.learner.evaluate.outcomes import TaskMeasures, kind_of, predicted_by
from anabranch.learner.model.answer_rule import AnswerRule
from anabranch.learner.model.answers import Answers
from anabranch.learner.model.device import Precision
from anabranch.learner.model.factory import forward
from anabranch.learner.model.faulty_events import Check, may_be_of_events, raising, works_on_zeros
from anabranch.learner.model.growing.pool import grow
from anabranch.learner.model.task import Task
from anabranch.learner.model.trained_set import copy_sharing_base, decide_trained_set, load_trained, trained_state

_Resident = tuple[nn.Module, Mapping[str, Tensor] | None]

log = logging.getLogger(__name__)


class ResidentModels:
    """Modules in evaluation mode, each with the weights that were scored with it last: two on CUDA, else one.

    Used by one thread. All other weights are on the host. Weights are recognized by the mapping that holds them, which
    must not change.
    """

    def __init__(self, model: nn.Module, chunks: Chunks) -> None:
        self._chunks = chunks
        decide_trained_set(model)
        # Without gradients autocast keeps no copy of the weights.
        module = copy_sharing_base(model).eval().requires_grad_(False)
        chunks.follow()
        self._resident: list[_Resident] = [(module, None)]
        """Each module with its weights, the one that was used last at the end. Other threads may read it."""
        self._most = SCORER_MODULES if chunks.device.type == "cuda" else 1
        self._module_bytes = sum(int(tensor.nbytes) for tensor in trained_state(module).values())
        self.kept: Mapping[str, Tensor] | None = None
        """Weights whose module is not taken for others while there is another: those of the served version."""

    @property
    def nbytes(self) -> int:
        """Bytes of all modules, without the base, which is that of the trained model. Any thread may ask."""
        return len(self._resident) * self._module_bytes

    def of(self, weights: Mapping[str, Tensor]) -> nn.Module:
        """Return a module with the weights, which are copied to the device unless they are there.

        Raises:
            RuntimeError: the weights are not of this model.
        """
        index = next((i for i, (_, loaded) in enumerate(self._resident) if loaded is weights), None)
        if index is None:
            index = self._free()
            module = self._resident[index][0]
            self._resident[index] = module, None
            self._load(module, weights)
        module = self._resident[index][0]
        self._resident = [*self._resident[:index], *self._resident[index + 1 :], (module, weights)]
        return module

    def _free(self) -> int:
        """Return the index of the module that takes the next weights."""
        module, loaded = self._resident[0]
        if loaded is not None and len(self._resident) < self._most:
            try:
                self._resident = [(copy_sharing_base(module), None), *self._resident]
            except RuntimeError as exc:
                if not out_of_memory(exc):
                    raise
                self._most = 1
                log.info("%s has no memory for a second model to score with: versions take turns", self._chunks.device)
        loaded = self._resident[0][1]
        return int(loaded is not None and loaded is self.kept and len(self._resident) > 1)

    def _load(self, module: nn.Module, weights: Mapping[str, Tensor]) -> None:
        grow(module, weights)
        if self._chunks.device.type != "cuda":
            load_trained(module, weights)
            return
        there = trained_state(module)
        if weights.keys() != there.keys():
            raise RuntimeError(f"the weights are of another model: {sorted(weights.keys() ^ there.keys())}")
        large = {name for name, tensor in weights.items() if tensor.nbytes > CHUNK_BYTES}
        for name in large:
            if weights[name].shape != there[name].shape:
                raise RuntimeError(f"the weights are of another model: {name} has the shape {weights[name].shape}")
            for to, piece in pieces(there[name], weights[name]):
                with self._chunks.timed():
                    to.copy_(piece)
        for part in _parts({name: tensor for name, tensor in weights.items() if name not in large}):
            with self._chunks.timed():
                module.load_state_dict(part, strict=False)


def _parts(weights: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors in parts of about a chunk."""
    part, size = dict[str, Tensor](), 0
    for name, tensor in weights.items():
        part[name], size = tensor, size + tensor.nbytes
        if size >= CHUNK_BYTES:
            yield part
            part, size = {}, 0
    yield part


_FEWEST = 10
"""Smallest number of events for which a class or group is listed."""
_MOST_RAISED = 1000
"""Errors that wait for the loop's thread."""
_MOST = 64
"""Largest number of classes, and of groups, that are listed: those with the most events."""

_HALF = {torch.float16, torch.bfloat16}


@dataclass(frozen=True)
class Evaluation:
    """Mean scores of a model on held-out events. A score of too few events, or one that is not finite, is absent.

    Attributes:
        windows: `new` of the youngest quarter, `old` of the rest, `worst` and `worst_group` of the class and group
            with the lowest score.
        classes: by the name of the class, or its number.
        groups: by the hash of the group, 16 hexadecimal digits: the events do not carry its name.
        constant: what one answer for all events has at best, by `new` and `old` window and by name of a measure.
        measures: of all events, by the name of the measure.
    """

    windows: Mapping[str, float] = field(default_factory=dict)
    classes: Mapping[str, float] = field(default_factory=dict)
    groups: Mapping[str, float] = field(default_factory=dict)
    constant: Mapping[str, float] = field(default_factory=dict)
    measures: Mapping[str, float] = field(default_factory=dict)


def evaluation_of(scores_G: NDArray[np.float64], schema: Schema, rows: HoldoutRows) -> Evaluation:
    """Return the evaluation from the scores `[G]` of the held-out events."""
    total = len(rows)
    if total < 2 * YOUNG:
        return Evaluation()
    young = total // YOUNG
    if not schema.label.classes:
        scores_G = winsorized(scores_G)
    windows = {"new": float(scores_G[total - young :].mean()), "old": float(scores_G[: total - young].mean())}
    classes: dict[str, float] = {}
    if schema.label.classes:
        which, has = _members(schema, rows)
        worst, by_class = _by(has, scores_G[which])
        windows |= worst
        classes = {_name(schema, number): score for number, score in by_class.items()}
    groups: dict[str, float] = {}
    if schema.group:
        hashed = rows.columns["group_hash"].astype(np.uint64)
        worst, by_group = _by(hashed[hashed != 0], scores_G[hashed != 0])
        windows |= {f"{name}_group": score for name, score in worst.items()}
        groups = {f"{number:016x}": score for number, score in by_group.items()}
    label_G = rows.columns["label"]
    constants = {"new": score_of_constant(label_G[total - young :]), "old": score_of_constant(label_G[: total - young])}
    constant = {name: score for name, score in constants.items() if score is not None}
    return Evaluation(_finite(windows), _finite(classes), _finite(groups), _finite(constant))


def class_marks(schema: Schema, rows: HoldoutRows) -> dict[str, NDArray[np.bool_]]:
    """Return which of the G events are of each listed class, by its name or number; empty for regression."""
    if not schema.label.classes or not len(rows):
        return {}
    which, has = _members(schema, rows)
    _, by_class = _by(has, np.zeros(len(has)))
    marks = {_name(schema, number): np.zeros(len(rows), np.bool_) for number in by_class}
    for number in by_class:
        marks[_name(schema, number)][which[has == number]] = True
    return marks


def score_each(
    model: nn.Module,
    task: Task,
    schema: Schema,
    columns: Mapping[str, Array],
    device: torch.device,
    chunks: Chunks | None = None,
    raised: dict[int, str] | None = None,
    predicted_GK: NDArray[np.float32] | None = None,
    answers: Answers | None = None,
) -> NDArray[np.float64]:
    """Return the score of each of G events, float64 `[G]`; the model is in evaluation mode.

    The predictions of `Outcomes` are put into `predicted_GK`, unless its K is 0. Both are of calibrated outputs where
    there are `answers`.

    The score is NaN where the output has one, even if the task returns another, and where model or task raises: the
    error is put into `raised` by the index of the event. `chunks` keeps the size that earlier calls have found to fit.

    Raises:
        Exception: every event raises, and so do events of zeros.
    """
    chunks = chunks or Chunks(device)
    total = len(columns["label"])
    scores_G = np.full(total, np.nan)

    def check(first: int, last: int) -> None:
        with chunks.timed(last - first):
            scores_G[first:last] = _scores(
                model, task, schema, columns, slice(first, last), device, predicted_GK, answers
            )

    errors = _in_chunks(total, check, chunks)
    if errors and len(errors) == total and not works_on_zeros(_scoring(model, task), schema, device):
        check(0, total)
    if raised is not None:
        raised |= errors
    return scores_G


def output_of_each(
    model: nn.Module, names: Sequence[str], columns: Mapping[str, Array], shape: Sequence[int], chunks: Chunks
) -> NDArray[np.float32]:
    """Return the output of a model, in evaluation mode, for each of N events, float32 `[N, *shape]`; NaN where it
    raises. `names`: of the features that it takes."""
    total = len(columns["offset"])
    output_N = np.full((total, *shape), np.nan, np.float32)

    def check(first: int, last: int) -> None:
        with chunks.timed(last - first), torch.inference_mode():
            output_B = forward(model, _features(names, columns, slice(first, last), chunks.device))
            output_N[first:last] = output_B.float().cpu().numpy()

    _in_chunks(total, check, chunks)
    return output_N


def _in_chunks(total: int, check: Check, chunks: Chunks) -> dict[int, str]:
    """Run `check` on one chunk after another, smaller ones for lack of memory; return its errors, by event."""
    begin, errors, too_large = 0, dict[int, str](), False
    while begin < total:
        end = min(total, begin + chunks.rows)
        try:
            errors |= _raising_in(begin, end, check)
        except RuntimeError as exc:
            if not out_of_memory(exc) or end - begin == 1:
                raise
        else:
            begin = end
            continue
        # After the handler, since the error references tensors of the pass.
        free_cached_memory(chunks.device)
        too_large = True
        chunks.limit((end - begin) // 2)
    if too_large:
        log.warning("%s ran out of memory: from now on %d events are scored at once", chunks.device, chunks.rows)
    return errors


def _raising_in(begin: int, end: int, check: Check) -> dict[int, str]:
    """Return the errors of model or task on the events of a part, by index."""
    try:
        check(begin, end)
    except Exception as exc:  # the user's own code may raise anything
        if not may_be_of_events(exc):
            raise
    else:
        return {}
    errors = raising(end - begin, lambda first, last: check(begin + first, begin + last))
    return {begin + index: message for index, message in errors.items()}


def _scoring(model: nn.Module, task: Task) -> Callable[[Mapping[str, Tensor], Tensor], object]:
    def run(features: Mapping[str, Tensor], label_B: Tensor) -> Tensor:
        with torch.inference_mode():
            return task.score(forward(model, features), label_B)

    return run


def _scores(
    model: nn.Module,
    task: Task,
    schema: Schema,
    columns: Mapping[str, Array],
    part: slice,
    device: torch.device,
    predicted_GK: NDArray[np.float32] | None,
    answers: Answers | None,
) -> NDArray[np.float32]:
    """Return the scores of a slice of the events, and put their predictions into `predicted_GK`, from one pass."""
    with torch.inference_mode():
        names = [feature.name for feature in schema.features]
        output_B = forward(model, _features(names, columns, part, device))
        label_B = torch.from_numpy(columns["label"][part]).to(device)
        with torch.autocast(device.type, enabled=False):  # the score is of the weights' own precision
            output_B = output_B if answers is None else answers(output_B)
            score_B = task.score(output_B.float() if output_B.dtype in _HALF else output_B, label_B).float()
        score_B[output_B.reshape(len(score_B), -1).isnan().any(1)] = torch.nan
        kind = kind_of(task, schema.label.classes)
        if predicted_GK is not None and predicted_GK.shape[1] and kind is not None:
            predicted_GK[part] = predicted_by(kind, output_B, label_B).cpu().numpy()
        scores: NDArray[np.float32] = score_B.cpu().numpy()
    return scores


def _features(
    names: Sequence[str], columns: Mapping[str, Array], part: slice, device: torch.device
) -> dict[str, Tensor]:
    """Return the named features of a slice of the events, on the device."""
    return {name: torch.from_numpy(columns[f"feature.{name}"][part]).to(device) for name in names}


def newcomers(rows: HoldoutRows, before: HoldoutRows) -> dict[str, Array]:
    """Return the columns of the youngest quarter's events that an earlier state of the holdout set did not have.

    Of the youngest quarter alone, since no event of it is dropped: among older ones rare classes are kept longer.
    """
    if not len(rows):
        return {}
    young = {name: column[len(rows) - len(rows) // YOUNG :] for name, column in rows.columns.items()}
    earlier = before.columns["hash"] if len(before) else np.empty(0, np.uint64)
    fresh = ~np.isin(young["hash"], earlier)
    return {name: column[fresh] for name, column in young.items()}


def _members(schema: Schema, rows: HoldoutRows) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
    """Return indices of events and a class of each; an event of several classes is listed once per class."""
    label = rows.columns["label"]
    if schema.label.multi:
        which, has = np.nonzero(label)
        return which, has
    if schema.label.length is not None:
        which, position = np.nonzero(label != IGNORED)
        pairs = np.unique(np.stack([which, label[which, position]]), axis=1)
        return pairs[0], pairs[1]
    return np.arange(len(rows)), label.astype(np.int64)


def _name(schema: Schema, number: int) -> str:
    names = schema.label.names
    return str(number) if names is None else names[number]


def _by(members: NDArray[np.generic], scores_G: NDArray[np.float64]) -> tuple[dict[str, float], dict[int, float]]:
    """Return the worst score under `worst`, and the scores of the members with the most events."""
    values, inverse, counts = np.unique(members, return_inverse=True, return_counts=True)
    means = np.bincount(inverse, weights=scores_G, minlength=len(values)) / np.maximum(counts, 1)
    enough = np.flatnonzero(counts >= _FEWEST)
    if not len(enough):
        return {}, {}
    listed = np.sort(enough[np.argsort(-counts[enough], kind="stable")[:_MOST]])
    return {"worst": float(means[enough].min())}, {int(values[index]): float(means[index]) for index in listed}


def _finite(scores: Mapping[str, float]) -> dict[str, float]:
    return {name: score for name, score in scores.items() if math.isfinite(score)}


Scores = NDArray[np.float64]
"""Scores of events `[G]`: 1 for right and 0 for wrong, or minus the error; larger is better."""


class EventScores(NamedTuple):
    """The scores of a version on G events, NaN where the model raises, and what measures need of them."""

    scores: Scores
    predicted: NDArray[np.float32]
    """The predictions of `Outcomes`, `[G, K]`; K is 0 where the task has no measures."""
    raised: NDArray[np.uint64]
    """Hashes of the events on which the model raises."""
    rule: AnswerRule | None = None
    """From which the version answers; None: as the model outputs it."""


class Scorer:
    """Scores weights with copies of the model. Used by one thread."""

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        schema: Schema,
        device: torch.device,
        precision: Precision | None = None,
        before_chunk: Callable[[], object] = bool,
        measures: Iterable[str] = (),
    ) -> None:
        """Take training's arithmetic, and `before_chunk`, which waits until no request needs the device.

        `measures` are computed besides the usual ones; raises SettingsError where the task has no such.
        """
        self.schema = schema
        self.measures = TaskMeasures.of(task, schema, measures)
        self.bounded = schema.label.classes is not None
        """Whether scores are between 0 and 1."""
        self._task = task
        self._chunks = Chunks(device, precision, before_chunk)
        self._models = ResidentModels(model, self._chunks)
        self.raised: deque[tuple[NDArray[np.uint64], str]] = deque(maxlen=_MOST_RAISED)
        """Hashes of events on which the model raised, whose score is NaN, and the error on the first of them; the
        loop's thread removes them from the holdout set."""

    @property
    def device_bytes(self) -> int:
        """Bytes of the copies of the model. Any thread may ask."""
        return self._models.nbytes

    def seconds(self) -> float:
        """Return a clock for measuring how long scoring takes; see `Chunks.seconds`."""
        return self._chunks.seconds()

    def keep_on_device(self, weights: Mapping[str, Tensor] | None) -> None:
        """Keep these weights on the device where there is memory for two models: later versions are compared with
        them."""
        self._models.kept = weights

    def score(self, weights: Mapping[str, Tensor], columns: Mapping[str, Array]) -> Scores:
        """Return the scores of G events, columns `[G, ...]`, NaN where the model raises; the weights have to fit."""
        return self.score_and_find(weights, columns).scores

    def score_and_find(
        self, weights: Mapping[str, Tensor], columns: Mapping[str, Array], rule: AnswerRule | None = None
    ) -> EventScores:
        """Return the scores of G events, what measures need, and the hashes of those on which the model raises.

        `rule`: by which the version answers. A class that costs or a threshold decide counts in no score.
        """
        no_hashes = np.empty(0, np.uint64)
        predicted_GK = np.full((len(columns["label"]) if columns else 0, self.measures.columns), np.nan, np.float32)
        if not columns:
            return EventScores(np.empty(0), predicted_GK, no_hashes, rule)
        raised: dict[int, str] = {}
        task, device = self._task, self._chunks.device
        with self._chunks.on_stream():
            model = self._models.of(weights)
            answers = None if rule is None else Answers(rule, self.schema.label.one_of).to(device)
            scores_G = score_each(
                model, task, self.schema, columns, device, self._chunks, raised, predicted_GK, answers
            )
        if not raised:
            return EventScores(scores_G, predicted_GK, no_hashes, rule)
        hashes = columns["hash"].astype(np.uint64)[list(raised)]
        self.raised.append((hashes, next(iter(raised.values()))))
        return EventScores(scores_G, predicted_GK, hashes, rule)

    def fits(self, weights: Mapping[str, Tensor]) -> bool:
        """Return whether the weights are of this model."""
        try:
            with self._chunks.on_stream():
                self._models.of(weights)
        except RuntimeError as exc:
            if out_of_memory(exc):
                raise
            return False
        return True
