"""The ranks except the first: they train on the events that the leader scatters.

They use neither the stream nor the state directory, except the locks of device sharing.
"""

import gc
import threading
from dataclasses import replace

from learner.build import LearnerSpec, build_training_setup
from learner.device_health.start import start_watch
from learner.device_sharing.cuda_limits import confined, prepare_cuda, using_device
from learner.device_sharing.sharing import device_sharing, step_hooks
from learner.distributed.channel import Channel
from learner.distributed.data_parallel import DataParallelGroup
from learner.distributed.follower import follow
from learner.distributed.mesh import Mesh
from learner.distributed.process_group import RankAssignment, devices_of_host, join_group
from learner.model.device import without_denormals
from learner.runtime.shutdown import hard_stop_after
from learner.training.out_of_memory import MemoryRetry
from learner.training.trainer import Trainer


def follow_leader(deployment: LearnerSpec, stop: threading.Event, assignment: RankAssignment) -> None:
    """Step with the leader until it sends STOP; `stop` alone ends nothing before `learner.stop_timeout` is over.

    Raises:
        RankLostError: the leader is gone.
    """
    if assignment.first:
        deployment = _unshared(deployment)
    settings = deployment.device_sharing.settings
    prepare_cuda(deployment.learner.device, settings)
    with (
        hard_stop_after(stop, deployment.learner.stop_timeout),
        join_group(assignment, deployment.learner) as device,
        using_device(settings, device),
        without_denormals(device),
        confined(settings, device) as launch_context,
        device_sharing(deployment.device_sharing, deployment.state_dir, device, stop) as sharing,
    ):
        if assignment.first and assignment.rank == assignment.first:  # host 0 watches the devices of its ranks
            devices = devices_of_host(device, deployment.learner)
            start_watch(deployment.device, devices, lambda: None, ranks=assignment.size)
        channel = Channel(device)

        def make() -> tuple[Trainer, DataParallelGroup]:
            group = Mesh(deployment.learner, assignment.rank, assignment.size).row_group()
            setup = MemoryRetry(device, stop)(lambda: build_training_setup(deployment, device, group))
            replicas = setup.group()
            trainer = Trainer(**setup.arguments, ranks=replicas, hooks=step_hooks(sharing, launch_context))
            if sharing is not None:
                sharing.attach(trainer.model, assignment.size)
            gc.freeze()  # as rank 0 does
            gc.enable()
            return trainer, replicas

        follow(channel, make)


def _unshared(deployment: LearnerSpec) -> LearnerSpec:
    """Return the sections for a host without servers: the lease of device sharing needs one host's memory and locks."""
    settings = deployment.device_sharing.settings.model_copy(update={"policy": "exclusive"})
    return replace(deployment, device_sharing=replace(deployment.device_sharing, settings=settings))
