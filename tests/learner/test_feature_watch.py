"""The event that was far from all others is named."""

import logging

import numpy as np

from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.learner.loop.reporter import FeatureWatch
from anabranch.learner.model.features.learned import LearnedFeatures
from anabranch.learner.stream.ledger import Ledger


def test_an_outlier_is_named_by_feature_and_offset_with_the_command_that_undoes_it(caplog):
    features = {name: {"dtype": "float32", "scale": "standard"} for name in ("x", "z")}
    schema = Schema(SchemaSettings.model_validate({"features": features, "label": {"name": "y", "classes": 2}}))
    learned = LearnedFeatures(schema)
    ledger = Ledger()
    for name in ("others", "events"):
        ledger.add_partition(TopicPartition(name, 3), 0)
    watch = FeatureWatch(learned, ledger)
    values = np.random.default_rng(0).normal(size=(2, 400)).astype(np.float32)
    values[1, 217] = -3.4e38
    columns = {"feature.x": values[0], "feature.z": values[1], "label": np.zeros(400, np.int64)}
    columns |= {"time_ms": np.zeros(400, np.int64), "partition": np.ones(400, np.int32), "offset": np.arange(400) + 60}
    with caplog.at_level(logging.WARNING):
        learned.observe(columns)
        watch.poll()
        watch.poll()
    assert watch.clipped == {"x": 0, "z": 1}
    (said,) = caplog.messages
    assert "schema.features.z of events[3]@277 is -3.4e+38, far from all others" in said
    assert '"anabranch undo --offsets events[3]@277..277"' in said
    assert watch.warning == said
