"""The ranks but the first: they compute what the leader deals, and touch neither the stream nor the state directory."""

import gc
import threading
from dataclasses import replace

from learner.build import LearnerSpec, build_training_setup
from learner.device_sharing.cuda_limits import confined, limit_threads
from learner.device_sharing.sharing import device_sharing
from learner.distributed.channel import Channel
from learner.distributed.data_parallel import DataParallelGroup
from learner.distributed.leader import follow
from learner.distributed.process_group import RankAssignment, RendezvousAddress, join_group
from learner.model.device import without_denormals
from learner.runtime.shutdown import hard_stop_after
from learner.training.trainer import Trainer


def follow_leader(deployment: LearnerSpec, stop: threading.Event, place: RankAssignment) -> None:
    """Step with the leader until it says stop; `stop` alone ends nothing before `learner.stop_timeout` is over.

    Raises:
        RankLostError: the leader is gone.
    """
    if isinstance(place.rendezvous, RendezvousAddress) and place.first:
        deployment = _unshared(deployment)
    limit_threads(deployment.device_sharing.settings)
    with (
        hard_stop_after(stop, deployment.learner.stop_timeout),
        join_group(place, deployment.learner) as device,
        without_denormals(device),
        confined(deployment.device_sharing.settings, device) as lane,
        device_sharing(deployment.device_sharing, deployment.state_dir, device, stop) as sharing,
    ):
        channel = Channel(device)

        def make() -> tuple[Trainer, DataParallelGroup]:
            bench = build_training_setup(deployment, device, place.rank)
            replicas = DataParallelGroup(deployment.learner, search=bench.leaves_some_out)
            trainer = Trainer(**bench.arguments, ranks=replicas)
            trainer.lane = lane
            if sharing is not None:
                sharing.attach(trainer, place.size)
            gc.freeze()  # as rank 0 does
            gc.enable()
            return trainer, replicas

        follow(channel, make)


def _unshared(deployment: LearnerSpec) -> LearnerSpec:
    """Return that of a host without servers: the lease of device sharing is of one host's memory and locks."""
    settings = deployment.device_sharing.settings.model_copy(update={"policy": "exclusive"})
    return replace(deployment, device_sharing=replace(deployment.device_sharing, settings=settings))
