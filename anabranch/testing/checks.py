"""A check of a promise: a function that raises when the promise is broken, or is no matter of what is checked."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from anabranch.core.errors import AnabranchError
from anabranch.core.users_code import in_one_line

Check = Callable[[Any], None]
"""Checks one promise of a subject, which each module of checks describes; the name of the function is the promise."""


class BrokenPromiseError(AssertionError):
    """A promise is broken: one sentence on how."""


class NotPromisedError(Exception):
    """The subject does not promise this: one sentence on why."""


def expect(fact: object, sentence: str) -> None:
    """Raise BrokenPromiseError with the sentence unless the fact is true."""
    if not fact:
        raise BrokenPromiseError(sentence)


def name_of(check: Check) -> str:
    """Return a promise in words."""
    return check.__name__.replace("_", " ")


def run_all(checks: Sequence[Check], subject: object) -> Iterator[tuple[str, bool | None, str]]:
    """Yield each promise, whether it is kept (None: not promised), and a sentence where it is not."""
    for check in checks:
        try:
            check(subject)
        except NotPromisedError as exc:
            yield name_of(check), None, str(exc)
        except (BrokenPromiseError, AnabranchError) as exc:
            yield name_of(check), False, str(exc)
        except Exception as exc:  # noqa: BLE001 the user's own code may raise anything
            yield name_of(check), False, in_one_line(exc)
        else:
            yield name_of(check), True, ""
