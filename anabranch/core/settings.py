"""The base of all sections of `pipeline.toml`, and types that several of them use. Imports no torch."""

import re
from typing import Annotated

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
)


def written(pattern: str, how: str) -> AfterValidator:
    """Return a validator that refuses strings that do not match all of `pattern`; `how` describes the form."""

    def match(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise ValueError(f"write {how}")
        return value

    return AfterValidator(match)


DeviceName = Annotated[str, written(r"auto|cpu|mps|cuda(:\d+)?", '"auto", "cpu", "mps", "cuda" or such as "cuda:1"')]


class Section(BaseModel):
    """A section of `pipeline.toml`: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True)
