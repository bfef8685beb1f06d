"""Metrics of the training loop and of what it publishes."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class LearnerMetrics:
    """Collectors of the learner; one object per process, with its own registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.steps = Counter("anabranch_learner_steps", "Steps.", registry=registry)
        self.rows = Counter("anabranch_learner_rows_trained", "Events trained on.", ["source"], registry=registry)
        self.step = Histogram(
            "anabranch_learner_step_duration_seconds",
            "Time of a step: sample, forward, backward, update.",
            buckets=(1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1, 3),
            registry=registry,
        )
        self.accuracy = Gauge(
            "anabranch_learner_accuracy_ratio",
            "Accuracy by window: of new events before training on them, and of held-out ones.",
            ["window"],
            registry=registry,
        )
        self.error = Gauge(
            "anabranch_learner_absolute_error",
            "Mean absolute error of regression, over the same windows.",
            ["window"],
            registry=registry,
        )
        self.loss = Gauge(
            "anabranch_learner_loss", "Mean loss of new events before training on them.", ["window"], registry=registry
        )
        self.window = Gauge(
            "anabranch_learner_window_rows",
            "Events in the window now: it grows for as long as the accuracy stays the same.",
            registry=registry,
        )
        self.class_accuracy = Gauge(
            "anabranch_learner_class_accuracy_ratio", "Accuracy on held-out events.", ["class"], registry=registry
        )
        self.group_accuracy = Gauge(
            "anabranch_learner_group_accuracy_ratio",
            "Accuracy on held-out events, by the hash of the group.",
            ["group"],
            registry=registry,
        )
        self.forgetting = Gauge(
            "anabranch_learner_forgetting_ratio",
            "Best accuracy ever less accuracy now on held-out events, mean over the classes; of regression, error.",
            registry=registry,
        )
        self.drifts = Counter("anabranch_learner_drifts", "Changes of the stream that were noticed.", registry=registry)
        self.replay_ratio = Gauge(
            "anabranch_learner_replay_ratio", "Events to replay for each new one in the next step.", registry=registry
        )
        self.non_finite = Counter(
            "anabranch_learner_non_finite_steps", "Steps skipped for a loss or gradient not finite.", registry=registry
        )
        self.raised = Counter(
            "anabranch_learner_raised_rows",
            "Events left out because the model or its task raised on them, by where they came from.",
            ["source"],
            registry=registry,
        )
        self.micro_batch = Gauge(
            "anabranch_learner_micro_batch_rows",
            "Events that go through the model at once at most; 0: all of a step.",
            registry=registry,
        )
        self.publish_skipped = Counter(
            "anabranch_publish_skipped", "Versions that fell due while one was being written.", registry=registry
        )
        self.checkpoint = Histogram(
            "anabranch_checkpoint_duration_seconds",
            "Time to write a checkpoint, in the background.",
            buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30),
            registry=registry,
        )
        self.checkpoint_stall = Counter(
            "anabranch_checkpoint_stall_seconds",
            "Time that steps waited for a checkpoint to be written.",
            registry=registry,
        )
        self.checkpoint_number = Gauge(
            "anabranch_checkpoint_number", "The newest checkpoint; 0 without one.", registry=registry
        )
        self.checkpoint_time = Gauge(
            "anabranch_checkpoint_time_seconds", "When it was made, since 1970.", registry=registry
        )
        self.holdout = Gauge("anabranch_holdout_rows", "Held-out events in the holdout set.", registry=registry)
        self.heartbeat = Gauge(
            "anabranch_learner_heartbeat_time_seconds",
            "When the loop last passed a boundary between steps or idle polls, since 1970; 0 while it starts.",
            registry=registry,
        )
        self.problems = Gauge("anabranch_learner_problems", "Parts that do not work as they should.", registry=registry)
        self.trained_through = Gauge(
            "anabranch_learner_trained_through_offset",
            "Last offset up to which every event has its outcome.",
            ["topic", "partition"],
            registry=registry,
        )
        self.version = Gauge("anabranch_learner_version", "Number of the newest version published.", registry=registry)
        self.published = Counter("anabranch_versions_published", "Versions published.", registry=registry)
        self.gate_verdicts = Counter("anabranch_gate_verdicts", "Versions by verdict.", ["verdict"], registry=registry)
        self.withdrawn = Counter(
            "anabranch_gate_withdrawn", "Times that monitoring withdrew the served versions.", registry=registry
        )
        self.hold = Gauge(
            "anabranch_gate_hold_seconds", "Time for which versions have failed in a row; 0 if none.", registry=registry
        )
        self.device_sharing_wait = Histogram(
            "anabranch_device_sharing_wait_duration_seconds",
            "Time that training took to yield to a request.",
            buckets=(1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1, 3),
            registry=registry,
        )
        self.device_sharing_training = Gauge(
            "anabranch_device_sharing_training_ratio",
            "Part of the time of steps that was not given to requests.",
            registry=registry,
        )
