"""The checkpoint format: all state that a restart restores, in a directory that is published atomically.

    var/checkpoints/<number>/rank-0/<part>.safetensors   tensors of one part: model, optimizer, replay, holdout, rng,
                                                         challenger-..., network-..., segment-...,
                                                         rows-...
    var/checkpoints/<number>/rank-0/state.json           all other values
    var/checkpoints/<number>/manifest.json               number, generation, step, schema, and the SHA-256 of every file
    var/checkpoints/<number>.set-aside/                  a checkpoint newer than one restored by command

In `rng`, the generators of another rank are one tensor of bytes, `rank-<r>`, packed by that rank.

As with versions, the files are written first, then fsynced; the manifest is written last, and the directory is renamed.
Nothing is unpickled. A part that equals that of an earlier checkpoint is a link, so each checkpoint is complete after
others are deleted. Only erasures change a checkpoint: see `erase_checkpoints.py`.

Torch is imported only where tensors are read or written, so that `anabranch undo` need not wait for it.
"""

import contextlib
import functools
import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from anabranch.core.failures import damage_is, decoded
from anabranch.core.files import MOST_BYTES
from anabranch.learner.errors import CheckpointError, MisfitError
from anabranch.learner.state_dir.folders import (
    MANIFEST,
    Folder,
    FolderManifest,
    ManifestDirectory,
    Storage,
    encode_manifest,
)

if TYPE_CHECKING:
    from torch import Tensor

    from anabranch.learner.checkpoints.rows_file import RowsFile
    from anabranch.learner.state_dir.safetensors_file import Piece
    from anabranch.replay.erasure.erasure_log import ErasureLog
    from anabranch.replay.row_source import RowSource

STATE = "state.json"
ERASED = "erased"
"""Key of the state: the number of records of `erasures.log` that are applied to the checkpoint."""
FORMAT = 17
EXTENSION = "extension-"
"""What the names of parts begin with that have events of an extension, one a row."""
SEGMENT = "segment-"
"""Prefix of parts with events of the store. Checkpoints share them, and can be restored without them."""
ROWS = "rows-"
"""Prefix of parts with the rows of a segment's events, for hosts that lack the tier with these rows: no others read
them."""
RANK = "rank-0"
SUFFIX = ".safetensors"

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class CheckpointManifest(FolderManifest, frozen=True, kw_only=True):
    """The description of a checkpoint."""

    format: int = 0

    @property
    def begins(self) -> bool:
        """Whether it has only the start positions of the stream, which fit any model and schema."""
        return self.files.keys() == {f"{RANK}/{STATE}"}


@dataclass(frozen=True)
class Checkpoint:
    """The state of a learner at one step.

    Attributes:
        step: the number of steps.
        tensors: by part.
        state: plain JSON values.
        carried: the parts that are linked from an earlier checkpoint, with its number.
        rows: the parts with rows, which are written and read in parts.
    """

    step: int
    tensors: "Mapping[str, Mapping[str, Tensor]]"
    state: Mapping[str, Any]
    carried: Mapping[str, int] = field(default_factory=dict)
    rows: "Mapping[str, RowSource]" = field(default_factory=dict)

    @property
    def begins(self) -> bool:
        """Whether it has only the start positions of the stream, as `CheckpointManifest.begins`."""
        return not self.tensors and not self.carried


