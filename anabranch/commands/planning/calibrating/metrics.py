"""Counters of a running learner, from its `/metrics`."""

import http.client
from contextlib import closing

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


def read_counters(address: str, token: str = "") -> LearnerCounters | None:
    """Return the counters of a learner with this status address, `HOST:PORT`; None when it does not answer."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        with closing(http.client.HTTPConnection(address, timeout=_TIMEOUT_SECONDS)) as connection:
            connection.request("GET", "/metrics", headers=headers)
            text = connection.getresponse().read().decode()
    except (OSError, http.client.HTTPException):
        return None
    samples = {
        (sample.name, sample.labels.get("source", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    names = (
        ("anabranch_learner_steps_total", ""),
        ("anabranch_learner_rows_trained_total", "new"),
        ("anabranch_learner_step_duration_seconds_sum", ""),
        ("anabranch_replay_stall_seconds_total", ""),
        ("anabranch_checkpoint_duration_seconds_count", ""),
        ("anabranch_checkpoint_duration_seconds_sum", ""),
        ("anabranch_checkpoint_stall_seconds_total", ""),
    )
    return LearnerCounters(*(samples.get(name, 0.0) for name in names))
