"""`python -m tools.reference > docs/reference.md`: the reference, written from the code that it describes."""

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from enum import Enum
from itertools import chain
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from prometheus_client import CollectorRegistry
from pydantic import BaseModel, ByteSize, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from anabranch.cli import GROUPS, SUMMARIES, command_tree, find
from anabranch.config.pipeline import Pipeline, alternatives
from anabranch.core.durations import format_duration
from anabranch.core.settings import documented_fields
from anabranch.core.users_code import NamedClass
from anabranch.ingest.metrics import IngestMetrics
from anabranch.ingest.settings.kafka_properties import PROPERTIES, REFUSED
from anabranch.ingest.settings.stream import FieldSettings
from anabranch.learner.status.metrics import LearnerMetrics
from anabranch.replay.metrics import ReplayMetrics
from anabranch.serving.metrics import ServingMetrics

_HEAD = """\
# Reference

Which settings, commands, metrics and files are there? This page has all of them, generated from the code by
`python -m tools.reference > docs/reference.md`.

- [pipeline.toml](#pipelinetoml)
- [Commands](#commands)
- [Metrics](#metrics)
- [The state directory](#the-state-directory)
- [Variables of the environment](#variables-of-the-environment)

## pipeline.toml

Unknown keys are errors that name the nearest known key. A duration is written as `"250ms"`, `"30s"`, `"10m"`, `"2h"` or
`"1d"`, a size as `"256MB"` (10^6) or `"256MiB"` (2^20). Instead of any string, `{env = "NAME"}` takes the value of a
variable of the environment and `{file = "path"}` the contents of a file, relative to the config's folder. No error and
no command prints such values. [Settings that versions contain](operate/secure.md#secrets) refuse both. Brackets have
the default, then the other values; `1..64` includes both ends.
"""

_PROPERTIES = """\

### Properties

What `[stream.properties]` takes, in librdkafka's names. Values are secret. Names that would break a promise are errors
that say what decides instead.
"""

_COMMANDS = """\

## Commands

`anabranch COMMAND`, also `python -m anabranch COMMAND`. `-c/--config FILE` is `pipeline.toml` in the current folder by
default. The daemons also run as `python -m anabranch.learner` and `python -m anabranch.serving`. Errors are one sentence on stderr.

Options of `anabranch` itself come before the command, such as `anabranch --log-format json up`. The daemons take the
same log options. `anabranch --install-completion` installs completion for your shell.
[Exit codes](operate/troubleshoot.md#exit-codes) are those of all commands and daemons.
"""

_METRICS = """\

## Metrics

`/metrics` of `learner.status` has those of ingest, replay and the learner; `/metrics` of serving's port has its own.
[Monitor](operate/monitor.md#metrics) says what each means, and when to act.
"""

