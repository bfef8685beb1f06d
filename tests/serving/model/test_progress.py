"""How far a version is trained, as replies have it."""

from anabranch.serving.model.loaded_version import progress_of
from tests.support.manifests import manifest_of


def manifest(seen_through=None):
    return manifest_of(1, schema="", through={"labels:0": 4, "events:1": 7}, seen_through=seen_through)


def test_a_reply_says_how_far_the_version_is_trained():
    assert progress_of(manifest()) == {"trained_through": "events:1=7,labels:0=4"}


def test_with_late_labels_it_also_says_how_far_was_read_and_labelled():
    assert progress_of(manifest({"events:1": 20, "labels:0": 6})) == {
        "trained_through": "events:1=7,labels:0=4",
        "labelled_through": "events:1=7,labels:0=4",
        "seen_through": "events:1=20,labels:0=6",
    }
