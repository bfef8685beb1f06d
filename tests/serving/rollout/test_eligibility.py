"""Why a version may not be served, and `state.json`, which says what has been."""

import pytest

from anabranch.learner.stream.trained_through import PartitionProgress
from anabranch.learner.versions.format import Manifest, ModelReference, RegistryState, Verdict, Versions
from anabranch.serving.rollout.eligibility import Requirements, ServingPolicy, lowered, misfit, refusal, withheld
from anabranch.serving.rollout.state_file import _MOST_RECENT, StateFile

MODEL = ModelReference("m:build", {}, "classification")
REQUIREMENTS = Requirements("schema", MODEL)
PASS, FAIL = (Verdict(verdict=verdict, reasons=reasons) for verdict, reasons in (("pass", []), ("fail", ["worse"])))


def manifest(**fields):
    base = {"number": 4, "generation": 1, "parent": None, "time": 0.0, "step": 1, "schema": "schema", "model": MODEL}
    return Manifest(**{**base, "trained_through": {}, "metrics": {}, "encoders": {}, "files": {}, **fields})


@pytest.mark.parametrize(
    ("verdict", "state", "reason"),
    [
        (PASS, RegistryState(), None),
        (None, RegistryState(), "no verdict yet"),
        (None, RegistryState(promoted=4), "no verdict yet"),
        (FAIL, RegistryState(), "the gate failed it: worse"),
        (FAIL, RegistryState(promoted=4), None),
        (FAIL, RegistryState(pinned=4), None),
        (None, RegistryState(pinned=4), None),
        (PASS, RegistryState(rolled_back=[4]), "rejected"),
        (PASS, RegistryState(rolled_back=[4], promoted=4), "rejected"),
        (PASS, RegistryState(rolled_back=[4], pinned=4), None),
        (FAIL, RegistryState(pinned=3, promoted=5), "the gate failed it"),
    ],
)
def test_rollout_commands_override_the_verdict(verdict, state, reason):
    for given in (withheld(4, verdict, state), refusal(manifest(), verdict, state, REQUIREMENTS)):
        assert given is None if reason is None else given is not None and reason in given


def test_another_schema_or_model_is_refused_whatever_the_commands():
    other = manifest(schema="other")
    assert misfit(other, REQUIREMENTS) == "it was learned under another schema than [schema] describes"
    assert refusal(other, PASS, RegistryState(pinned=4), REQUIREMENTS) == misfit(other, REQUIREMENTS)
    reason = misfit(manifest(model=ModelReference("m:other", {}, "classification")), REQUIREMENTS)
    assert reason is not None
    assert "m:other" in reason
    assert misfit(manifest(), REQUIREMENTS) is None


def test_another_tokenizer_is_named():
    ours = Requirements("schema", MODEL, {"text": {"tokenizer": "a" * 64, "length": 8}, "word": {"hash": 9}})
    theirs = {"text": {"tokenizer": "b" * 64, "length": 8}, "word": {"hash": 8}}
    assert misfit(manifest(schema="other", encoders=theirs), ours) == (
        "it was learned with another tokenizer than schema.features.text.encode names (SHA-256 bbbbbbbbbbbb..., not "
        "aaaaaaaaaaaa...); set the old file back to serve it, or wait for a version that is trained with the new one"
    )


@pytest.mark.parametrize(
    "encoders",
    [{}, {"text": None}, {"text": 5}, {"text": {"hash": 9}}, {"text": {"tokenizer": "a" * 64, "length": 9}}],
)
def test_what_is_no_other_tokenizer_is_another_schema(encoders):
    ours = Requirements("schema", MODEL, {"text": {"tokenizer": "a" * 64, "length": 8}})
    reason = misfit(manifest(schema="other", encoders=encoders), ours)
    assert reason == "it was learned under another schema than [schema] describes"


def test_a_version_that_has_learned_less_names_the_partition():
    served = manifest(trained_through={"events:0": PartitionProgress(offset=10, incarnation=1)})
    for offset, expected in ((9, ("events:0", 10, 9)), (10, None), (11, None)):
        candidate = manifest(trained_through={"events:0": PartitionProgress(offset=offset, incarnation=1)})
        assert lowered(served, candidate) == expected
    assert lowered(served, manifest()) == ("events:0", 10, -1)


def test_it_names_the_versions_that_served_most_recently(tmp_path):
    versions = Versions(tmp_path)
    workers = [StateFile(versions, ServingPolicy(versions)) for _ in range(2)]
    for previous, number in [(None, 1), (1, 2), (2, 4), (4, 2)]:
        for worker in workers:  # the second has nothing to add
            worker.swapped(previous, number)
    assert versions.state().recent == [1, 2, 4, 2]
    workers[0].swapped(None, 2)  # a restart
    assert versions.state().recent == [1, 2, 4, 2]
    for number in range(5, 5 + 2 * _MOST_RECENT):
        workers[0].swapped(number - 1, number)
    assert versions.state().recent == [*range(5 + _MOST_RECENT, 5 + 2 * _MOST_RECENT)]


def test_a_worker_that_is_late_to_pin_withdraws_no_version(tmp_path):
    """It chose while one was pinned, and writes after another worker has unpinned it."""
    versions = Versions(tmp_path)
    worker = StateFile(versions, ServingPolicy(versions))
    versions.write_state(RegistryState(serving=2, pinned=1))
    assert worker.read()
    versions.write_state(RegistryState(serving=2))
    worker.swapped(2, 1)
    assert versions.state().rolled_back == []
    # Without a pin, a version that is replaced by an older one is withdrawn.
    worker.swapped(1, 2)
    worker.swapped(2, 1)
    assert versions.state().rolled_back == [2]
