"""`anabranch config`: what is wrong with a pipeline's settings, what they resolve to, and what there is to set."""

from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, SecretStr

from anabranch.command import AsJson, ConfigFile, command, output, say
from anabranch.config.loader import Config
from anabranch.config.pipeline import Pipeline, alternatives
from anabranch.config.toml_text import toml_key, toml_value
from anabranch.core.durations import format_duration
from anabranch.core.errors import SettingsError
from anabranch.core.settings import documented_fields
from anabranch.runtime.lifecycle import Exit

_HIDDEN = "(hidden)"
_ELSEWHERE = {
    "description": "The value is that of a variable of the environment, or the text of a file.",
    "type": "object",
    "properties": {"env": {"type": "string"}, "file": {"type": "string"}},
    "additionalProperties": False,
    "minProperties": 1,
    "maxProperties": 1,
}


@command("anabranch config check -c digits/pipeline.toml")
def check(config: ConfigFile, as_json: AsJson = False) -> Exit:
    """Check the settings, and print every fault. Exits with 2 when there is one."""
    checked = check_config(config)
    if as_json:
        output(checked, lambda: None)
    elif checked["valid"]:
        say(f"{checked['config']} is valid")
    else:
        say(*(fault["message"] for fault in checked["faults"]))
    return Exit.DONE if checked["valid"] else Exit.SETTINGS


@command("anabranch config show --json")
def show(config: ConfigFile, as_json: AsJson = False) -> None:
    """Print all settings as TOML, with defaults, --set and overrides from the environment. Secrets are hidden."""
    document = resolved_config(config)
    if as_json:
        output(document, lambda: None)
    else:
        say(render_toml(document).rstrip("\n"))


@command("anabranch config schema > pipeline.schema.json")
def schema() -> None:
    """Print the JSON Schema of pipeline.toml, by which editors complete and check it."""
    output(config_schema(), lambda: None)


def check_config(config: ConfigFile) -> dict[str, Any]:
    """Return whether the settings are valid, and every fault with its key, as JSON values."""
    examined = config.examine()
    faults = [{"key": ".".join(key), "message": sentence} for key, sentence in examined.faults]
    return {"config": str(config.path.absolute()), "valid": not faults, "faults": faults}


def resolved_config(file: ConfigFile) -> dict[str, Any]:
    """Return all settings, with defaults and overrides, as JSON values; secrets are hidden.

    Raises:
        SettingsError: the settings are not valid.
    """
    examined = file.examine()
    if examined.faults:
        raise SettingsError(examined.faults[0].sentence)
    config: Config | None = examined.config
    assert config is not None
    document: dict[str, Any] = _plain(config.pipeline.model_dump(by_alias=True), examined.secrets)
    if config.state_dir.is_relative_to(config.folder):
        document["state_dir"] = _plain(config.state_dir.relative_to(config.folder), examined.secrets)
    return document


def render_toml(document: Mapping[str, Any]) -> str:
    """Return settings as TOML; those without a value are left out."""
    return "\n".join(_lines(document, ())) + "\n"


def config_schema() -> dict[str, Any]:
    """Return the JSON Schema of `pipeline.toml`, with the meaning and the default of each key as the file writes it."""
    document = Pipeline.model_json_schema()
    definitions = document["$defs"]
    for section in dict.fromkeys(_sections(Pipeline)):
        schema = definitions.get(section.__name__, document)
        for name, field in documented_fields(section).items():
            found = schema["properties"][field.alias or name]
            found.pop("title", None)
            if isinstance(found.get("default"), dict) or found.get("default") is None:
                found.pop("default", None)
            if isinstance(field.default, timedelta):
                found["default"] = format_duration(field.default)
            if field.description:
                found["description"] = field.description
        if "name" in section.model_fields and section is not Pipeline:  # its name alone may stand for it
            definitions[section.__name__] = {"anyOf": [schema, {"type": "string"}]}
    document = _with_elsewhere(document)
    document["$defs"]["elsewhere"] = _ELSEWHERE
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "pipeline.toml", **document}


def _sections(section: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """Yield a section and those within it."""
    yield section
    for field in section.model_fields.values():
        kinds = alternatives(field.annotation)
        kinds += [inner for kind in kinds if get_origin(kind) is dict for inner in alternatives(get_args(kind)[1])]
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _sections(kind)


def _with_elsewhere(node: Any) -> Any:
    """Let every string be in a variable of the environment, or in a file."""
    if isinstance(node, list):
        return [_with_elsewhere(each) for each in node]
    if not isinstance(node, dict):
        return node
    if node.get("type") == "string":
        kept = {name: node[name] for name in ("description", "default") if name in node}
        bare = {name: value for name, value in node.items() if name not in kept}
        return {**kept, "anyOf": [bare, {"$ref": "#/$defs/elsewhere"}]}
    return {name: _with_elsewhere(each) for name, each in node.items()}


def _plain(value: Any, secrets: set[str]) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item, secrets) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, secrets) for item in value]
    if isinstance(value, SecretStr):
        return _HIDDEN if value.get_secret_value() else ""
    if isinstance(value, timedelta):
        return format_duration(value)
    if isinstance(value, str | Path):
        return _HIDDEN if str(value) in secrets else str(value)
    return value if value is None or isinstance(value, bool | float) else int(value)


def _lines(table: Mapping[str, Any], location: tuple[str, ...]) -> list[str]:
    plain = {key: value for key, value in table.items() if not isinstance(value, Mapping) and value is not None}
    lines = [f"{toml_key(key)} = {toml_value(value)}" for key, value in plain.items()]
    if location and (lines or not table):
        lines = ["", f"[{'.'.join(map(toml_key, location))}]", *lines]
    for key, value in table.items():
        if isinstance(value, Mapping):
            lines += _lines(value, (*location, key))
    return lines
