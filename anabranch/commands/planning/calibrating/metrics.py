"""Counters of a running learner and of serving, from their `/metrics`."""

import http.client
from contextlib import closing
from urllib.parse import urlsplit

import msgspec
from prometheus_client.parser import text_string_to_metric_families

_TIMEOUT_SECONDS = 10.0


class LearnerCounters(msgspec.Struct, frozen=True):
    """Sums since the start of a learner."""

    steps: float
    rows: float
    """New events trained on."""
    step_seconds: float
    stall_seconds: float
    checkpoints: float
    checkpoint_seconds: float
    checkpoint_stall_seconds: float

    def since(self, before: "LearnerCounters") -> "LearnerCounters":
        """Return what was added since `before`."""
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(before), strict=True)
        return LearnerCounters(*(now - then for now, then in pairs))


class FreshnessSum(msgspec.Struct, frozen=True):
    """The freshness of all events that served versions have learned, since the start of a server."""

    seconds: float
    events: float

    def mean_since(self, before: "FreshnessSum") -> float | None:
        """Return the mean of the events since `before`; None without any."""
        events = self.events - before.events
        return (self.seconds - before.seconds) / events if events else None


def read_counters(address: str, token: str = "") -> LearnerCounters | None:
    """Return the counters of a learner with this status address, `HOST:PORT`; None when it does not answer."""
    samples = _samples(address, token)
    names = (
        ("anabranch_learner_steps_total", ""),
        ("anabranch_learner_rows_trained_total", "new"),
        ("anabranch_learner_step_duration_seconds_sum", ""),
        ("anabranch_replay_stall_seconds_total", ""),
        ("anabranch_checkpoint_duration_seconds_count", ""),
        ("anabranch_checkpoint_duration_seconds_sum", ""),
        ("anabranch_checkpoint_stall_seconds_total", ""),
    )
    return None if samples is None else LearnerCounters(*(samples.get(name, 0.0) for name in names))


def read_freshness(url: str) -> FreshnessSum | None:
    """Return the freshness of a server with this URL, which asks for no token; None when it does not answer."""
    samples, name = _samples(urlsplit(url).netloc, ""), "anabranch_serving_freshness_duration_seconds"
    if samples is None:
        return None
    return FreshnessSum(samples.get((f"{name}_sum", ""), 0.0), samples.get((f"{name}_count", ""), 0.0))


def _samples(address: str, token: str) -> dict[tuple[str, str], float] | None:
    """Return the samples of `/metrics` by their name and the label `source`; None where nothing answers."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        with closing(http.client.HTTPConnection(address, timeout=_TIMEOUT_SECONDS)) as connection:
            connection.request("GET", "/metrics", headers=headers)
            text = connection.getresponse().read().decode()
    except (OSError, http.client.HTTPException):
        return None
    return {
        (sample.name, sample.labels.get("source", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
