"""Packages that come with an extra: what needs one that is not installed says so in one sentence."""

import contextlib
from collections.abc import Iterator

from anabranch.core.errors import SettingsError


@contextlib.contextmanager
def needs(what: str, package: str, extra: str, otherwise: str = "") -> Iterator[None]:
    """Let the block import a package that `what` needs.

    Args:
        what: a setting or an option, for the sentence.
        package: the package.
        extra: the extra of Anabranch that brings it.
        otherwise: another way out, such as "take the section out".

    Raises:
        SettingsError: it cannot be imported. Where it is there and broken, the sentence says why.
    """
    try:
        yield
    except ImportError as exc:
        why = "" if isinstance(exc, ModuleNotFoundError) else f" ({exc})"
        way_out = f"pip install 'anabranch[{extra}]'{otherwise and f', or {otherwise}'}"
        raise SettingsError(f"{what} needs {package}{why}: {way_out}") from exc
