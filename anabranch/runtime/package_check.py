"""That `ingest`, `replay`, `learner` and `serving` are this distribution's own: their names are generic.

It runs before anything of the four is imported, so that this module imports none of them.
"""

import base64
import hashlib
import importlib.metadata
import importlib.util
import sys
from pathlib import Path

PACKAGES = ("ingest", "replay", "learner", "serving")


def refuse_intruders() -> None:
    """Exit with 2 and one sentence on stderr when another distribution's package hides ours."""
    sentence = find_intruder()
    if sentence is not None:
        sys.stderr.write(f"anabranch: {sentence}\n")
        raise SystemExit(2)


def find_intruder() -> str | None:
    """Return a sentence that names the intruder, where it was found and the way out; None when all is well."""
    root = Path(__file__).resolve().parents[2]
    for package in PACKAGES:
        found = _folder_of(package)
        if found is None:
            return f'the package "{package}" is missing from {root}: install anabranch again'
        if found != root / package:
            return (
                f'the package "{package}" in {found}{_owners(package)} hides that of anabranch in {root}: '
                "take it off the Python path, or install anabranch in its own environment"
            )
        if _was_overwritten(package):
            return (
                f'the package "{package}" in {found} was overwritten by another distribution{_owners(package)}: '
                "install anabranch in its own environment"
            )
    return None


def _folder_of(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    if spec is None:
        return None
    if spec.origin is not None and Path(spec.origin).name != "__init__.py":
        return Path(spec.origin).resolve()
    folders = list(spec.submodule_search_locations or ())
    return Path(folders[0]).resolve() if folders else None


def _was_overwritten(package: str) -> bool:
    """Whether the package's `__init__.py` is not the one that was installed; an editable install records none."""
    try:
        files = importlib.metadata.files("anabranch") or []
    except importlib.metadata.PackageNotFoundError:
        return False
    for file in files:
        if file.as_posix() == f"{package}/__init__.py" and file.hash is not None:
            digest = hashlib.new(file.hash.mode, file.read_binary()).digest()
            return base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value
    return False


def _owners(package: str) -> str:
    names = set(importlib.metadata.packages_distributions().get(package, ())) - {"anabranch"}
    return f" ({', '.join(sorted(names))})" if names else ""
