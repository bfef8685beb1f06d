"""The ranks except the first: they carry out the leader's actions.

With sharded weights no rank has all tensors whole: those that are gathered or restored come one by one.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from anabranch.learner.model.faulty_events import RaisingEventsError
from anabranch.learner.model.rng import rng_tensors, rng_values
from anabranch.learner.model.trained_set import trained_state
from anabranch.learner.parallel.channel import (
    ALL_REDUCE,
    PARTS,
    Action,
    Channel,
    arrays_from_bytes,
    float_from_bits,
    json_from_bytes,
    json_to_bytes,
    smaller,
    tensors_from_bytes,
    tensors_to_bytes,
)
from anabranch.learner.parallel.data_parallel import DataParallelGroup
from anabranch.learner.parallel.scatter import RankBatch, TensorLayout, gathered, layouts_from_json, pieces_of, unpacked
from anabranch.learner.parallel.speed_check import product_or_nan, time_collective
from anabranch.learner.train.trainer import Trainer


def follow(channel: Channel, make: Callable[[], tuple[Trainer, DataParallelGroup]]) -> None:
    """Carry out the leader's actions until STOP; `make` builds the trainer, together with all ranks.

    Raises:
        RankLostError: the leader is gone.
    """
    action, numbers, message = channel.receive()
    if action is Action.STOP:
        return
    assert action is Action.BEGIN
    trainer, replicas = make()
    max_rows = trainer.runner.micro_batch_size
    channel.reply(torch.tensor([max_rows or 0]).view(torch.uint8))
    layouts: list[TensorLayout] = []
    while action is not Action.STOP:
        action, numbers, message = channel.receive()
        if action is Action.STEP:
            max_rows = _step(channel, trainer, replicas, layouts, numbers, max_rows)
        elif action is Action.LAYOUTS:
            assert message is not None
            layouts = layouts_from_json(message.numpy().tobytes())
        elif action is Action.RESTORE:
            assert message is not None
            _restore(channel, trainer, replicas, message)
        elif action is Action.GENERATORS and message is not None:
            trainer.restore_generators(*tensors_from_bytes(message))
        elif action is Action.GENERATORS:
            channel.reply(tensors_to_bytes(rng_tensors(channel.device), rng_values()))
        elif action is Action.GATHER:
            replicas.gather()
            trainer.strategy.gather()
        elif action is Action.FEATURES:
            assert message is not None
            trainer.features.learn(arrays_from_bytes(message))
        elif action is Action.ERASE:
            assert message is not None
            trainer.features.erase_owners(arrays_from_bytes(message)["owner"], numbers[0])
        elif action is Action.DRIFT:
            trainer.on_drift()
        elif action is Action.SNAPSHOT:
            _discard(replicas.weights.full_tensors(trained_state(trainer.model)))
        elif action is Action.MOMENTS:
            _discard(replicas.weights.full_tensors(*trainer.update.tensors()))
        elif action is Action.TIME_DEVICES and numbers == [ALL_REDUCE]:
            time_collective(channel.device)
        elif action is Action.TIME_DEVICES:
            channel.reply(torch.tensor([product_or_nan(channel.device)], dtype=torch.float64).view(torch.uint8))


def _step(
    channel: Channel,
    trainer: Trainer,
    replicas: DataParallelGroup,
    layouts: list[TensorLayout],
    numbers: list[int],
    max_rows: int | None,
) -> int | None:
    """Take a step with the leader, in micro-batches of its size, or of `max_rows` that fit on this host.

    Returns:
        The most events that fit: fewer than `max_rows` after memory ran out; None while it never did.
    """
    flags, micro, lr_factor, forwards, size, *of_groups = numbers
    n = len(layouts)
    most, counts, real = of_groups[:n], of_groups[n : 2 * n], of_groups[2 * n :]
    rank_batch = RankBatch(unpacked(channel.receive_scattered(size), layouts, counts), real)
    limit = smaller(micro or None, max_rows)
    trainer.runner.micro_batch_size = limit
    trainer.update.schedule.scale = float_from_bits(lr_factor)
    replicas.forwards = forwards
    try:
        result = trainer.step_without_features(rank_batch.parts[0], rank_batch.parts[1:], real[0])
        replicas.after_step()  # before the results: the leader receives them after its own
        if replicas.mesh.reports():
            gathered(channel, pieces_of(result, rank_batch, flags), flags, most, replicas.mesh.group("rows"))
    except RaisingEventsError as exc:
        channel.reply(json_to_bytes([list(exc.indices), exc.message]))
    return max_rows if trainer.runner.micro_batch_size == limit else trainer.runner.micro_batch_size


def _restore(channel: Channel, trainer: Trainer, replicas: DataParallelGroup, message: Tensor) -> None:
    """Receive the tensors of a checkpoint one by one, and keep of each what this rank trains."""
    received = json_from_bytes(message)
    tensors = defaultdict[str, dict[str, Tensor]](dict, {part: {} for part in PARTS})
    moments = [name for part, name, *_ in received["tensors"] if part == "optimizer"]
    like = {"model": trained_state(trainer.model), "optimizer": trainer.update.weights_of(moments)}
    for part, name, dtype, shape in received["tensors"]:
        value = torch.empty(shape, dtype=getattr(torch, dtype))
        channel.broadcast(value)
        tensors[part] |= replicas.weights.shard_like({name: value}, like.get(part, {}))
    trainer.restore(tensors, received["state"])


def _discard(full_tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Take part in gathering tensors that rank 0 needs; each is freed before the next."""
    deque(full_tensors, maxlen=0)
