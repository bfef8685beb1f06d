"""Code of the user that settings name, by import string or by the name of an entry point."""

import difflib
import functools
import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationInfo
from pydantic_core import CoreSchema, core_schema

from anabranch.core.errors import SettingsError

IMPORT_STRING = r"[A-Za-z_][\w.]*:[A-Za-z_]\w*"
FOLDER = "folder"
"""The key of a validation context that has the config's folder."""
_LONGEST = 500
"""Characters of an error that are repeated: some of torch have thousands."""


Kind = TypeVar("Kind")


class UsersCodeError(SettingsError, ValueError):
    """What a setting names cannot be imported, or is not what the setting takes. A ValueError, for validators."""


def in_one_line(error: BaseException) -> str:
    """Return an error on one line, with the innermost line of the user's code in its traceback, if there is any."""
    others = ["<frozen", f"{Path(__file__).parents[1]}/"]
    modules = [sys.modules[name] for name in ("importlib", "torch") if name in sys.modules]
    others += [f"{Path(str(module.__file__)).parent}/" for module in modules]
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    users = [(name, line) for name, line in frames if not name.startswith(tuple(others))]
    location = " ({}, line {})".format(*users[-1]) if users else ""
    message = " ".join(str(error).split())
    if len(message) > _LONGEST:
        message = f"{message[:_LONGEST]} ..."
    return f"{type(error).__name__}: {message}{location}"


def imported(reference: str, folder: Path | None = None) -> Callable[..., Any]:
    """Return the callable that an import string names; `folder`, the config's, is on the path from then on, last.

    Raises:
        UsersCodeError: the module is not there or fails, or has no callable of the name.
    """
    module_name, _, name = reference.partition(":")
    if folder is not None and str(folder) not in sys.path:
        sys.path.append(str(folder))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as exc:
        if exc.name != module_name.partition(".")[0] and exc.name != module_name:
            raise UsersCodeError(f"{module_name} imports {exc.name}, which is missing") from exc
        where = f"in {folder} or on the Python path" if folder is not None else "on the Python path"
        raise UsersCodeError(f"no module named {exc.name} {where}") from exc
    except (Exception, SystemExit) as exc:  # the user's own code may raise anything
        raise UsersCodeError(f"importing {module_name} fails: {in_one_line(exc)}") from exc
    member = getattr(module, name, None)
    if not callable(member):
        raise UsersCodeError(f"{module.__file__} has no function or class {name}")
    return cast("Callable[..., Any]", member)


def check_function(reference: str, info: ValidationInfo) -> str:
    """Validate a setting that is the import string of a function, which is imported as `NamedClass` says."""
    if not re.fullmatch(IMPORT_STRING, reference):
        raise ValueError('write an import string such as "my_code:my_function"')
    imported(reference, (info.context or {}).get(FOLDER))
    return reference


@dataclass(frozen=True)
class NamedClass:
    """Annotates a setting that names a class: one of ours by its name, another by import string or entry point.

    A class of another name is imported when the setting is validated, so that its facts are known to all that reads
    settings. Validation finds it in the folder that its context has as `folder`, the config's.

    Attributes:
        key: the setting, such as `learner.strategy`.
        names: of our classes.
        group: of the entry points, such as `anabranch.strategies`.
        base: import string of the class that it has to extend.
    """

    key: str
    names: tuple[str, ...]
    group: str
    base: str

    def find(self, name: str, folder: Path | None = None) -> type[Any]:
        """Import the class of a name that is none of ours.

        Raises:
            UsersCodeError: there is none, or it does not extend `base`; a sentence without key and name.
        """
        reference = name if re.fullmatch(IMPORT_STRING, name) else entry_points_of(self.group).get(name)
        if reference is None:
            close = difflib.get_close_matches(name, self.names, 1, 0.5)
            ours = "".join(f"'{each}', " for each in self.names)
            raise UsersCodeError(
                f'write {ours}an import string such as "my_code:MyClass", or an entry point of {self.group}'
                + "".join(f'; the nearest known value is "{each}"' for each in close)
            )
        found, base = imported(reference, folder), imported(self.base)
        assert isinstance(base, type)
        if not isinstance(found, type):
            raise UsersCodeError(f"{reference} is a {type(found).__name__}, not a class")
        if not issubclass(found, base):
            raise UsersCodeError(f"{reference} does not extend {self.base.replace(':', '.')}")
        return found

    def kind_of(self, name: str, kinds: Mapping[str, Kind]) -> Kind:
        """Return what a class is: the entry of ours in a catalog, or the attribute `kind` of an imported one.

        Raises:
            UsersCodeError: there is no such class, or its `kind` is not of the catalog's type.
        """
        if name in kinds:
            return kinds[name]
        kind, expected = self.find(name).kind, type(next(iter(kinds.values())))
        if not isinstance(kind, expected):
            is_not = f"is a {type(kind).__name__}, not a {expected.__name__}"
            raise UsersCodeError(f'{self.key} = "{name}": its attribute kind {is_not}')
        return kind

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Validate that there is such a class."""

        def check(name: str, info: ValidationInfo) -> str:
            if name not in self.names:
                self.find(name, (info.context or {}).get(FOLDER))
            return name

        return core_schema.with_info_after_validator_function(check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Let editors complete our names, and accept any other."""
        return {"anyOf": [{"enum": [*self.names]}, handler(schema)]} if self.names else handler(schema)


