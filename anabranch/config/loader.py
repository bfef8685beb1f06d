"""`pipeline.toml`: read, overridden from the environment and by `--set`, resolved and validated.

The environment is read here and nowhere else.
"""

import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from anabranch.config.explain import Fault, explained, key_of, rank, sentence_of, without
from anabranch.config.overrides import apply_overrides, origin_of
from anabranch.config.pipeline import Pipeline
from anabranch.core.errors import SettingsError
from anabranch.core.net import is_loopback
from anabranch.core.users_code import FOLDER
from anabranch.ingest.settings.labels import LabelStreamSettings
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.learner.settings.compatibility import conflicts, facts, stage_conflicts
from anabranch.learner.settings.model import teacher_conflicts
from anabranch.learner.settings.search import search_conflicts
from anabranch.learner.state_dir.origin import is_published
from anabranch.serving.settings import answer_conflicts

_NOTHING_HIDDEN = "it is stored in every version and shown in errors, so it holds no secret; write the value, or have "
_NOTHING_HIDDEN += "the model's code read {} itself"


def label_conflicts(events: SchemaSettings, labels: LabelStreamSettings) -> Iterator[tuple[str, str]]:
    """Yield each key of `[stream.labels]` that does not fit the schema, and one sentence on it."""
    key = labels.key or (events.key.name if events.key is not None else None)
    fields = [*events.features, events.label.name, labels.name]
    fields += [field.name for field in (events.time, events.weight) if field is not None]
    classes = events.label.classes
    if key is None:
        yield "key", "labels find their events by a key, and there is none; set stream.labels.key or [schema.key]"
    elif key in fields:
        taken = "is a feature, a label, the time or the weight too; name another field"
        yield "key", f"stream.labels.key = {key!r} {taken}"
    if labels.unmatched == "negative" and (classes is None or events.label.multi or events.label.length):
        needs = 'needs [schema.label] with classes of which an event has one; write "drop" or "store"'
        yield "unmatched", f'stream.labels.unmatched = "negative" {needs}'


class Config:
    """A validated pipeline and the folder of its file."""

    def __init__(self, pipeline: Pipeline, path: Path, assignments: Sequence[str] = ()) -> None:
        self.path = path
        self.assignments = tuple(assignments)
        self.folder = path.parent
        self.pipeline = pipeline.below(self.folder)
        self.state_dir = self.pipeline.state_dir

    def arguments(self) -> tuple[str, ...]:
        """Return the options by which a daemon reads the same settings."""
        return "-c", str(self.path), *(part for each in self.assignments for part in ("--set", each))


class Examined(NamedTuple):
    """A config with all that is wrong with it."""

    config: Config | None
    """What is left when the keys at fault have their defaults; None when that is no pipeline."""
    faults: list[Fault]
    secrets: set[str]
    """Values that came from the environment or from files."""


def load_config(path: Path, environment: Mapping[str, str] = os.environ, *, assignments: Sequence[str] = ()) -> Config:
    """Read `path`, apply overrides from the environment and then `assignments`, and validate.

    An assignment is `section.key=value`, with the value as in the file; strings need no quotes.

    Raises:
        SettingsError: one sentence that names file, key, value and the way out.
    """
    config, faults, _ = examine_config(path, environment, assignments=assignments)
    if faults:
        raise SettingsError(faults[0].sentence) from None
    assert config is not None
    return config


def examine_config(
    path: Path, environment: Mapping[str, str] = os.environ, *, assignments: Sequence[str] = ()
) -> Examined:
    """Return the settings with everything that is wrong with them, the worst first.

    Raises:
        SettingsError: the file cannot be read at all.
    """
    path = path.absolute()
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as exc:
        raise SettingsError(f'{path} does not exist; "anabranch init DIR" writes an example') from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as exc:
        raise SettingsError(f"{path} cannot be read: {exc}") from exc
    overrides, faults = apply_overrides(document, environment, assignments)
    secrets: dict[tuple[str, ...], str] = {}
    resolved = _resolve(document, (), path.parent, environment, secrets, faults)
    pipeline: Pipeline | None = None
    try:
        pipeline = Pipeline.model_validate(resolved, context={FOLDER: path.parent})
    except ValidationError as exc:
        errors = explained(resolved, sorted(exc.errors(), key=rank))
        known = {fault.location for fault in faults}
        for error in errors:
            location = key_of(resolved, error)
            if location not in known:
                known.add(location)
                same_key = [other for other in errors if key_of(resolved, other) == location]
                origin = origin_of(path, location, overrides)
                faults.append(Fault(location, sentence_of(origin, resolved, same_key, set(secrets))))
        pipeline = _without_faults(resolved, exc, path.parent)
    else:
        faults += [
            Fault(location, f"{origin_of(path, location, overrides)}: {sentence}")
            for location, sentence in _conflicts(pipeline)
        ]
    hidden = set(secrets.values())
    faults = [Fault(location, without(sentence, hidden)) for location, sentence in faults]
    return Examined(None if pipeline is None else Config(pipeline, path, assignments), faults, hidden)


