"""The ranks but the first: they compute what the leader deals, and touch neither the stream nor the state directory."""

import gc
import threading
from dataclasses import replace

from learner.build import Deployment, prepare
from learner.device_sharing.cuda_limits import confined, limit_threads
from learner.device_sharing.sharing import device_sharing
from learner.distributed.channel import Channel
from learner.distributed.data_parallel import Replicas
from learner.distributed.leader import follow
from learner.distributed.process_group import Meeting, Place, join_group
from learner.model.device import without_denormals
from learner.runtime.shutdown import bounded
from learner.training.trainer import Trainer


def follow_leader(deployment: Deployment, stop: threading.Event, place: Place) -> None:
    """Step with the leader until it says stop; `stop` alone ends nothing before `learner.stop_timeout` is over.

    Raises:
        RankLostError: the leader is gone.
    """
    if isinstance(place.meeting, Meeting) and place.first:
        deployment = _unshared(deployment)
    limit_threads(deployment.device_sharing.settings)
    with (
        bounded(stop, deployment.learner.stop_timeout),
        join_group(place, deployment.learner) as device,
        without_denormals(device),
        confined(deployment.device_sharing.settings, device) as lane,
        device_sharing(deployment.device_sharing, deployment.state_dir, device, stop) as sharing,
    ):
        channel = Channel(device)

        def make() -> tuple[Trainer, Replicas]:
            bench = prepare(deployment, device, place.rank)
            replicas = Replicas(deployment.learner, search=bench.leaves_some_out)
            trainer = Trainer(**bench.arguments, ranks=replicas)
            trainer.lane = lane
            if sharing is not None:
                sharing.attend(trainer, place.size)
            gc.freeze()  # as rank 0 does
            gc.enable()
            return trainer, replicas

        follow(channel, make)


def _unshared(deployment: Deployment) -> Deployment:
    """Return that of a host without servers: the lease of device sharing is of one host's memory and locks."""
    settings = deployment.device_sharing.settings.model_copy(update={"policy": "exclusive"})
    return replace(deployment, device_sharing=replace(deployment.device_sharing, settings=settings))