_TAIL = """\

## The state directory

| path below `state_dir` | holds |
| --- | --- |
| `versions/<number>/model.safetensors` | weights |
| `versions/<number>/manifest.json` | all else about it; immutable; without it the version does not exist |
| `versions/<number>/verdict.json` | whether serving may take it; replaced atomically |
| `bases/<sha256>/model.safetensors` | frozen weights, which versions and checkpoints name |
| `versions/state.json` | what serving serves; replaced atomically |
| `versions/state.lock` | held while `state.json` is read and written |
| `checkpoints/<number>/rank-0/` | training state: weights, optimizer, replay, holdout set, generators, ledger and positions |
| `checkpoints/<number>/manifest.json` | what the checkpoint is, and the digest of every file; without it the checkpoint does not exist |
| `replay/rank-0/<number>.rows` | the disk tier: the events that checkpoints name |
| `replay/rank-0/<number>.rows.before` | the same, put aside at a start where those checkpoints were not there |
| `labels/rank-0/` | files as of the disk tier, with the events that wait for labels |
| `secret.key` | the secret by which events are held out, kept and sampled |
| `erasures.log` | what was erased, up to which offsets, and what that removed; packed when it is long |
| `erasures.key` | the secret for the hashes of keys in `erasures.log` |
| `search.json` | settings for the model, and whether they are pinned, by `anabranch search pin` |
| `undo.json` | which events were undone, and the checkpoint that the learner returned to |
| `learner.json` | the learner's report, about once a second; replaced atomically |
| `serving.json` | serving's report, about once a second; replaced atomically |
| `inputs.json` | the counts of features that requests are compared with; replaced atomically |
| `learner-start.json`, `serving-start.json` | what the part does or waits for until its first report |
| `mlflow.json` | with `[track]` of MLflow: versions that wait to be registered, and the numbers of those that are |
| `track/` | with `[track]`: the files of tensorboard, wandb and trackio |
| `learner.lock` | held by the one learner |
| `generation` | how many learners have held the lock; with `[storage]` that of the lease, if it is later |
| `storage-holder` | with `[storage]`: the id by which the next learner recognizes its lease, and takes it at once; in mode `only` the URL of the state |
| `fetched/`, `fetching/` | with `[storage]`: copies of objects while they are needed, and of a checkpoint until it is complete |
| `traces/steps-<first>-<last>.json` | a trace of some steps, by `learner.profile` |
| `device_sharing/server-<n>`, `device_sharing/learner-<n>` | by which a server says that it needs the device, a rank that it yields |

## Variables of the environment

`ANABRANCH__STREAM__BOOTSTRAP_SERVERS=kafka:9092` overrides `stream.bootstrap_servers`; an unknown key is an error.
Values are TOML, as in `ANABRANCH__STREAM__TOPICS='["events"]'`; strings need no quotes.
`--set stream.bootstrap_servers=kafka:9092` does the same for one command or daemon, and comes last.
"""


_MANY = 3
"""An option of at least this number of commands is described once."""
_EVERYWHERE = {"--config", "--set", "--json"}
"""Options that a command does not name again."""


def reference() -> str:
    """Return the page."""
    return "".join(
        (
            _HEAD,
            *_sections("", Pipeline, {}),
            _PROPERTIES,
            *_properties(),
            _COMMANDS,
            *_commands(),
            _METRICS,
            *_metrics(),
            _TAIL,
        )
    )


def settings(prefix: str = "", model: type[BaseModel] = Pipeline) -> Iterator[tuple[str, FieldInfo]]:
    """Yield the dotted name of every key that has a value, with its field; `*` stands for a name of the user's."""
    for name, field in documented_fields(model).items():
        key = f"{prefix}{field.alias or name}"
        inner, many = _inner(field.annotation)
        if not inner:
            yield key, field
        for section in inner:
            yield from settings(f"{key}.*." if many else f"{key}.", section)


class DeclaredMetric(NamedTuple):
    """A metric as its collector declares it."""

    kind: str
    labels: Sequence[str]


def metrics() -> dict[str, DeclaredMetric]:
    """Return every metric by its name in the exposition."""
    found, collectors = {}, dict[Any, object]()
    for owner in (IngestMetrics, LearnerMetrics, ReplayMetrics, ServingMetrics):
        registry = CollectorRegistry()  # learner and serving have some metrics of one name
        owner(registry)
        collectors |= registry._collector_to_names
    for collector in collectors:
        for metric in collector.describe():
            name = f"{metric.name}_total" if metric.type == "counter" else metric.name
            declared: Any = metric if hasattr(metric, "_labelnames") else collector
            found[name] = DeclaredMetric(metric.type, declared._labelnames)
    return found


def commands() -> Mapping[str, Any]:
    """Return every command by its name, such as `up` or `versions ls`."""
    first = [word for words in SUMMARIES.values() for word in words]
    names = [f"{word} {after}".strip() for word in first for after in GROUPS.get(word, ("",))]
    return {name: find(*name.split()) for name in names}


