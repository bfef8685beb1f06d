"""The checkpoint format: all state that a restart resumes from, in a directory published completely or not at all.

    var/checkpoints/<number>/rank-0/<part>.safetensors   tensors of one part: model, optimizer, replay, holdout, rng,
                                                         segment-...
    var/checkpoints/<number>/rank-0/state.json           all values that are no tensors
    var/checkpoints/<number>/manifest.json               number, generation, step, schema, and the SHA-256 of every file
    var/checkpoints/<number>.set-aside/                  a checkpoint that `checkpoints restore` went back beyond

In `rng` the generators of another rank are one tensor of bytes, `rank-<r>`, packed by that rank.

Files first, fsync, manifest last, one rename, as with versions. Nothing is unpickled. A part that is the same as in an
earlier checkpoint is a link: each checkpoint is complete by itself, whichever others are deleted.

Only erasures change a checkpoint: a part without the erased events is written as <part>.<n>.safetensors, then the
manifest is replaced, then the old file is deleted.
"""

import contextlib
import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor

from anabranch.core.failures import DamagedError, damage_is, decoded
from anabranch.core.files import MOST_BYTES, check_names
from learner.errors import CheckpointError, MisfitError
from learner.state_dir.folders import MANIFEST, Folder, LocalStorage, Storage
from learner.state_dir.safetensors_file import Piece, TensorFile, digest_of, pieces_of

STATE = "state.json"
ERASED = "erased"
"""What in the state says how many records of `erasures.log` are applied to a checkpoint."""
FORMAT = 8
SEGMENT = "segment-"
"""Prefix of parts that checkpoints share: events of the store, which a checkpoint can be restored without."""
RANK = "rank-0"
SUFFIX = ".safetensors"

log = logging.getLogger(__name__)


class CheckpointManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a checkpoint, and the digests of its files."""

    format: int = 0
    number: int
    generation: int
    time: float
    step: int
    schema: str
    files: dict[str, str]

    @property
    def begins(self) -> bool:
        """Whether it was made before any step: it has only start positions of the stream, for any model and schema."""
        return self.files.keys() == {f"{RANK}/{STATE}"}


@dataclass(frozen=True)
class Checkpoint:
    """The state of the learner at one step: tensors by part, and plain JSON values.

    `carried` has the parts that are linked from an earlier checkpoint, with its number.
    """

    step: int
    tensors: Mapping[str, Mapping[str, Tensor]]
    state: Mapping[str, Any]
    carried: Mapping[str, int] = field(default_factory=dict)

    @property
    def begins(self) -> bool:
        """Whether it has only the start positions of the stream, as `CheckpointManifest.begins`."""
        return not self.tensors and not self.carried


class Checkpoints:
    """The directory `var/checkpoints`, written and read by the learner that holds the lock.

    Methods that read raise CheckpointError for a damaged checkpoint, and OSError where the operating system cannot read
    it. After an OSError the checkpoint may be sound: no other one may replace it, and it must not be deleted.
    """

    def __init__(self, path: Path, schema: str, generation: int, storage: Storage | None = None) -> None:
        """Take the directory, the schema's digest, the learner's generation, and another storage if there is one."""
        self.path = path
        self._storage = storage or LocalStorage(path)
        self._schema = schema
        self._generation = generation
        self._refused: set[int] = set()

    def numbers(self) -> list[int]:
        """Return the numbers of all checkpoints, rising."""
        return self._storage.numbers()

    def generation(self) -> int:
        """Return the latest generation of a learner that wrote one; 0 when there is none."""
        generations = [0]
        for number in self.numbers():
            with contextlib.suppress(CheckpointError):  # `newest` reports it
                generations.append(self.manifest(number).generation)
        return max(generations)

    def newest(self) -> tuple[int, Checkpoint] | None:
        """Return the newest undamaged checkpoint, or None when there is no checkpoint; damaged ones are logged.

        The newest is that of the latest generation: one by a learner that had lost its lock is older, whatever its
        number.

        Raises:
            CheckpointError: it is undamaged, but was made under another schema or by another release; or all
                checkpoints are damaged.
            OSError: the newest one that may be undamaged cannot be read.
        """
        damage: dict[int, CheckpointError] = {}
        newest = self._newest(damage, lenient=False) or self._newest(damage, lenient=True)
        if newest is None and (left := [number for number in self.numbers() if number in damage]):
            raise CheckpointError(
                f"there are checkpoints in {self.path} ({', '.join(map(str, left))}), and none can be used: "
                f"{damage[left[-1]]}; put it back from a backup, or begin anew by moving {self.path} away"
            )
        return newest

    def _newest(self, damage: dict[int, CheckpointError], *, lenient: bool) -> tuple[int, Checkpoint] | None:
        """Return the newest undamaged checkpoint; if `lenient`, also one that has lost stored events.

        The errors of others are added to `damage`.
        """
        for number in reversed(self._by_age()):
            try:
                manifest = self.manifest(number)
                contents = self._verified(manifest, lenient=lenient)
                self.check(manifest)
                checkpoint = _parse(manifest, contents)
            except MisfitError:
                raise
            except CheckpointError as exc:
                if number not in damage:
                    log.warning("%s; it is not used", exc)
                self._refused.add(number)
                damage[number] = exc
                continue
            self._refused.discard(number)
            return number, checkpoint
        return None

    def latest(self) -> CheckpointManifest | None:
        """Return the manifest of the newest checkpoint, without checking its files; None where there is none.

        Raises:
            CheckpointError: the manifest is damaged.
        """
        numbers = self._by_age()
        return self.manifest(numbers[-1]) if numbers else None

    def check(self, manifest: CheckpointManifest) -> None:
        """Raise MisfitError where a checkpoint was made by another release or under another schema."""
        if manifest.format != FORMAT:
            raise MisfitError(
                f"checkpoint {manifest.number} in {self.path} is of format {manifest.format}, and this release reads "
                f"{FORMAT}; go on with the release that made it, or begin anew by moving {self.path} away"
            )
        if manifest.schema != self._schema and not manifest.begins:
            raise MisfitError(
                f"checkpoint {manifest.number} in {self.path} was made under another [schema]; put the schema back, or "
                f"begin "
                f"anew by moving {self.path} away"
            )

    def write(self, number: int, checkpoint: Checkpoint, now: float) -> Path:
        """Write a checkpoint, completely or not at all, and return its path."""
        files: dict[str, str] = {}
        with self._storage.publish(number, self._generation) as folder:
            for part, tensors in checkpoint.tensors.items():
                name = f"{RANK}/{part}{SUFFIX}"
                files[name] = _write(folder, name, *_pieces(tensors))
            for part, source in checkpoint.carried.items():
                name, files_there = self.name(source, part), self.manifest(source).files
                files[name] = files_there[name]
                folder.link(name, self._storage.folder(source), name)
            files[f"{RANK}/{STATE}"] = _write(folder, f"{RANK}/{STATE}", msgspec.json.encode(checkpoint.state))
            manifest = CheckpointManifest(
                format=FORMAT,
                number=number,
                generation=self._generation,
                time=now,
                step=checkpoint.step,
                schema=self._schema,
                files=files,
            )
            folder.write(MANIFEST, _pretty(manifest))
        return self.path / str(number)

    def part(self, number: int, part: str) -> dict[str, Tensor]:
        """Read one part of a checkpoint; raises CheckpointError when it is damaged."""
        return load_tensors(self.read(self.manifest(number), self.name(number, part)))

    def clean_of(self, through: int) -> int:
        """Return the last record of `erasures.log`, up to `through`, of which no checkpoint has an event.

        0 while a checkpoint is damaged, or of another release. Raises OSError where one cannot be read.
        """
        for number in self.numbers():
            try:
                manifest = self.manifest(number)
                if not manifest.begins:
                    state = decoded(self.read(manifest, f"{RANK}/{STATE}"), dict[str, Any])
                    through = min(through, int(state.get(ERASED, 0)))
            except (CheckpointError, DamagedError):
                return 0
        return through

    def open(self, manifest: CheckpointManifest) -> tuple[dict[str, Mapping[str, Tensor]], dict[str, Any]]:
        """Return the parts of a checkpoint, whose tensors are read on access, and its state.

        Damaged segments are left out. Digests are not checked: reading a tensor may raise DamagedError.
        """
        folder, parts = self._storage.folder(manifest.number), dict[str, Mapping[str, Tensor]]()
        for name in manifest.files:
            try:
                if name.endswith(SUFFIX):
                    with _damage_of(manifest):
                        parts[part_of(name)] = TensorFile(folder.local(name))
            except CheckpointError:
                if not part_of(name).startswith(SEGMENT):
                    raise
        with _damage_of(manifest):
            return parts, decoded(folder.read(f"{RANK}/{STATE}", MOST_BYTES), dict[str, Any])

    def replace(
        self,
        manifest: CheckpointManifest,
        parts: Mapping[str, Mapping[str, Tensor]],
        known: dict[str, tuple[int, str, str]],
    ) -> None:
        """Replace parts of a checkpoint, so that a crash leaves the old checkpoint or the new one.

        Args:
            manifest: of the checkpoint.
            parts: the new tensors.
            known: checkpoint, name and digest of new files, by the digest of the old file, which checkpoints may
                share; new files are added.

        Raises:
            OSError: it cannot be written.
        """
        folder, files = self._storage.folder(manifest.number), dict(manifest.files)
        for part, tensors in parts.items():
            old = self.name(manifest.number, part)
            digest, name = files.pop(old), _next_name(folder, part)
            if (same := known.get(digest)) is not None:
                number, other, files[name] = same
                folder.link(name, self._storage.folder(number), other)
            else:
                files[name] = _write(folder, name, *_pieces(tensors))
                known[digest] = manifest.number, name, files[name]
        changed = msgspec.structs.replace(manifest, files=files)
        folder.replace(MANIFEST, _pretty(changed))
        self.sweep(changed)

    def sweep(self, manifest: CheckpointManifest) -> None:
        """Delete files in a checkpoint's directory that are not in its manifest."""
        folder = self._storage.folder(manifest.number)
        for name in folder.files().keys() - manifest.files - {MANIFEST}:
            folder.remove(name)

    def remove(self, number: int, name: str) -> None:
        """Delete a file of a checkpoint, if it is there."""
        self._storage.folder(number).remove(name)

    def delete(self, number: int) -> None:
        """Delete a checkpoint."""
        self._storage.delete(number)

    def highest(self) -> int:
        """Return the highest number of any checkpoint, also of one set aside; 0 when there is none."""
        return self._storage.highest()

    def newer_than(self, number: int) -> list[int]:
        """Return the checkpoints that a restart prefers to this one, the newest first."""
        by_age = self._by_age()
        return by_age[: by_age.index(number) : -1]

    def set_aside(self, number: int) -> None:
        """Rename a checkpoint, atomically, so that no restart resumes from it; raises OSError."""
        self._storage.set_aside(number)

    def delete_set_aside(self) -> None:
        """Delete all checkpoints that were set aside; raises OSError."""
        self._storage.delete_set_aside()

    def name(self, number: int, part: str) -> str:
        """Return the name of a part's file in a checkpoint; raises CheckpointError when there is none."""
        for name in self.manifest(number).files:
            if part_of(name) == part:
                return name
        raise CheckpointError(f"checkpoint {number}: it has no part {part}")

    def prune(self, keep: int) -> None:
        """Delete all but the newest `keep`; those that `newest` has refused do not count, and newer ones are kept."""
        kept = 0
        for number in reversed(self._by_age()):
            if kept >= keep:
                self.delete(number)
                self._refused.discard(number)
            kept += number not in self._refused

    def clean(self) -> None:
        """Remove what a crash left half-written or half-deleted."""
        self._storage.clean()

    def _by_age(self) -> list[int]:
        """Return the numbers of all checkpoints, the newest last: by generation, then by number."""

        def age(number: int) -> tuple[int, int]:
            try:
                return self.manifest(number).generation, number
            except CheckpointError:
                return self._generation, number  # `newest` reports it

        return sorted(self.numbers(), key=age)

    def manifest(self, number: int) -> CheckpointManifest:
        """Read the manifest of a checkpoint; raises CheckpointError when it is damaged."""
        path = self.path / str(number) / MANIFEST
        with damage_is(CheckpointError, f"checkpoint {number}: {path} cannot be read"):
            manifest = decoded(self._storage.folder(number).read(MANIFEST, MOST_BYTES), CheckpointManifest)
            if manifest.number != number:
                raise DamagedError(f"it is that of checkpoint {manifest.number}")
            check_names(manifest.files, f"{RANK}/")
        return manifest

    def _verified(self, manifest: CheckpointManifest, *, lenient: bool) -> dict[str, bytes]:
        contents: dict[str, bytes] = {}
        for name in manifest.files:
            try:
                contents[name] = self.read(manifest, name)
            except CheckpointError as exc:
                if not lenient or not name.startswith(f"{RANK}/{SEGMENT}"):
                    raise
                log.error("%s; going on without the events that were stored in it", exc)  # noqa: TRY400
        return contents

    def read(self, manifest: CheckpointManifest, name: str) -> bytes:
        """Read a file of a checkpoint; raises CheckpointError when it does not have its digest."""
        path = self.path / str(manifest.number) / name
        with damage_is(CheckpointError, f"checkpoint {manifest.number}: cannot read {path}"):
            contents = self._storage.folder(manifest.number).read(name)
        if hashlib.sha256(contents).hexdigest() != manifest.files[name]:
            raise CheckpointError(f"checkpoint {manifest.number}: {path} does not have its digest")
        return contents


