"""The settings of a learner, for tests that build it themselves."""

from anabranch.ingest.settings.stream import StreamSettings
from anabranch.learner.settings.pipeline import PipelineSettings


def learner_spec(folder, events, model, **changes):
    """Return the defaults, with `changes` of sections that are named as the fields are; `folder` has the state too."""
    stream = StreamSettings(topics=("events",))
    spec = PipelineSettings(name="test", state_dir=folder, stream=stream, schema=events, model=model)
    return spec.below(folder).with_changes(stream=stream, events=events, **changes)