def shown(text: str | None) -> str:
    """Return a help text as the terminal shows it, where a bracket without a backslash would begin a style."""
    return _line(text).replace("\\[", "[")


def _sections(
    path: str,
    model: type[BaseModel],
    known: dict[type[BaseModel], str],
    meaning: str | None = None,
    *,
    one_of: bool = False,
) -> Iterator[str]:
    """Yield a section and those within it; where it is one of several of a path, its heading has its first key.

    A model that several paths have is written at the first one, to which `known` leads.
    """
    if path:
        heading = f"[{path}]" + (f" with `{next(iter(documented_fields(model)))}`" if one_of else "")
        yield f"\n### {heading}\n\n"
        if model in known and model is not FieldSettings:
            anchor = re.sub(r"[^\w\- ]", "", known[model]).lower().replace(" ", "-")
            yield f"Its keys are those of [{known[model].replace('[', '').replace(']', '')}](#{anchor}).\n"
            return
        yield f"{_line(meaning or model.__doc__)}\n"
        known[model] = heading
    inside: list[tuple[str, type[BaseModel], str | None, bool]] = []
    rows = []
    for name, field in documented_fields(model).items():
        key = field.alias or name
        inner, many = _inner(field.annotation)
        if not inner:
            default, kind = _default(field), _kind(field.annotation, field.metadata)
            others = ", ".join(each for each in kind.split(", ") if each != default)
            values = "; ".join(filter(None, (default, "" if default and kind == "true or false" else others)))
            rows.append(f"- **`{key}`** ({values}): {_line(field.description)}\n")
        # What several fields share says nothing of each.
        meaning = field.description if inner == [FieldSettings] else None
        inside += [
            (f"{path}.{key}{'.NAME' if many else ''}".lstrip("."), section, meaning, len(inner) > 1)
            for section in inner
        ]
    if rows:
        yield from ("\n", *rows)
    for where, section, meaning, one_of in inside:
        yield from _sections(where, section, known, meaning, one_of=one_of)


def _properties() -> Iterator[str]:
    both, one, refused = (defaultdict[str, list[str]](list) for _ in range(3))
    for name, known in PROPERTIES.items():
        (both if known.kafka_python else one)[known.kind].append(f"`{name}`")
    for name, reason in REFUSED.items():
        refused[reason].append(f"`{name}`")
    for client, kinds in (("either client", both), ("`confluent` alone", one)):
        yield from _table((f"with {client}", "names"), [(kind, ", ".join(names)) for kind, names in kinds.items()])
    yield from _table(("refused", "because"), [(", ".join(names), reason) for reason, names in refused.items()])


def _inner(kind: Any) -> tuple[list[type[BaseModel]], bool]:
    """Return the sections that a field holds, and whether it holds them by name."""
    types = alternatives(kind)
    named = [inner for type_ in types if get_origin(type_) is dict for inner in alternatives(get_args(type_)[1])]
    sections = [type_ for type_ in [*types, *named] if isinstance(type_, type) and issubclass(type_, BaseModel)]
    return sections, bool(named)


def _kind(kind: Any, bounds: Sequence[Any] = ()) -> str:
    if get_origin(kind) is Annotated:
        inner, *bounds = get_args(kind)
        return _kind(inner, bounds)
    if get_origin(kind) in (Union, UnionType):
        # Each member of the union itself, since its bounds are next to it.
        members = [member for member in get_args(kind) if member is not type(None)]
        return " or ".join(dict.fromkeys(_kind(member, bounds if len(members) == 1 else ()) for member in members))
    words: dict[Any, str] = {
        bool: "true or false",
        int: "integer",
        float: "number",
        str: "string",
        SecretStr: "string, secret",
        Path: "path",
        timedelta: "duration",
        ByteSize: "size",
        Any: "anything",
    }
    if get_origin(kind) is Literal:
        return ", ".join(f'`"{choice}"`' for choice in get_args(kind))
    if get_origin(kind) in (tuple, list):
        return f"list of: {_kind(get_args(kind)[0])}"
    if get_origin(kind) is dict:
        return "table"
    for bound in bounds:
        if isinstance(bound, NamedClass):
            names = "".join(f'`"{name}"`, ' for name in bound.names)
            return f"{names}an import string, or an entry point of `{bound.group}`"
    return words.get(kind, "anything") + _bounds(bounds)