class Checkpoints(ManifestDirectory[CheckpointManifest]):
    """The directory `var/checkpoints`, written and read by the learner that holds the lock.

    Methods that read raise CheckpointError for a damaged checkpoint, and OSError where the operating system cannot read
    it. After an OSError the checkpoint may be intact: no other one may replace it, and it must not be deleted.
    """

    _kind = "checkpoint"
    _manifest_type = CheckpointManifest
    _error = CheckpointError
    _prefix = f"{RANK}/"

    def __init__(self, path: Path, schema: str, generation: int, storage: Storage | None = None) -> None:
        """Take the directory, the schema's digest, the learner's generation, and the storage if it is not local."""
        super().__init__(path, storage)
        self.schema = schema
        self._generation = generation
        self.refused: set[int] = set()
        """Damaged checkpoints that `newest` passed over."""
        self.fetch_again: Callable[[CheckpointManifest, str], bool] | None = None
        """Replaces a file of a checkpoint that is damaged or missing; returns whether it could. Set by `resume_point`:
        it writes into these checkpoints, and stops with the learner."""

    def newest(self) -> tuple[int, Checkpoint] | None:
        """Return the number and contents of the newest intact checkpoint; None without checkpoints.

        Checkpoints are ordered by generation, then by number: one by a learner that had lost its lock is older.
        Damaged ones are logged.

        Raises:
            CheckpointError: the newest intact one was made under another schema or by another release; or all
                checkpoints are damaged.
            OSError: the newest one that may be intact cannot be read.
        """
        damage: dict[int, CheckpointError] = {}
        newest = self._newest(damage, lenient=False) or self._newest(damage, lenient=True)
        if newest is None and (left := [number for number in self.numbers() if number in damage]):
            raise CheckpointError(
                f"there are checkpoints in {self.location} ({', '.join(map(str, left))}), and none can be used: "
                f"{damage[left[-1]]}; restore one from a backup, or begin again by moving {self.location} away"
            )
        return newest

    def _newest(self, damage: dict[int, CheckpointError], *, lenient: bool) -> tuple[int, Checkpoint] | None:
        """Return the newest intact checkpoint; if `lenient`, also one with damaged segments.

        The errors of damaged ones are added to `damage`.
        """
        from anabranch.learner.checkpoints.rows_file import LazyRowsFile

        def read(manifest: CheckpointManifest) -> Checkpoint:
            paths = self._verified(manifest, lenient=lenient)
            self.check(manifest)
            rows = {
                part_of(name): LazyRowsFile(functools.partial(self._rows_again, manifest.number, part_of(name)))
                for name in manifest.files
                if part_of(name).startswith(ROWS)
            }
            return self._checkpoint(manifest, paths, rows)

        found = next(self._readable(read, damage), None)
        self.refused |= damage.keys()
        if found is not None:
            self.refused.discard(found[0])
        return found

    def states(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the state of each checkpoint that a restart may resume, by number, the newest first.

        Damaged ones are logged. Raises as `newest`.
        """

        def read(manifest: CheckpointManifest) -> dict[str, Any]:
            self.check(manifest)
            return self.state(manifest)

        return self._readable(read, {})

    def _readable(
        self, read: Callable[[CheckpointManifest], _T], damage: dict[int, CheckpointError]
    ) -> Iterator[tuple[int, _T]]:
        """Yield what `read` returns of each checkpoint, by number, the newest first.

        Damaged ones are logged, unless their errors are in `damage`, to which they are added.
        """
        for number in reversed(self.by_age()):
            try:
                found = read(self.manifest(number))
            except MisfitError:
                raise
            except CheckpointError as exc:
                if number not in damage:
                    log.warning("%s; it is not used", exc)
                damage[number] = exc
            else:
                yield number, found

    def latest(self) -> CheckpointManifest | None:
        """Return the manifest of the newest checkpoint, without checking its files; None where there is none.

        Raises:
            CheckpointError: the manifest is damaged.
        """
        numbers = self.by_age()
        return self.manifest(numbers[-1]) if numbers else None

    def check(self, manifest: CheckpointManifest) -> None:
        """Check that a checkpoint was made by this release and under this schema; raises MisfitError."""
        if manifest.format != FORMAT:
            raise MisfitError(
                f"checkpoint {manifest.number} in {self.location} is of format {manifest.format}, and this release "
                f"reads {FORMAT}; use the release that made it, or begin again by moving {self.location} away"
            )
        if manifest.schema != self.schema and not manifest.begins:
            raise MisfitError(
                f"checkpoint {manifest.number} in {self.location} was made under another [schema], or with another "
                f"tokenizer; restore the old one, or begin again by moving {self.location} away"
            )

    def write(self, number: int, checkpoint: Checkpoint, now: float) -> Path:
        """Write a checkpoint, completely or not at all, and return its path."""
        files: dict[str, str] = {}
        with self.storage.publish(number, self._generation) as folder:
            for part, tensors in checkpoint.tensors.items():
                name = f"{RANK}/{part}{SUFFIX}"
                files[name] = write_tensors(folder, name, tensors)
            for part, rows in checkpoint.rows.items():
                name = f"{RANK}/{part}{SUFFIX}"
                files[name] = write_rows(folder, name, rows)
            for part, source in checkpoint.carried.items():
                name, files_there = self.name(source, part), self.manifest(source).files
                files[name] = files_there[name]
                folder.link(name, self.folder(source), name)
            files[f"{RANK}/{STATE}"] = _write(folder, f"{RANK}/{STATE}", [msgspec.json.encode(checkpoint.state)])
            manifest = CheckpointManifest(
                format=FORMAT,
                number=number,
                generation=self._generation,
                time=now,
                step=checkpoint.step,
                schema=self.schema,
                files=files,
                base=None if checkpoint.begins else self.base,
            )
            folder.write(MANIFEST, [encode_manifest(manifest)])
        return self.directory(number)

    def part(self, number: int, part: str) -> "dict[str, Tensor]":
        """Read the tensors of one part of a checkpoint, and check its digest."""
        manifest, name = self.manifest(number), self.name(number, part)
        return _tensors(manifest, self.checked(manifest, name))

    def rows(self, number: int, part: str) -> "RowsFile":
        """Open the rows of one part of a checkpoint, after checking its digest."""
        manifest, name = self.manifest(number), self.name(number, part)
        return _rows(manifest, self.checked(manifest, name))

    def state(self, manifest: CheckpointManifest) -> dict[str, Any]:
        """Read the plain values of a checkpoint, and check their digest."""
        if (name := f"{RANK}/{STATE}") not in manifest.files:
            raise CheckpointError(f"checkpoint {manifest.number}: it has no {name}")
        with _damage_of(manifest):
            return decoded(self.read(manifest, name), dict[str, Any])

    def open(self, manifest: CheckpointManifest) -> "tuple[dict[str, Mapping[str, Tensor]], dict[str, Any]]":
        """Return the parts of a checkpoint, whose tensors are read on access, and its state.

        Damaged segments and rows are left out. Digests are not checked: reading a tensor may raise DamagedError.
        """
        from anabranch.learner.state_dir.safetensors_file import TensorFile

        parts: dict[str, Mapping[str, Tensor]] = {}
        folder = self.folder(manifest.number)
        for name in manifest.files:
            try:
                if name.endswith(SUFFIX):
                    with _damage_of(manifest):
                        parts[part_of(name)] = TensorFile(folder.local(name))
            except CheckpointError:
                if not part_of(name).startswith((SEGMENT, ROWS)):
                    raise
        with _damage_of(manifest):
            return parts, decoded(folder.read(f"{RANK}/{STATE}", MOST_BYTES), dict[str, Any])

    def newer_than(self, number: int) -> list[int]:
        """Return the checkpoints that a restart prefers to this one, the newest first.

        Raises CheckpointError where this one is not there any more.
        """
        by_age = self.by_age()
        if number not in by_age:
            raise CheckpointError(
                f"checkpoint {number} is not there any more: a learner that runs deletes old ones; stop it first"
            )
        return by_age[: by_age.index(number) : -1]

    def name(self, number: int, part: str) -> str:
        """Return the name of a part's file in a checkpoint; raises CheckpointError when it has none."""
        for name in self.manifest(number).files:
            if part_of(name) == part:
                return name
        raise CheckpointError(f"checkpoint {number}: it has no part {part}")

    def by_age(self) -> list[int]:
        """Return the numbers of all checkpoints, by generation, then by number."""

        def age(number: int) -> tuple[int, int]:
            generation = self.generation_of(number)
            return (self._generation if generation is None else generation), number  # `newest` reports damage

        return sorted(self.numbers(), key=age)

    def _verified(self, manifest: CheckpointManifest, *, lenient: bool) -> dict[str, Path]:
        """Return the paths of all files but rows, by name, after checking their digests."""
        paths: dict[str, Path] = {}
        for name in manifest.files:
            if part_of(name).startswith(ROWS):
                continue
            try:
                paths[name] = self._checked_again(manifest, name)
            except CheckpointError as exc:
                if not lenient or not name.startswith(f"{RANK}/{SEGMENT}"):
                    raise
                log.error("%s; going on without the events that were stored in it", exc)  # noqa: TRY400
        return paths

    def _checked_again(self, manifest: CheckpointManifest, name: str) -> Path:
        """Return the path of a file that has its digest, perhaps after `fetch_again`."""
        try:
            return self.checked(manifest, name)
        except CheckpointError:
            if self.fetch_again is None or not self.fetch_again(manifest, name):
                raise
        return self.checked(manifest, name)

    def _rows_again(self, number: int, part: str) -> "RowsFile":
        """Open the rows of a part, as `rows`, perhaps after `fetch_again`."""
        manifest = self.manifest(number)
        return _rows(manifest, self._checked_again(manifest, self.name(number, part)))

    def _checkpoint(
        self, manifest: CheckpointManifest, paths: Mapping[str, Path], rows: "Mapping[str, RowSource]"
    ) -> Checkpoint:
        state = self.state(manifest)
        tensors = {part_of(name): _tensors(manifest, path) for name, path in paths.items() if name.endswith(SUFFIX)}
        return Checkpoint(manifest.step, tensors, state, rows=rows)


def check_age(number: int, checkpoint: Checkpoint, written: "ErasureLog") -> None:
    """Raise MisfitError where the log has dropped records that a checkpoint needs."""
    if not checkpoint.begins and checkpoint.state.get(ERASED, 0) < written.dropped:
        raise MisfitError(
            f"checkpoint {number} was made before events were erased that {written.path} no longer lists, so that they "
            "would come back with it; restore a newer checkpoint, or begin again by moving the checkpoints away"
        )


def part_of(name: str) -> str:
    """Return the part of a file, by its name in the manifest."""
    return name.removeprefix(f"{RANK}/").partition(".")[0]


def write_tensors(folder: Folder, name: str, tensors: "Mapping[str, Tensor]") -> str:
    """Write the file of a part, and return its digest."""
    from anabranch.learner.state_dir.safetensors_file import pieces_of

    return _write(folder, name, pieces_of({key: tensor.cpu().contiguous() for key, tensor in tensors.items()}))


def write_rows(folder: Folder, name: str, rows: "RowSource") -> str:
    """Write the file of a part with rows, and return its digest; raises OSError also when they cannot be read."""
    from anabranch.learner.checkpoints.rows_file import row_pieces

    return _write(folder, name, row_pieces(rows))


def rows_part(segment: str) -> str:
    """Return the part with the rows of the part with a segment."""
    return f"{ROWS}{segment.removeprefix(SEGMENT)}"


def _damage_of(manifest: CheckpointManifest) -> contextlib.AbstractContextManager[None]:
    return damage_is(CheckpointError, f"checkpoint {manifest.number}: a part of it cannot be read")


def _write(folder: Folder, name: str, pieces: "Iterable[Piece]") -> str:
    digest = hashlib.sha256()

    def digested() -> "Iterator[Piece]":
        for piece in pieces:
            digest.update(piece)
            yield piece

    folder.write(name, digested())
    return digest.hexdigest()


def _tensors(manifest: CheckpointManifest, path: Path) -> "dict[str, Tensor]":
    from anabranch.learner.state_dir.safetensors_file import TensorFile

    with _damage_of(manifest):
        return dict(TensorFile(path))


def _rows(manifest: CheckpointManifest, path: Path) -> "RowsFile":
    from anabranch.learner.checkpoints.rows_file import RowsFile

    with _damage_of(manifest):
        return RowsFile(path)


Age = tuple[int, int]
"""Generation and number of a checkpoint: the order in which a restart prefers them."""


def age_of(checkpoints: Checkpoints, number: int) -> Age:
    """Return the age of a checkpoint by its manifest; of generation 0 where that is damaged."""
    return checkpoints.generation_of(number) or 0, number


def newest_age(checkpoints: Checkpoints) -> Age:
    """Return the age of the newest checkpoint by its manifest; zeros without one."""
    return max((age_of(checkpoints, number) for number in checkpoints.numbers()), default=(0, 0))