def _without_faults(document: dict[str, Any], found: ValidationError, folder: Path) -> Pipeline | None:
    """Return the settings without the keys at fault; what is wrong with these is no fault of the document."""
    for _ in range(2):
        for location in [key_of(document, error) for error in sorted(found.errors(), key=rank)]:
            _remove(document, location)
        try:
            return Pipeline.model_validate(document, context={FOLDER: folder})
        except ValidationError as exc:
            found = exc
    return None


def _conflicts(pipeline: Pipeline) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield what is wrong between keys of different sections: the key to change, and a sentence."""
    serving = pipeline.serving
    host = pipeline.learner.status.rpartition(":")[0]
    if not is_loopback(host) and not serving.tokens.read.get_secret_value():
        sentence = f'learner.status = "{host}:..." is not loopback, so serving.tokens.read is required'
        yield ("learner", "status"), sentence
    for key, sentence in (*conflicts(facts(pipeline)), *stage_conflicts(pipeline.model, pipeline.learner)):
        yield tuple(key.split(".")), sentence
    for name, text in (("versions_from", '"storage"'), ("canary", f"{serving.canary:g}")):
        if pipeline.storage is None and getattr(serving, name) not in ("state_dir", 0):
            sentence = f"serving.{name} = {text} needs the section [storage], with the url of an object store"
            yield ("serving", name), sentence
    if serving.canary and not pipeline.gate.holdout_fraction:
        sentence = (
            f"serving.canary = {serving.canary:g} compares versions on held-out events, and "
            "gate.holdout_fraction = 0 holds out none; set gate.holdout_fraction above 0, or serving.canary = 0"
        )
        yield ("serving", "canary"), sentence
    for key, sentence in answer_conflicts(serving, pipeline.stream.resolved(pipeline.name), pipeline.name):
        yield ("serving", *key.split(".")), sentence
    teacher, unlabelled = pipeline.model.teacher, pipeline.stream.unlabelled
    for key, sentence in teacher_conflicts(teacher, unlabelled, pipeline.events.features):
        yield tuple(key.split(".")), sentence
    for key, sentence in pipeline.task.conflicts(pipeline.model.task, pipeline.events.label.classes):
        yield ("task", key), sentence
    if pipeline.search is not None:
        learner = pipeline.learner
        numbers = (learner.optimizer.model_extra or {}).get("momentum"), learner.max_grad_norm, pipeline.model.args
        for key, sentence in search_conflicts(pipeline.search, *numbers, deterministic=learner.deterministic):
            yield ("search", key), sentence
    if pipeline.stream.labels is not None:
        for key, sentence in label_conflicts(pipeline.events, pipeline.stream.labels):
            yield ("stream", "labels", key), sentence


def _remove(document: Any, location: tuple[str, ...]) -> None:
    """Remove from a document the innermost key that leads to `location` and is there."""
    tables: list[tuple[dict[str, Any], str]] = []
    for part in location:
        if not isinstance(document, dict) or part not in document:
            break
        tables.append((document, part))
        document = document[part]
    if tables:
        table, part = tables[-1]
        del table[part]


def _resolve(
    value: Any,
    location: tuple[str, ...],
    folder: Path,
    environment: Mapping[str, str],
    secrets: dict[tuple[str, ...], str],
    faults: list[Fault],
) -> Any:
    """Replace `{env = "NAME"}` and `{file = "path"}` by what they name, and add each to `secrets`.

    Where versions contain the value they are a fault: they name a secret.
    """
    if isinstance(value, list):
        items = enumerate(value)
        return [_resolve(item, (*location, str(i)), folder, environment, secrets, faults) for i, item in items]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"env"} or value.keys() == {"file"}:
        ((kind, name),) = value.items()
        if isinstance(name, str) and is_published(location):
            faults.append(Fault(location, f"{'.'.join(location)}: {_NOTHING_HIDDEN.format(name)}"))
            return ""
        if isinstance(name, str):
            try:
                secrets[location] = environment[name] if kind == "env" else (folder / name).read_text("utf-8").strip()
            except KeyError:
                sentence = f"the environment variable {name} is not set"
            except OSError as exc:
                sentence = f"cannot read {folder / name}: {exc.strerror}"
            except UnicodeDecodeError:
                sentence = f"{folder / name} is not UTF-8 text"
            else:
                return secrets[location]
            faults.append(Fault(location, f"{'.'.join(location)}: {sentence}"))
            return ""
    return {key: _resolve(item, (*location, key), folder, environment, secrets, faults) for key, item in value.items()}
