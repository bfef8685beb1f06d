"""Constants without a calibration: of a pipeline that runs or has run, or of the model alone."""

from pathlib import Path

from anabranch.commands.planning.calibrating.metrics import read_counters
from anabranch.commands.planning.calibrating.process_usage import PeakMemory
from anabranch.commands.planning.calibrating.state_files import checkpoint_bytes, version_bytes
from anabranch.commands.planning.constants import Constants
from anabranch.commands.planning.held_out import held_out_bytes
from anabranch.commands.planning.ledger_of import learner_tensors
from anabranch.commands.planning.speed import waits
from anabranch.commands.planning.store_size import COPIES_SAVED, ENTRY_BYTES
from anabranch.config.loader import Config
from anabranch.config.model import Pipeline
from anabranch.core.errors import SettingsError
from anabranch.doctor.findings import CheckContext
from anabranch.doctor.model_process import check_model
from learner.state_dir.report import LearnerReport
from learner.state_dir.report import read_report as read_learner
from serving.reporting.report import read_report as read_serving

_TENSORS = 3
_FLOAT32 = 4
_PROBE_SECONDS = 120.0
_OPTIMIZER = "checkpoints were taken to have the weights and two moments"


def sizes_of(pipeline: Pipeline, report: LearnerReport, state_dir: Path, constants: Constants) -> None:
    """Fill the sizes of the model, the rows and the files of a state directory."""
    memory = report.device_memory
    constants.parameters = memory.get("weights", 0) // _FLOAT32
    constants.base_bytes = memory.get("base", 0)
    constants.device = "cuda" if "cached" in memory else "cpu"
    if report.device is not None and report.device.devices:
        constants.device_total_bytes = report.device.devices[0].memory_total
    constants.version_bytes = version_bytes(state_dir)
    rows, held = report.replay_rows, report.replay_bytes
    if rows.get("device"):
        constants.row_bytes = held["device"] // rows["device"]
    if (checkpoint := checkpoint_bytes(state_dir)) is not None:
        constants.checkpoint_bytes = max(0, checkpoint - report.holdout_rows * held_out_bytes(pipeline, constants))


def process_sizes(
    config: Config, report: LearnerReport, constants: Constants, peak: PeakMemory, saved: float = 0.0
) -> None:
    """Fill what the processes take of the host besides what the ledger and the store count.

    `saved`: new events that checkpoints had the rows of. The process had copies of them, and a plan adds its own.
    """
    on_cpu = constants.device == "cpu"
    tensors = sum(learner_tensors(config.pipeline, constants.parameters, constants.base_bytes).values())
    in_memory = on_cpu or config.pipeline.replay.device_memory == "host"
    known = tensors * on_cpu + report.replay_bytes.get("device", 0) * in_memory
    copied = min(report.replay_rows.get("device", 0), saved) * (ENTRY_BYTES + (constants.row_bytes or 0))
    constants.learner_bytes = max(0, peak.learner - known - round(COPIES_SAVED * copied))
    constants.ingest_bytes, constants.serving_bytes = peak.ingest, peak.serving


def constants_of_run(config: Config) -> Constants:
    """Return the constants that the reports of a pipeline show, and its processes if they run.

    Raises:
        SettingsError: no learner has run in `state_dir`.
    """
    report, serving = read_learner(config.state_dir), read_serving(config.state_dir)
    if report is None:
        raise SettingsError(f"no learner has run in {config.state_dir}; plan without --from-run to calibrate")
    constants = Constants(source="run", parameters=0, differences=["the rate at which it saturates was not measured"])
    pipeline = config.pipeline
    sizes_of(pipeline, report, config.state_dir, constants)
    token = pipeline.serving.tokens.read.get_secret_value()
    counters = read_counters(pipeline.learner.status, token)
    if counters is not None and counters.steps:
        constants.step_seconds = counters.step_seconds / counters.steps
        if counters.checkpoints:
            constants.checkpoint_seconds = counters.checkpoint_seconds / counters.checkpoints
        peak = PeakMemory(report.pid, None if serving is None else serving.pid)
        peak.sample()
        if peak.learner:
            process_sizes(config, report, constants, peak)
    if serving is not None and (rate := report.rates.get("rows_new")):
        set_delivery(pipeline, constants, rate, (serving.freshness_p50_seconds, serving.freshness_p99_seconds))
    return constants


def set_delivery(
    pipeline: Pipeline, constants: Constants, rate: float, measured: tuple[float | None, float | None]
) -> None:
    """Fill the time that versions take, from the measured freshness at a rate: what is left without the waits."""
    every = max(pipeline.versions.publish_every.total_seconds(), constants.publish_seconds or 0.0)
    mean, most = waits(pipeline, constants, rate, every)
    if measured[0] is not None and measured[1] is not None:
        constants.delivery_seconds = max(0.0, measured[0] - mean)
        constants.delivery_p99_seconds = max(0.0, measured[1] - most)


def constants_of_model(config: Config) -> Constants:
    """Return the sizes of the model alone, which is built in a process as doctor does.

    Raises:
        SettingsError: it cannot be built.
    """
    context = CheckContext(config.path, _PROBE_SECONDS, pipeline=config)
    problems = [finding.message for finding in check_model(context) if finding.level == "problem"]
    if not context.model_bytes:
        raise SettingsError(problems[0] if problems else "the model has no weights that are trained")
    return Constants(
        source="model",
        parameters=context.model_bytes // _FLOAT32,
        base_bytes=context.base_bytes,
        version_bytes=context.model_bytes,
        checkpoint_bytes=_TENSORS * context.model_bytes,
        differences=["nothing was measured but the model's size", _OPTIMIZER],
    )
