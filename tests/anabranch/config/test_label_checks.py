"""`[stream.labels]` against the rest of the config."""

import pytest

from anabranch.config.loader import examine_config

CONFIG = """
name = "late"
[stream]
topics = ["events"]
{stream}
[stream.labels]
topics = ["labels"]
wait = "1h"
{labels}
[schema.features.x]
dtype = "float32"
[schema.label]
name = "y"
{classes}
[schema.key]
name = "id"
[model]
factory = "m:build"
task = "{task}"
"""


def faults(path, **parts):
    """Return the sentences on a config."""
    values = {"stream": "", "labels": "", "classes": "classes = 2", "task": "classification", **parts}
    config = path / "pipeline.toml"
    config.write_text(CONFIG.format(**values))
    return [fault.sentence for fault in examine_config(config, {}).faults]


def test_a_pipeline_with_late_labels_needs_topics_and_how_long_to_wait(tmp_path):
    assert faults(tmp_path) == []
    assert faults(tmp_path, labels='unmatched = "negative"\nearly = "negative-then-correct"\nkey = "order"') == []


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        ({"stream": 'unlabelled = "store"'}, 'unlabelled = "store" contradicts [stream.labels]'),
        ({"stream": 'dead_letter_topic = "labels"'}, "must not be one of topics"),
        ({"labels": 'early = "negative-then-correct"'}, 'set unmatched = "negative"'),
        ({"labels": 'key = "x"'}, "name another field"),
        (
            {"labels": 'unmatched = "negative"', "classes": 'dtype = "float32"', "task": "regression"},
            "needs [schema.label] with classes of which an event has one",
        ),
    ],
)
def test_what_contradicts_late_labels_is_one_sentence(tmp_path, parts, sentence):
    (fault,) = faults(tmp_path, **parts)
    assert sentence in fault


def test_labels_come_in_separate_topics(tmp_path):
    text = CONFIG.format(stream="", labels="", classes="classes = 2", task="classification")
    config = tmp_path / "pipeline.toml"
    config.write_text(text.replace('["labels"]', '["events"]'))
    (fault,) = [fault.sentence for fault in examine_config(config, {}).faults]
    assert "labels.topics names events, one of topics; labels come in separate topics" in fault
    config.write_text(text.replace('[schema.key]\nname = "id"\n', ""))
    (fault,) = [fault.sentence for fault in examine_config(config, {}).faults]
    assert "labels find their events by a key, and there is none; set stream.labels.key or [schema.key]" in fault
