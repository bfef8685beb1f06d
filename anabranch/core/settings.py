"""The base of all sections of `pipeline.toml`, and types that several of them use. Imports no torch."""

import ast
import inspect
import re
import textwrap
from itertools import pairwise
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    SecretStr,
)
from pydantic.fields import FieldInfo


def written(pattern: str, how: str) -> AfterValidator:
    """Return a validator that refuses strings that do not match all of `pattern`; `how` describes the form."""

    def match(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise ValueError(f"write {how}")
        return value

    return AfterValidator(match)


def http_address(what: str, example: str, credentials: str) -> AfterValidator:
    """Return a validator of an HTTP server's address without credentials, which the keys `credentials` have instead."""

    def check(value: str) -> str:
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f'write {what}, such as "{example}"')
        if "@" in parts.netloc:
            raise ValueError(f"contains credentials; write them as {credentials}")
        if parts.query or parts.fragment:
            raise ValueError('ends with the path: remove "?" or "#" and what follows')
        return value.rstrip("/")

    return AfterValidator(check)


_UUID = r"(GPU|MIG)-[0-9A-Fa-f][0-9A-Fa-f-]*"
_DEVICE = r"auto|cpu|mps|cuda(:\d+)?"
_FORMS = '"auto", "cpu", "mps", "cuda", such as "cuda:1", or a UUID such as "GPU-5ea7..." or "MIG-5ea7..."'
DeviceName = Annotated[str, written(rf"{_DEVICE}|{_UUID}", _FORMS)]
DeviceNames = Annotated[str, written(rf"{_DEVICE}|{_UUID}(,{_UUID})*", f"{_FORMS}; several UUIDs with commas between")]
"""One device, or a UUID for each of several processes."""


def uuids_in(devices: str) -> list[str]:
    """Return the UUIDs in the value of a `DeviceNames`; none where it names devices in another way."""
    return devices.split(",") if devices.startswith(("GPU-", "MIG-")) else []


def _token(value: SecretStr) -> SecretStr:
    if not re.fullmatch("[!-~]+", value.get_secret_value().strip()):
        raise ValueError("write the token alone: ASCII characters without spaces")
    return SecretStr(value.get_secret_value().strip())  # files end with a newline


BearerToken = Annotated[SecretStr, AfterValidator(_token)]
"""A token that is sent in the header `Authorization`."""


class Section(BaseModel):
    """A section of `pipeline.toml`: frozen, and an unknown key is an error."""

    # The root builds one validator for all, at its first use, instead of each section its own at import.
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, defer_build=True)


def documented_fields(section: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields of a section, each with the docstring below it as its description.

    pydantic's `use_attribute_docstrings` would parse the source of every section whenever a process starts. Where the
    source is not installed, fields have no description.
    """
    fields = section.model_fields
    for owner in reversed(section.__mro__):
        if issubclass(owner, BaseModel) and owner is not BaseModel:
            try:
                source = inspect.getsource(owner)
            except OSError:
                continue
            (parsed,) = ast.parse(textwrap.dedent(source)).body
            assert isinstance(parsed, ast.ClassDef)
            for field, below in pairwise(parsed.body):
                name = ast.unparse(field.target) if isinstance(field, ast.AnnAssign) else ""
                if name in fields and isinstance(below, ast.Expr):
                    fields[name].description = inspect.cleandoc(ast.literal_eval(below.value))
    return fields
