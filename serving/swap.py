"""The hot swap: the newest version that may be served takes the place of the one that is.

A thread of its own watches the versions directory, loads, checks and warms up; then one reference is assigned.
Requests that hold the old version are answered by it, and with the last of them it is freed.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Self

import msgspec

from learner.errors import VersionError
from learner.trained import Trained
from learner.version import MANIFEST, VERDICT, Manifest
from serving.freshness import Unserved
from serving.metrics import Metrics
from serving.served import Deployment, ServedVersion, load_version

log = logging.getLogger("anabranch.serving")

POLL_EVERY = timedelta(milliseconds=50)

_REMEMBERED = 20

_Stamp = tuple[int, int] | None
"""Modification time and inode of a version's verdict, by which a new verdict is noticed; None without one."""


class Swap:
    """Keeps `current` the newest version that may be served; a context manager around its thread.

    A version may be served when its verdict is pass or abstain, its schema is ours, its epoch is not below the served
    one's, and it lowers `trained_through` on no partition of the same incarnation.
    """

    def __init__(
        self,
        deployment: Deployment,
        max_batch: int,
        metrics: Metrics,
        taken: Callable[[], object],
        fail: Callable[[BaseException], None],
    ) -> None:
        """Both callables are called in the swap's thread: `taken` after each swap, `fail` with a bug that ended it."""
        self.current: ServedVersion | None = None
        self.since: float | None = None
        """When `current` was taken."""
        self.taken: deque[int] = deque(maxlen=5 * _REMEMBERED)
        """The newest versions that were taken."""
        self.refused: dict[int, str] = {}
        """The newest versions that were refused, with the reason; replaced, never changed."""
        self._deployment = deployment
        self._versions = deployment.versions
        self._max_batch = max_batch
        self._unserved = Unserved(deployment.versions)
        self._metrics = metrics
        self._notify = taken
        self._fail = fail
        self._passed_over: dict[int, _Stamp] = {}
        self._complaints: dict[str, str] = {}
        self._look_now = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._watch, name="serving-swap", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping = True
        self._look_now.set()
        self._thread.join()

    @property
    def ill(self) -> list[str]:
        """One sentence for each thing that is wrong with the versions; empty when all is well."""
        return list(self._complaints.values())

    def look(self) -> bool:
        """Take the newest version that may be served, if it is newer than the served one; whether one was taken.

        Called by the swap's thread; by a test that has not started it.
        """
        served = self.current.number if self.current else -1
        numbers = self._versions.numbers()
        self._unserved.hear(numbers)
        for number in reversed(numbers):
            if number <= served:
                return False
            stamp = self._verdict_stamp(number)
            if self._passed_over.get(number, ()) == stamp:
                continue
            version = self._load(number)
            if version is not None:
                self._take(version)
                return True
            self._passed_over[number] = stamp
        return False

    def _watch(self) -> None:
        """Look until the end; the body of the swap's thread."""
        try:
            while not self._stopping:
                try:
                    self._look_now.clear()
                    self.look()
                    self._complaints.pop("directory", None)
                except OSError as exc:
                    self._complain("directory", f"cannot look for versions in {self._versions.path}: {exc}")
                if not self._stopping:
                    self._look_now.wait(POLL_EVERY.total_seconds())
        except Exception as exc:
            log.exception("the swap's thread ended")
            self._fail(exc)

    def _verdict_stamp(self, number: int) -> _Stamp:
        try:
            found = (self._versions.directory(number) / VERDICT).stat()
        except FileNotFoundError:
            return None
        return found.st_mtime_ns, found.st_ino

    def _load(self, number: int) -> ServedVersion | None:
        try:
            verdict = self._versions.verdict(number)
            if verdict is None or verdict.verdict == "fail":
                return None
            manifest = self._versions.manifest(number)
            self._check(manifest, number)
            return load_version(self._deployment, manifest, self._max_batch)
        except (VersionError, OSError) as exc:
            if (self._versions.directory(number) / MANIFEST).exists():  # else the learner has just deleted it
                self._metrics.swaps.labels("refused").inc()
                self._complain("version", f"a version is refused: {exc}")
                self._refuse(number, str(exc))
            return None

    def _check(self, manifest: Manifest, number: int) -> None:
        if manifest.number != number:
            raise VersionError(f"version {number}: its manifest is that of version {manifest.number}")
        if manifest.schema != self._deployment.schema.digest:
            raise VersionError(f"version {number}: it was learned under another schema than [schema] describes")
        if self.current is None:
            return
        served = self.current.manifest
        if manifest.epoch < served.epoch:
            raise VersionError(
                f"version {number}: its learner's epoch {manifest.epoch} is over; {served.epoch} is served"
            )
        for name, before in served.trained_through.items():
            after = manifest.trained_through.get(name, Trained(offset=-1, incarnation=before.incarnation))
            if after.incarnation == before.incarnation and after.offset < before.offset:
                raise VersionError(
                    f"version {number}: it has learned {name} up to {after.offset}, but {before.offset} is served"
                )

    def _take(self, version: ServedVersion) -> None:
        """Make a version the served one. A crash before step 3 costs a stale `state.json` until the next swap.

        1. one reference assignment: requests that come from now on are answered by it;
        2. wake those that wait for it;
        3. write `state.json`, by which the learner knows what not to delete.
        """
        self.since = time.time()
        previous, self.current = self.current, version
        self.taken.append(version.number)
        self._notify()
        self._complaints.pop("version", None)
        self._passed_over = {number: stamp for number, stamp in self._passed_over.items() if number > version.number}
        self._metrics.swaps.labels("swapped").inc()
        self._metrics.version.set(version.number)
        self._metrics.learned(*self._unserved.served(version.number, self.since))
        log.info("serving version %d, trained through %s", version.number, version.trained_through or "nothing")
        self._write_state(previous, version)

    def _write_state(self, previous: ServedVersion | None, version: ServedVersion) -> None:
        try:
            state = self._versions.state()
            before = previous.number if previous else state.serving
            if before == version.number:  # a restart
                before = state.previous
            state = msgspec.structs.replace(state, serving=version.number, previous=before)
            self._versions.write_state(state)
            self._complaints.pop("state", None)
        except (OSError, VersionError) as exc:
            self._complain("state", f"cannot write {self._versions.path}/state.json: {exc}")

    def _refuse(self, number: int, reason: str) -> None:
        """Remember a refusal, and forget the oldest of many."""
        self.refused = dict([*self.refused.items(), (number, reason)][-_REMEMBERED:])

    def _complain(self, about: str, sentence: str) -> None:
        """Note a sentence for the report; log it once."""
        if self._complaints.get(about) != sentence:
            self._complaints[about] = sentence
            log.warning("%s", sentence)