def name_of(kind: type[Any]) -> str:
    """Return the name that a checkpoint has of a class: its own where it is ours or torch's, else its import string."""
    ours = kind.__module__.partition(".")[0] in ("anabranch", "torch")
    return kind.__name__ if ours else f"{kind.__module__}:{kind.__qualname__}"


@functools.cache
def entry_points_of(group: str) -> dict[str, str]:
    """Return the import strings of a group of entry points that installed packages have, by name."""
    return {each.name: each.value for each in entry_points(group=group)}


def build(key: str, name: str, kind: Callable[..., Any], arguments: Mapping[str, Any], *given: object) -> Any:
    """Call a class with what it is given by position, and the arguments that the settings have for it.

    Args:
        key: the setting that names the class, such as `learner.strategy`.
        name: its value.
        kind: the class.
        arguments: keyword arguments by name. Defaults of text, whole numbers from 1, numbers from 0 and truth values
            say which values fit.
        given: positional arguments, which settings cannot set.

    Raises:
        SettingsError: the class has no such argument, or refuses a value.
    """
    every = list(inspect.signature(kind).parameters.values())[len(given) :]
    parameters = {each.name: each for each in every if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)}
    takes_any = any(each.kind is each.VAR_KEYWORD for each in every)
    for argument, value in arguments.items():
        if argument not in parameters and not takes_any:
            takes = f"it takes {', '.join(parameters)}" if parameters else "it takes no arguments"
            raise SettingsError(f"{key}: {name} has no {argument!r}; {takes}")
        if argument in parameters:
            _check(key, name, argument, value, parameters[argument].default)
    lacking = [each.name for each in parameters.values() if each.default is each.empty and each.name not in arguments]
    if lacking:
        raise SettingsError(f"{key}: {name} needs {lacking[0]!r}, which has no default; set it")
    try:
        return kind(*given, **arguments)
    except SettingsError:
        raise
    except ValueError as exc:
        raise SettingsError(f"{key}: {name} refuses {dict(arguments)}: {exc}") from exc
    except Exception as exc:
        raise SettingsError(f"{key}: {name} fails with {dict(arguments)}: {in_one_line(exc)}") from exc


def _check(key: str, name: str, argument: str, value: object, default: object) -> None:
    """Raise SettingsError unless the value is of the default's kind; a default of another kind takes any."""
    kinds = {
        str: (isinstance(value, str), "a string"),
        bool: (isinstance(value, bool), "true or false"),
        int: (type(value) is int and value >= 1, "a whole number of at least 1"),
        float: (type(value) in (int, float) and 0 <= value < float("inf"), "a number of at least 0"),  # type: ignore[operator]
    }
    fits, needed = kinds.get(type(default), (True, ""))
    if not fits:
        raise SettingsError(f"{key}: {name} refuses {argument} = {value!r}: it has to be {needed}")
