"""Which versions may be served, and why not: by verdict, by rollout commands, and by what they were learned with."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from anabranch.ingest.events.schema import Schema
from anabranch.learner.settings.model import ModelSettings
from anabranch.learner.state_dir.folders import Folder
from anabranch.learner.stream.trained_through import PartitionProgress
from anabranch.learner.versions.format import (
    STATE,
    Manifest,
    ModelReference,
    RegistryState,
    Verdict,
    Versions,
    other_model,
    reference_to,
)


class Requirements(NamedTuple):
    """What serving requires of a version: the digest of `[schema]`, the model of `[model]`, and `Schema.encoders`."""

    schema: str
    model: ModelReference
    encoders: Mapping[str, Any] = {}


def requirements_of(schema: Schema, model: ModelSettings) -> Requirements:
    """Return what a config requires of a version."""
    return Requirements(schema.digest, reference_to(model), schema.encoders)


def refusal(
    manifest: Manifest, verdict: Verdict | None, state: RegistryState, requirements: Requirements
) -> str | None:
    """Return why an undamaged version may not be served; None if it may."""
    return withheld(manifest.number, verdict, state) or misfit(manifest, requirements)


def withheld(number: int, verdict: Verdict | None, state: RegistryState) -> str | None:
    """Return why the gate or a rollout command withholds a version; None if neither does."""
    if number == state.pinned:
        return None
    if number in state.rolled_back:
        return "it was rejected, or a rollback passed over it"
    if verdict is None:
        return "it has no verdict yet"
    if verdict.verdict == "fail" and number != state.promoted:
        return f"the gate failed it: {'; '.join(verdict.reasons) or 'no reason is given'}"
    return None


def misfit(manifest: Manifest, requirements: Requirements) -> str | None:
    """Return how a version differs from the configured schema and model; None if it does not."""
    if manifest.schema != requirements.schema:
        return _other_tokenizer(manifest, requirements) or "it was learned under another schema than [schema] describes"
    return other_model(manifest.model, requirements.model)


def _other_tokenizer(manifest: Manifest, requirements: Requirements) -> str | None:
    """Return which tokenizer has another content than that of a version; None if none has."""
    for name, encoder in requirements.encoders.items():
        learned = manifest.encoders.get(name)
        if not isinstance(learned, dict) or "tokenizer" not in encoder or "tokenizer" not in learned:
            continue
        if learned["tokenizer"] != encoder["tokenizer"]:
            return (
                f"it was learned with another tokenizer than schema.features.{name}.encode names (SHA-256 "
                f"{str(learned['tokenizer'])[:12]}..., not {encoder['tokenizer'][:12]}...); set the old file back to "
                "serve it, or wait for a version that is trained with the new one"
            )
    return None


class ServingPolicy:
    """Reads `state.json` and verdicts again only when they have changed. Used by one thread at a time."""

    def __init__(self, versions: Versions) -> None:
        self._versions = versions
        self._state: tuple[object, RegistryState] = (None, RegistryState())
        self._served: tuple[int, object, bool] | None = None

    def state(self) -> RegistryState:
        """Return the contents of `state.json`; raises VersionError when it cannot be read."""
        stamp = Folder(self._versions.path).stamp(STATE)
        if stamp != self._state[0]:
            self._state = stamp, self._versions.state()
        return self._state[1]

    def may_take(self, number: int, state: RegistryState) -> bool:
        """Return whether neither the gate nor a rollout command withholds a version.

        Raises VersionError when the verdict of a version cannot be read; that of a pinned one is not read.
        """
        return number == state.pinned or (
            number not in state.rolled_back and withheld(number, self._versions.verdict(number), state) is None
        )

    def may_stay(self, number: int, state: RegistryState) -> bool:
        """Return whether the served version may go on being served; a deleted one may."""
        if number in state.rolled_back:
            return False
        stamp = self._versions.verdict_stamp(number)
        if self._served is None or self._served[:2] != (number, stamp):
            verdict = None if stamp is None else self._versions.verdict(number)
            self._served = number, stamp, verdict is not None and verdict.verdict == "fail"
        return not self._served[2] or number == state.promoted


def lowered(served: Manifest, candidate: Manifest) -> tuple[str, int, int] | None:
    """Return a partition of which a candidate has learned less, with both offsets; None when there is none.

    If a later learner wrote the candidate, topics that it does not name do not count: that learner reads other topics.
    """
    topics = {_topic(name) for name in candidate.trained_through}
    others = candidate.generation > served.generation and bool(topics)
    for name, before in served.trained_through.items():
        if others and _topic(name) not in topics:
            continue
        after = candidate.trained_through.get(name, PartitionProgress(offset=-1, incarnation=before.incarnation))
        if after.incarnation == before.incarnation and after.offset < before.offset:
            return name, before.offset, after.offset
    return None


def _topic(name: str) -> str:
    return name.rpartition(":")[0]
