"""Metrics of the training loop and of the versions that it publishes."""

from functools import partial

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from anabranch.core.state_metrics import StateCollector, metrics_of
from anabranch.core.tracing.spans import left_out_counter
from anabranch.learner.status.report import DeviceHealthReport, LearnerReport


class LearnerMetrics:
    """Collectors of the learner; one object per process, with its own registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self.report = StateCollector[LearnerReport](registry, metrics_of(LearnerReport, without="device"))
        self.device = StateCollector[DeviceHealthReport](registry, metrics_of(DeviceHealthReport))
        """Updated by the thread that watches the devices, also while the loop hangs."""
        self._registry = registry
        self._extensions: dict[str, StateCollector[msgspec.Struct]] = {}
        self.tracing_left_out = left_out_counter(registry)
        self.mlflow_versions = counter(
            "anabranch_mlflow_versions",
            "Versions that served: registered in MLflow, or left out: queue (full), refused (by it), gone (deleted).",
            ["outcome"],
        )
        self.mlflow_waiting = gauge(
            "anabranch_mlflow_waiting_versions", "Versions that wait to be registered in MLflow."
        )
        self.steps = counter("anabranch_learner_steps", "Steps.")
        self.rows = counter("anabranch_learner_rows_trained", "Events trained on.", ["source"])
        self.step = histogram(
            "anabranch_learner_step_duration_seconds",
            "Time of a step: sample, forward, backward, update.",
            buckets=(1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1, 3),
        )
        self.drifts = counter("anabranch_learner_drifts", "Changes of the stream that were noticed.")
        self.non_finite = counter(
            "anabranch_learner_non_finite_steps", "Steps skipped for a loss or gradient not finite."
        )
        self.raised = counter(
            "anabranch_learner_raised_rows",
            "Events left out because the model or its task raised on them, by where they came from.",
            ["source"],
        )
        self.teacher_duration = histogram(
            "anabranch_learner_teacher_request_duration_seconds",
            "Time in which the teacher answered for the events of a step.",
            buckets=(1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1, 3, 10),
        )
        self.checkpoint = histogram(
            "anabranch_checkpoint_duration_seconds",
            "Time to write a checkpoint, in the background.",
            buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30),
        )
        self.checkpoint_stall = counter(
            "anabranch_checkpoint_stall_seconds", "Time that steps waited for a checkpoint to be written."
        )
        self.heartbeat = gauge(
            "anabranch_learner_heartbeat_time_seconds",
            "When the loop last passed a boundary between steps or idle polls, since 1970; 0 while it starts.",
        )
        self.gate_verdicts = counter("anabranch_gate_verdicts", "Versions by verdict.", ["verdict"])
        self.canary_verdicts = counter(
            "anabranch_canary_verdicts", "Canaries by outcome: promoted, rejected, undecided.", ["outcome"]
        )
        self.device_sharing_wait = histogram(
            "anabranch_device_sharing_wait_duration_seconds",
            "Time that training took to yield to a request.",
            buckets=(1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1, 3),
        )

    def update_extension(self, name: str, own: msgspec.Struct) -> None:
        """Export the numbers that an extension alone reports, as its struct declares them."""
        if name not in self._extensions:
            self._extensions[name] = StateCollector(self._registry, metrics_of(type(own)))
        self._extensions[name].update(own)
