"""The section `[tracing]` of `pipeline.toml`. Imports nothing of OpenTelemetry."""

from typing import Annotated

from pydantic import Field

from anabranch.core.settings import Section, written


class TracingSettings(Section):
    """Spans by OpenTelemetry; absent: nothing is traced. Needs the extra `otel`."""

    sample: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Fraction of the requests without a trace context, and of the steps, that are traced. A caller's `traceparent`
    decides for its requests and events."""
    setup: Annotated[str, written(r"|[\w.]+:\w+", 'an import string such as "my_tracing:set_up"')] = ""
    """Import string of a function that sets OpenTelemetry's tracer provider; it is called with "serving" or "learner".
    Without it, spans go by OTLP to where the variables `OTEL_*` say."""