def _bounds(bounds: Sequence[Any]) -> str:
    signs = {"Ge": ">=", "Gt": ">", "Le": "<=", "Lt": "<"}
    rules = [rule for bound in bounds for rule in (bound.metadata if isinstance(bound, FieldInfo) else [bound])]
    # A bound has one field, named like its class.
    names = [(type(rule).__name__, rule) for rule in rules if type(rule).__name__ in signs]
    limits = {name: getattr(rule, name.lower()) for name, rule in names}
    if limits.keys() == {"Ge", "Le"}:
        return f" {limits['Ge']}..{limits['Le']}"
    return f" {', '.join(f'{signs[name]} {limit}' for name, limit in limits.items())}" if limits else ""


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    return "" if field.default is None else f"`{_toml(field.default)}`"


def _toml(value: Any) -> str:
    if isinstance(value, timedelta):
        return f'"{format_duration(value)}"'
    if isinstance(value, ByteSize):
        scale, unit = max(pair for pair in ((1, "B"), (10**3, "kB"), (10**6, "MB")) if value % pair[0] == 0)
        return f'"{value // scale}{unit}"'
    if isinstance(value, SecretStr):
        return f'"{value.get_secret_value()}"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml(item) for item in value)}]"
    if isinstance(value, dict):
        return "{}" if not value else str(value)
    return f'"{value}"' if isinstance(value, str | Path | Enum) else str(value)


def _commands() -> Iterator[str]:
    rows = [(f"`{_usage(each)}`", shown(each.help)) for each in command_tree().params]
    yield from _table(("option", "does"), rows)
    rows_of = {
        name: [
            (f"`{_usage(each)}`", shown(getattr(each, "help", ""))) for each in command.params if each.name != "help"
        ]
        for name, command in commands().items()
    }
    shared = {row for row, number in Counter(chain(*rows_of.values())).items() if number >= _MANY and "--" in row[0]}
    yield (
        "\nOptions of many commands. All that read the pipeline take `--config` and `--set`; "
        "`--json` is for those that print a result. The others are named below.\n"
    )
    yield from _table(("option", "does"), sorted(shared))
    for name, command in commands().items():
        yield f"\n### anabranch {name}\n\n{shown(command.help)}\n"
        if own := [row for row in rows_of[name] if row not in shared]:
            yield from ("\n", *(f"- {usage}: {does}\n" for usage, does in own))
        also = [usage.strip("`").split(",")[0].split()[0] for usage, does in rows_of[name] if (usage, does) in shared]
        if named := [f"`{option}`" for option in also if option not in _EVERYWHERE]:
            yield f"\n{'Also' if own else 'Options:'} {', '.join(named)}.\n"


def _usage(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return str(parameter.metavar)
    value = "" if parameter.is_flag else f" {parameter.metavar or parameter.name.upper()}"
    return ", ".join(parameter.opts) + value


def _metrics() -> Iterator[str]:
    found = sorted(metrics().items())
    for kind in dict.fromkeys(metric.kind for _, metric in found):
        yield f"\n### {kind.capitalize()}s\n\n"
        for name, metric in found:
            if metric.kind == kind:
                yield f"- `{name}{{{','.join(metric.labels)}}}`\n" if metric.labels else f"- `{name}`\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "\n"
    for row in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(row)} |\n"


def _line(text: str | None) -> str:
    return " ".join((text or "").split())


if __name__ == "__main__":
    sys.stdout.write(reference())
