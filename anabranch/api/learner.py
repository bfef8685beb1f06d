"""A model that learns from batches by the steps of the daemon.

Legend: N events of a call.
"""

import contextlib
import math
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from numpy.typing import NDArray
from torch import nn

from anabranch.api.data import EventReader, predicted, without_label
from anabranch.api.replay_buffer import ReplayBuffer
from anabranch.api.saved import SavedState
from anabranch.api.sections import check_type, checked
from anabranch.commands.backtest.batches import Numbering, batch_of
from anabranch.commands.backtest.training import BacktestTraining
from anabranch.core.errors import SettingsError
from anabranch.ingest.events.block import Array
from anabranch.ingest.events.schema import Schema
from anabranch.learner.errors import CheckpointError
from anabranch.learner.loop.stored_events import check_columns
from anabranch.learner.model.device import choose_device
from anabranch.learner.model.factory import eval_mode, forward
from anabranch.learner.model.rng import GeneratorStates
from anabranch.learner.settings.compatibility import conflicts, facts
from anabranch.learner.settings.pipeline import PipelineSettings
from anabranch.learner.train.build import build_training_setup

_CAPACITY = 10_000
_IDENTIFIER = "anabranch:model"


class Learner:
    """A model that learns from batches of new events and replays old ones. Used by one thread.

    A step is that of the daemon: it predicts, then trains, so that `measures` are of events that the model had not
    seen. The random generators of torch, numpy and Python are those of the learner in its calls, and unchanged after.

    Example:
        >>> model = torch.nn.Linear(64, 10)
        >>> learner = Learner(model, schema, strategy="der++", replay=ReplayBuffer(500))
        >>> learner.learn({"x": x, "digit": y})
        >>> learner.predict({"x": x})["prediction"]
    """

    def __init__(
        self,
        model: nn.Module,
        schema: Schema,
        strategy: str | Mapping[str, Any] = "er",
        optimizer: str | Mapping[str, Any] = "adamw",
        replay: ReplayBuffer | None = None,
        task: str | None = None,
        seed: int = 0,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Check that all fit each other, by a few steps on a copy of the model.

        Args:
            model: takes features `[B, ...]`, one by position or several by name; returns logits `[B, classes]`, or one
                number per event for a regression. Its weights are trained in place.
            schema: of the events.
            strategy: the method against forgetting, a name such as `er`, `der++`, `agem`, `ewc` or `none`, or a dict of
                the name and its arguments, as in `learner.strategy`.
            optimizer: name of an optimizer, or a dict such as `{"name": "sgd", "lr": 0.1}`, as in `learner.optimizer`.
            replay: an empty buffer, where the strategy replays. By default one of 10,000 events.
            task: the meaning of the output, as `model.task`. By default what the label says.
            seed: of initial choices, admission and sampling.
            settings: further sections of `pipeline.toml`, such as `{"learner": {"batch_size": 16}}`.

        Raises:
            AnabranchError: an argument is wrong, or they do not fit each other.
        """
        buffer = ReplayBuffer(_CAPACITY) if replay is None else replay
        self._schema = schema
        self._spec = settings_of(schema, strategy, optimizer, buffer, task, seed, settings or {})
        buffer._check_unused()
        self._buffer = buffer
        self._device = choose_device(self._spec.learner.device)
        self._reader, self._inputs = EventReader(schema), EventReader(without_label(schema))
        self._numbering = Numbering()
        self._stack = contextlib.ExitStack()
        self._open: BacktestTraining | None = None
        self._is_closed = False
        with own_generators(self._device):
            self._setup = build_training_setup(self._spec, self._device, built=model)
            self._begin = GeneratorStates(self._device)

    @property
    def model(self) -> nn.Module:
        """The model with the features that it has learned: it takes the columns of events as they are."""
        return self._setup.model

    def learn(self, data: Any) -> float:
        """Learn from events in their order, in steps of `learner.batch_size`, 64 by default.

        Args:
            data: N events with their label: a dict of arrays `[N, ...]`, or a data frame of pandas, polars or Arrow.

        Returns:
            The mean loss of the new events before training on them; NaN where no step was finite.

        Raises:
            AnabranchError: an event cannot be used, and nothing is learned; or no event of a step can be learned from.
            Exception: what the model raises, as it is.
        """
        columns = self._numbering.add(self._reader.read(data, labelled=True))
        training, size = self._training(), self._spec.learner.batch_size
        rows, loss = 0, 0.0
        with own_generators(self._device), torch.inference_mode(mode=False), torch.enable_grad():
            for begin in range(0, len(columns["label"]), size):
                part = {name: column[begin : begin + size] for name, column in columns.items()}
                taken = training.take(batch_of(part))
                if taken is None:
                    raise SettingsError(f"the model learns from no event of a step: {training.problem}")
                if taken.finite:
                    rows, loss = rows + taken.rows, loss + taken.loss_new
        return loss / rows if rows else math.nan

    def predict(self, data: Any) -> Any:
        """Return the predictions for events; the model is in evaluation mode.

        Args:
            data: N events, as `learn` takes them; a label is not read.

        Returns:
            `prediction` and `probabilities`, as serving answers: of classes the most likely one, `[N]`, by its name
            where it has one, else int64, and float32 `[N, classes]`; of a regression float32 `[N]` alone. Of a dict, a
            dict of arrays; of a frame one of its kind, with columns such as `probabilities.0`.

        Raises:
            AnabranchError: an event cannot be used.
        """
        trainer = self._training().trainer

        def run(part: Mapping[str, Array]) -> dict[str, NDArray[Any]]:
            output = forward(trainer.model, trainer.examples(part).features)
            return {name: values.numpy(force=True) for name, values in trainer.task.predict(output).items()}

        with own_generators(self._device), eval_mode(trainer.model), torch.no_grad():
            return predicted(self._schema, self._inputs, data, run)

    def measures(self) -> dict[str, float]:
        """Return what is measured of the events so far.

        Returns:
            `events`, `replayed` and `steps` are counts. `accuracy`, or of a regression `absolute_error`, and `loss` are
            means of new events before training on them, since the last change that ADWIN detected, and with `overall_`
            before the name since the first event. `drifts` counts rises of the error, and `replay_ratio` is the number
            of old events for each new one.
        """
        training = self._training()
        monitor, state = training.monitor, training.state
        measured: dict[str, float] = {"events": state.rows_new, "replayed": state.rows_replay, "steps": state.steps}
        name, sign = ("accuracy", 1) if monitor.bounded else ("absolute_error", -1)
        for key, mean, by in ((name, monitor.prequential.score, sign), ("loss", monitor.prequential.loss, 1)):
            for prefix, value in zip(("", "overall_"), mean.windows.values(), strict=False):
                measured[f"{prefix}{key}"] = by * value
        return {**measured, "drifts": monitor.drift.count, "replay_ratio": training.replay.ratio}

    def save(self, path: str | Path) -> None:
        """Save all that learning goes on with: weights, optimizer, strategy, buffer, measures and random generators.

        Args:
            path: folder, which is made; what was saved there before is replaced once this is complete.

        Raises:
            AnabranchError: it cannot be written, or has something else.
        """
        training = self._training()
        with contextlib.closing(SavedState(Path(path), "Learner")) as saved:
            saved.newest()
            with own_generators(self._device):
                tensors, state = training.capture()
            store = None if training.store is None else training.store.flush()
            known = {"schema": self._schema.digest, "next": self._numbering.next}
            saved.write(training.state.steps, known, store, tensors, state, last=True)

    def load(self, path: str | Path) -> Self:
        """Go on with what is saved in a folder: as the learner would have that saved it. Returns this one.

        Only before the first call of `learn`, `predict` or `measures`. The arguments of the constructor are those of
        the learner that was saved; others count from now on where they fit, such as the learning rate.

        Raises:
            AnabranchError: nothing is saved there, or it does not fit the model, the schema or the strategy.
        """
        if self._open is not None:
            raise SettingsError("this learner has begun already: load into a new one")
        nothing = SettingsError(f"{path} has no learner: Learner.save writes one")
        if not Path(path).is_dir():  # which would be made
            raise nothing
        with contextlib.closing(SavedState(Path(path), "Learner")) as saved:
            found = saved.newest()
            if found is None:
                raise nothing
            known = saved.facts_of(found)
            if known["schema"] != self._schema.digest:
                raise SettingsError(f"the learner in {path} has another schema")
            contents = saved.contents(found)
            if contents is not None:
                check_columns(saved.number, found, self._setup.kept_outputs, self._spec.learner.strategy.name)
            with own_generators(self._device):
                training = self._training(contents)
                try:
                    training.restore(found.step, found.tensors, found.state)
                except CheckpointError:
                    self.close()
                    raise
        self._numbering = Numbering(known["next"])
        return self

    def close(self) -> None:
        """Release the buffer and its thread; nothing is saved. The learner cannot be used again."""
        self._is_closed = True
        self._buffer.close()
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _training(self, contents: Any = None) -> BacktestTraining:
        """Return what trains, which starts with the first call; raise SettingsError once it is closed."""
        if self._is_closed:
            raise SettingsError("the learner is closed: make a new one, and load what was saved")
        if self._open is None:
            with own_generators(self._device):
                self._begin.restore()
                training = BacktestTraining(self._spec, self._setup, "events", self._stack, contents)
            self._open = training
            weakref.finalize(training, self._stack.close)  # of a learner that nobody has closed
            if training.store is not None:
                self._buffer._give_to(training, self._schema)
        return self._open


def settings_of(
    schema: Schema,
    strategy: str | Mapping[str, Any],
    optimizer: str | Mapping[str, Any],
    replay: ReplayBuffer | None,
    task: str | None,
    seed: int,
    others: Mapping[str, Any],
) -> PipelineSettings:
    """Return the settings of a pipeline that has no stream and publishes nothing, by the arguments of `Learner`."""
    check_type(schema, Schema, "Learner: schema", "Schema.infer(data, label=...)")
    buffer = ReplayBuffer(_CAPACITY) if replay is None else replay
    check_type(buffer, ReplayBuffer, "Learner: replay", "replay=ReplayBuffer(500)")
    for section, way in (("schema", "Learner(schema=...)"), ("replay", "Learner(replay=ReplayBuffer(...))")):
        if section in others:
            raise SettingsError(f"Learner: settings have [{section}], which is an argument: write {way}")
    optimizer = {"name": optimizer} if isinstance(optimizer, str) else optimizer
    learner = {"strategy": strategy, "optimizer": optimizer, **others.get("learner", {})}
    sections = {
        "name": "learner",
        "stream": {"topics": ["events"]},
        "seed": seed,
        **others,
        "schema": schema.settings,
        "model": {"factory": _IDENTIFIER, "task": task or _task_of(schema), **others.get("model", {})},
        "learner": learner,
        "replay": buffer.settings,
    }
    spec = checked(PipelineSettings, "", sections, "Learner")
    for _, sentence in conflicts(facts(spec)):
        raise SettingsError(f"Learner: {sentence}")
    if "task" in others:
        raise SettingsError("Learner: settings have [task], by which versions answer, which only a pipeline has")
    if spec.learner.replicas > 1 or spec.learner.mesh is not None:
        raise SettingsError("Learner: replicas and meshes need processes, which only a pipeline has")
    return spec


def _task_of(schema: Schema) -> str:
    label = schema.label
    if label.classes is None:
        return "regression"
    return "multilabel" if label.multi else "classification" if label.length is None else "token-classification"


@contextlib.contextmanager
def own_generators(device: torch.device) -> Iterator[None]:
    """Restore the random generators of torch, numpy and Python after the block."""
    before = GeneratorStates(device)
    try:
        yield
    finally:
        before.restore()