def part_of(name: str) -> str:
    """Return the part of a checkpoint's file, by its name in the manifest."""
    return name.removeprefix(f"{RANK}/").partition(".")[0]


def _damage_of(manifest: CheckpointManifest) -> contextlib.AbstractContextManager[None]:
    return damage_is(CheckpointError, f"checkpoint {manifest.number}: a part of it cannot be read")


def _next_name(folder: Folder, part: str) -> str:
    """Return a name for a part that no file has yet."""
    taken = folder.files()
    return next(name for n in count(1) if (name := f"{RANK}/{part}.{n}{SUFFIX}") not in taken)


def _pieces(tensors: Mapping[str, Tensor]) -> list[Piece]:
    return pieces_of({name: tensor.cpu().contiguous() for name, tensor in tensors.items()})


def _write(folder: Folder, name: str, *pieces: Piece) -> str:
    folder.write(name, *pieces)
    return digest_of(pieces)


def _pretty(manifest: CheckpointManifest) -> bytes:
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1)


def _parse(manifest: CheckpointManifest, contents: Mapping[str, bytes]) -> Checkpoint:
    tensors: dict[str, dict[str, Tensor]] = {}
    try:
        for name, payload in contents.items():
            if name.endswith(SUFFIX):
                tensors[part_of(name)] = load_tensors(payload)
        return Checkpoint(manifest.step, tensors, decoded(contents[f"{RANK}/{STATE}"], dict[str, Any]))
    except (SafetensorError, KeyError, DamagedError) as exc:
        raise CheckpointError(f"checkpoint {manifest.number}: a part of it cannot be read: {exc}") from exc
