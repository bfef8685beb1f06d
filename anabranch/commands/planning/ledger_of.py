"""The memory ledger of doctor and of the live status, of a pipeline's learner and servers."""

from anabranch.config.model import Pipeline
from anabranch.doctor.accelerator_checks import ServerLoad, learner_ledger


def learner_tensors(pipeline: Pipeline, parameters: int, base_bytes: int) -> dict[str, int]:
    """Return the bytes of the tensors of rank 0 by purpose, without the store and CUDA's contexts."""
    challengers = 0 if pipeline.search is None else pipeline.search.challengers
    found = learner_ledger(parameters, pipeline.learner, 0, base_bytes, challengers)
    return {name: size for name, size in found.items() if name not in ("replay", "contexts") and size}


def serving_tensors(pipeline: Pipeline, parameters: int, base_bytes: int) -> dict[str, int]:
    """Return the bytes of the tensors of all serving processes by purpose."""
    load = ServerLoad(pipeline.serving.workers, pipeline.serving.shadow > 0)
    return {name: size for name, size in load.ledger(parameters, base_bytes).items() if name != "contexts" and size}
