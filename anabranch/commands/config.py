"""`anabranch config check` and `show`: what is wrong with a pipeline's settings, and what they resolve to."""

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from anabranch.config.loader import Config, Examined, examine_config
from anabranch.config.toml_text import toml_key, toml_value
from anabranch.core.durations import format_duration
from anabranch.core.errors import SettingsError

_HIDDEN = "(hidden)"


def check_config(path: Path) -> dict[str, Any]:
    """Return whether the settings are valid, and every fault with its key, as JSON values."""
    examined = examine_config(path)
    faults = [{"key": ".".join(key), "message": sentence} for key, sentence in examined.faults]
    return {"config": str(path.absolute()), "valid": not faults, "faults": faults}


def resolved_config(path: Path) -> dict[str, Any]:
    """Return all settings, with defaults and overrides, as JSON values; secrets are hidden.

    Raises:
        SettingsError: the settings are not valid.
    """
    examined: Examined = examine_config(path)
    if examined.faults:
        raise SettingsError(examined.faults[0].sentence)
    config: Config | None = examined.config
    assert config is not None
    document: dict[str, Any] = _plain(config.pipeline.model_dump(by_alias=True), examined.secrets)
    return document


def render_toml(document: Mapping[str, Any]) -> str:
    """Return settings as TOML; those without a value are left out."""
    return "\n".join(_lines(document, ())) + "\n"


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
