"""Which versions of an object store a server may serve, and which one it copies next."""

from collections.abc import Collection

from anabranch.learner.object_storage.fleet import FleetRollout
from anabranch.learner.object_storage.head import BucketHead
from anabranch.learner.versions.format import Verdict
from anabranch.serving.fleet.damaged_versions import DamagedVersions
from anabranch.serving.fleet.version_cache import VersionCache

_LEAST_COPIES = 2
"""Versions that are copied to a host that has none: the second is served where the newest cannot be."""


class CopyChoice:
    """Chooses by verdicts and by the decisions of the fleet. Used by one thread."""

    def __init__(self, cache: VersionCache, server: str, damaged: DamagedVersions) -> None:
        """Prepare to choose for the server with this id."""
        self._cache = cache
        self._server = server
        self._damaged = damaged
        self._verdicts: dict[int, tuple[str | None, Verdict | None]] = {}
        """The verdict of each version of the head, after its digest there."""

    def keep(self, numbers: Collection[int]) -> None:
        """Drop the verdicts of other versions, so that they are read again."""
        self._verdicts = {number: each for number, each in self._verdicts.items() if number in numbers}

    def next_copy(self, head: BucketHead, complete: set[int], rollout: FleetRollout) -> int | None:
        """Return the version to copy next: one that a person has chosen, or the newest that may be served."""
        for number in (rollout.pinned, rollout.promoted):
            is_missing = number is not None and number in head.versions and number not in complete
            if number is not None and is_missing and not self._damaged.waits(number):
                return number
        usable = 0
        for number in sorted(head.versions, reverse=True):
            waits = number not in complete and self._damaged.waits(number)
            if waits or not self.may_be_served(number, head, rollout):
                continue
            if number not in complete and (usable == 0 or len(complete & head.versions.keys()) < _LEAST_COPIES):
                return number
            usable += 1
            if usable == _LEAST_COPIES:
                break
        return None

    def may_be_served(self, number: int, head: BucketHead, rollout: FleetRollout) -> bool:
        """Return whether this server may serve a version."""
        is_candidate = number in head.versions and number not in rollout.rolled_back
        if not is_candidate or not rollout.allows(number, self._server):
            return False
        verdict = self._verdict(number, head)
        return verdict is not None and (verdict.verdict != "fail" or number == rollout.promoted)

    def judge(self, head: BucketHead, complete: set[int], rollout: FleetRollout) -> None:
        """Write the verdicts of local versions: one that has failed is withdrawn, one without a verdict not served.

        What this server may not serve any more is withdrawn once it has another version: a former canary, and versions
        of a learner whose state was lost, whose numbers are above those of the next one.
        """
        has_other = any(each == rollout.pinned or self.may_be_served(each, head, rollout) for each in complete)
        for number in sorted(complete):
            verdict = self._verdict(number, head) if number in head.versions else None
            allowed = rollout.allows(number, self._server) and number <= max(head.versions, default=number)
            if verdict is not None and (allowed or verdict.verdict == "fail"):
                self._cache.judge(number, verdict)
            elif not allowed and has_other:
                self._cache.withdraw(number)

    def _verdict(self, number: int, head: BucketHead) -> Verdict | None:
        digest = head.verdicts.get(number)
        before = self._verdicts.get(number)
        if before is None or before[0] != digest:
            verdict = None
            with self._damaged.catching(number):
                verdict = self._cache.read_verdict(number, head.versions[number])
            before = self._verdicts[number] = digest, verdict
        return before[1]
