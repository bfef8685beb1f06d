"""The one mutable object of the state in an object store: who writes there, and which folders exist.

    head.json                          generation, holder and beat of the learner; checkpoints and versions that exist
    versions/<n>-<g>/<file>            a version, written by generation g; verdict.json may be replaced
    checkpoints/<n>-<g>/manifest.json  as in the state directory
    checkpoints/<n>-<g>/objects.json   the path of each file in `files/`
    files/<sha256>-<g>-<n>             contents of files of checkpoints, which several of them may name
    bases/<sha256>-<g>                 frozen weights, which versions and checkpoints may name
    erasures                           `erasures.key`, then `erasures.log`, as in the state directory

A folder exists if `head.json` lists it. Its files are written first, then its manifest, then the head is replaced under
compare-and-swap. What is deleted leaves the head first, then its manifest is deleted, then the files that no checkpoint
in the head names. A checkpoint that was set aside is in the head, and its files are kept, but it does not exist.

Paths have the generation of their writer, so that one that was fenced off changes nothing of its successor's. A folder
that is written once more gets a new generation: late requests of the earlier attempt hit none of its paths.
"""

import logging
import re
from typing import Literal

import msgspec

from anabranch.core.failures import damage_is, decoded
from anabranch.core.files import MOST_BYTES, MOST_NUMBER
from anabranch.core.object_store.bucket import Bucket
from anabranch.core.object_store.tagged_object import TaggedObject
from anabranch.learner.errors import StorageError

HEAD = "head.json"
OBJECTS = "objects.json"
BASES_PREFIX = "bases"
FORMAT = 2
Kind = Literal["checkpoints", "versions"]
_LONGEST = 200
"""Characters of a wrong entry in a log line."""
_GENERATION = re.compile(r"(?:checkpoints|versions|files|bases)/[0-9a-f]+-([0-9]+)(?:[-/]|$)")


log = logging.getLogger(__name__)


class StoredFile(msgspec.Struct, frozen=True):
    """An entry of `objects.json`: where the contents of a file are."""

    path: str
    size: int
    """In bytes."""
    sha256: str = ""
    """Of the contents; of a version's file it is empty where only the manifest has it."""


class BucketHead(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of `head.json`."""

    format: int = FORMAT
    generation: int
    """Of the learner that holds the lease; larger than all earlier ones."""
    holder: str
    """The state directory of that learner, by its id."""
    process: str = ""
    """The id of its process: a copy of a state directory has the same id as the original."""
    pipeline: str = ""
    """Name of the pipeline."""
    topics: list[str] = []
    """Its topics."""
    beat: int = 0
    """Grows with each write: a lease whose head stays the same is not renewed."""
    released: bool = False
    """Whether the holder has ended in order."""
    checkpoints: dict[int, int] = {}
    """The generation that wrote each checkpoint, by number."""
    set_aside: dict[int, int] = {}
    """The generation that wrote each checkpoint that was set aside: it does not exist, and its files are kept."""
    versions: dict[int, int] = {}
    """The generation that wrote each version, by number."""
    verdicts: dict[int, str] = {}
    """SHA-256 of the verdict of each version that has one."""
    bases: dict[str, int] = {}
    """The generation that wrote each base, by its SHA-256."""

    def folders(self, kind: Kind) -> dict[int, int]:
        """Return the generation that wrote each folder of a kind, by number."""
        return self.checkpoints if kind == "checkpoints" else self.versions


def folder_path(kind: Kind, number: int, generation: int) -> str:
    """Return the path of a folder."""
    return f"{kind}/{number}-{generation}"


def file_path(sha256: str, generation: int, number: int) -> str:
    """Return the path of the contents of a checkpoint's file, by the checkpoint that has them first."""
    return f"files/{sha256}-{generation}-{number}"


def base_path(sha256: str, generation: int) -> str:
    """Return the path of a base."""
    return f"{BASES_PREFIX}/{sha256}-{generation}"


def generation_of(path: str) -> int | None:
    """Return the generation that wrote an object of a folder, of `files/` or `bases/`; None for another object."""
    found = _GENERATION.match(path)
    return int(found[1]) if found is not None else None


def with_folder(head: BucketHead, kind: Kind, number: int, generation: int, verdict: str | None) -> BucketHead:
    """Return a head that lists a folder, and the SHA-256 of a version's verdict if it has one."""
    changed = {kind: {**head.folders(kind), number: generation}}
    verdicts = head.verdicts if verdict is None else {**head.verdicts, number: verdict}
    return msgspec.structs.replace(head, verdicts=verdicts, **changed)


def without_folder(head: BucketHead, kind: Kind, number: int) -> BucketHead:
    """Return a head that does not list a folder."""
    changed = {kind: {n: generation for n, generation in head.folders(kind).items() if n != number}}
    left = {n: verdict for n, verdict in head.verdicts.items() if n != number or kind == "checkpoints"}
    return msgspec.structs.replace(head, verdicts=left, **changed)


class HeadReader(TaggedObject[BucketHead | None]):
    """Reads the head as it changes; its contents are None while there is none."""

    def __init__(self, bucket: Bucket) -> None:
        super().__init__(bucket, HEAD, lambda content: decode_head(bucket, content), None, StorageError, MOST_BYTES)


def decode_head(bucket: Bucket, content: bytes) -> BucketHead:
    """Return the head; raises StorageError when it cannot be used."""
    with damage_is(StorageError, f"{bucket.url}/{HEAD} cannot be read"):
        head = decoded(content, BucketHead)
    if head.format != FORMAT:
        raise StorageError(
            f"{bucket.url}/{HEAD} is of format {head.format}, and this release reads {FORMAT}; use the release that "
            "wrote it, or another storage.url"
        )
    usable = {each: _usable(getattr(head, each)) for each in ("checkpoints", "set_aside", "versions")}
    wrong = [f"{each} {number}" for each, kept in usable.items() for number in getattr(head, each).keys() - kept.keys()]
    if wrong:
        log.warning("%s/%s lists what no learner writes, which is left out: %s", bucket.url, HEAD, wrong[0][:_LONGEST])
    return msgspec.structs.replace(head, **usable) if wrong else head


def _usable(folders: dict[int, int]) -> dict[int, int]:
    """Return those of the folders whose number and generation a learner may have written."""
    return {
        number: generation
        for number, generation in folders.items()
        if 0 < number <= MOST_NUMBER and 0 <= generation <= MOST_NUMBER
    }
