"""The files of a new pipeline of a list of fields: a section for each, and a model that takes them."""

import importlib.resources
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from anabranch.config.toml_text import toml_comment, toml_value
from anabranch.core.errors import SettingsError

FIELD_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
"""Names that a field of `[schema]` may have."""
UNFIT_NAME = "its name is not that of a field: rename it to letters, digits and _"
_BUCKETS = 1000
"""Hash buckets of a string whose values are not known."""
_BLANK = {"b": "false", "f": "0.0", "s": '""'}
"""The default of a feature by the first letter of its dtype; of whole numbers it is 0."""

Classes = int | list[str] | None
"""The number of classes of a label or their names; None of a regression."""


@dataclass(frozen=True)
class PipelineField:
    """A feature, or a field that is left out.

    Attributes:
        name: as the source has it.
        dtype: as in `[schema.features]`; `time` of a time, empty of what no feature can be.
        shape: of a value.
        vocabulary: the strings that it may be, if they are known.
        may_be_missing: whether it gets a default.
        field: where it is in an event; empty: under its name.
        learn: rows of the table of its values, if that is learned.
        scale: as in `[schema.features]`; so are `missing`, `cycles` and `unit`.
        comment: why it is what it is.
        written: its type in the words of the source.
        why: why it is left out, or what a person has to do so that it is read.
    """

    name: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    vocabulary: tuple[str, ...] = ()
    may_be_missing: bool = False
    written: str = ""
    why: str = ""
    field: str | tuple[str, ...] = ""
    learn: int = 0
    scale: str = ""
    missing: str = ""
    cycles: tuple[str, ...] = ()
    unit: str = "s"
    comment: str = ""

    @property
    def is_read(self) -> bool:
        """Whether it is a feature."""
        return not self.why

    @property
    def sentence(self) -> str:
        """That it is left out, and why."""
        return f'"{toml_comment(self.name)}" is left out: {toml_comment(self.why)}'


@dataclass(frozen=True)
class SectionField:
    """A section of a field that is no feature: its name, where it is in an event, why, and the unit of a time."""

    name: str
    field: str | tuple[str, ...] = ""
    comment: str = ""
    unit: str = "s"


def pipeline_files(
    fields: Sequence[PipelineField],
    source: str,
    name: str,
    stream: Iterable[str],
    label: tuple[SectionField, Classes],
    key: SectionField | None = None,
    time: SectionField | None = None,
    learner: Iterable[str] = (),
) -> dict[str, str]:
    """Return `pipeline.toml` and `my_model.py`.

    Args:
        fields: of which one at least is read.
        source: what they come from, for the first line.
        name: of the pipeline; other characters than those of a name become dashes.
        stream: lines below `[stream]`.
        label: its field and classes.
        key: field that names whom an event is about.
        time: field with the time of an event.
        learner: lines below `[learner]`.
    """
    target, classes = label
    lines = [
        f"# Written by anabranch init, from {toml_comment(source)}.",
        "# Every key that is left out has its default; docs/reference.md lists them all.",
        "",
        f"name = {toml_value(re.sub('[^A-Za-z0-9._-]+', '-', name).strip('-._')[:100] or 'pipeline')}",
        "",
        "[stream]",
        *stream,
        *(line for field in fields for line in _feature(field)),
        *_section("label", target),
        'dtype = "float32"' if classes is None else f"classes = {toml_value(classes)}",
    ]
    for section, found in (("key", key), ("time", time)):
        if found is not None:
            lines += _section(section, found)
    model = importlib.resources.files("anabranch.commands.init") / "template" / "tabular_model.py"
    lines += _model([each for each in fields if each.is_read], classes)
    below = list(learner)
    text = "\n".join([*lines, *(["", "[learner]", *below] if below else []), ""])
    return {"pipeline.toml": text, "my_model.py": model.read_text("utf-8")}


def _section(section: str, of: SectionField) -> Iterator[str]:
    yield ""
    if of.comment:
        yield f"# {toml_comment(of.comment)}"
    yield f"[schema.{section}]"
    yield f"name = {toml_value(of.name)}"
    if of.field:
        yield f"field = {toml_value(of.field)}"
    if of.unit != "s":
        yield f'unit = "{of.unit}"'


def _feature(field: PipelineField) -> Iterator[str]:
    yield ""
    if field.why:
        yield f"# {field.sentence}"
    if field.comment and field.is_read:
        yield f"# {toml_comment(field.comment)}"
    if field.dtype in ("", "time"):
        return
    mark = "" if field.is_read else "# "
    yield f"{mark}[schema.features.{field.name}]"
    yield f'{mark}dtype = "{field.dtype}"'
    if field.field:
        yield f"field = {toml_value(field.field)}"
    if field.dtype == "string":
        encode = {"vocab": field.vocabulary} if field.vocabulary else {"hash": _BUCKETS}
        yield f"{mark}encode = {toml_value({'learn': field.learn} if field.learn else encode)}"
    for key in ("scale", "missing", "cycles"):
        if getattr(field, key):
            yield f"{key} = {toml_value(getattr(field, key))}"
    if field.unit != "s":
        yield f'unit = "{field.unit}"'
    if field.shape:
        yield f"{mark}shape = {toml_value(field.shape)}"
    if field.may_be_missing:
        blank = _BLANK.get(field.dtype[0], "0")
        for size in reversed(field.shape):
            blank = f"[{', '.join([blank] * size)}]"
        yield f"{mark}default = {blank}                    # where it is null or missing"


def _model(features: Sequence[PipelineField], classes: Classes) -> Iterator[str]:
    words = {each.name: len(each.vocabulary) + 1 for each in features if each.vocabulary}
    words |= {each.name: each.learn or _BUCKETS for each in features if each.dtype == "string" and not each.vocabulary}
    numbers = sum(
        math.prod(each.shape) * (2 * len(each.cycles) or 1) * (1 + bool(each.missing))
        for each in features
        if each.dtype != "string"
    )
    outputs = 1 if classes is None else classes if isinstance(classes, int) else len(classes)
    yield from ("", "[model]", 'factory = "my_model:build"')
    yield f"args = {toml_value({'numbers': numbers, 'words': words, 'outputs': outputs})}"
    yield f'task = "{"regression" if classes is None else "classification"}"'


def refuse_existing(paths: Sequence[Path], *, force: bool) -> None:
    """Raise SettingsError if one of the files is there already, unless `force` is given."""
    there = [path for path in paths if path.exists()]
    if there and not force:
        raise SettingsError(f"{there[0]} exists already; --force overwrites it")


def write_files(folder: Path, contents: Mapping[str, str], *, force: bool) -> list[Path]:
    """Write files into `folder`, which is made if need be, and return their paths.

    Raises:
        SettingsError: one of them is there already and `force` is not given, or the folder cannot be written.
    """
    paths = [folder / name for name in contents]
    refuse_existing(paths, force=force)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in paths:
            path.write_text(contents[path.name], encoding="utf-8")
    except OSError as exc:
        raise SettingsError(f"cannot write {exc.filename or folder}: {exc.strerror}") from exc
    return paths
