"""A rank that averages gradients with each hook: `RANK SIZE FOLDER`.

`FOLDER/measured.json` has for each hook, of a pass and over all ranks: the bytes that ranks count, those that they sent
over TCP, and those of full gradients.
"""

import json
import os
import socket
import struct
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from anabranch.learner.parallel.gradient_exchange import GradientExchange
from anabranch.learner.parallel.process_group import exiting_at_once, leave_group
from anabranch.learner.settings.learner import LearnerSettings

PASSES = 2
_BYTES_SENT = 200
"""Where `struct tcp_info` of Linux has `tcpi_bytes_sent`, and `tcpi_bytes_retrans` after it."""


def model():
    """Return a model of 640,000 parameters, in several buckets."""
    torch.manual_seed(0)
    width, layers = 400, 4
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)), nn.Linear(width, 10))


def sent_bytes():
    """Return how many bytes this process has sent over its TCP connections, each once, without headers."""
    return sum(map(_sent_by, Path("/proc/self/fd").iterdir()))


def _sent_by(descriptor):
    try:
        if not str(descriptor.readlink()).startswith("socket:"):
            return 0
    except FileNotFoundError:  # that of the folder
        return 0
    with socket.socket(fileno=os.dup(int(descriptor.name))) as connection:
        if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
            return 0
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 512)
    sent, sent_again = struct.unpack_from("=QQ", info, _BYTES_SENT)
    return int(sent - sent_again)


def run(rank, size, folder):
    """Measure each hook; all ranks end with the same weights."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)
    measured = {}
    for name in ("none", "fp16", "powersgd", "int8", "topk"):
        trained = DistributedDataParallel(model(), gradient_as_bucket_view=True, bucket_cap_mb=1)
        exchange = GradientExchange(LearnerSettings.model_validate({"comm_hook": name}), search=False)
        exchange.register(trained)
        torch.manual_seed(rank)
        on_wire = counted = 0
        warm_up = 11 if name == "powersgd" else 2  # PowerSGD compresses from the eleventh pass on
        for number in range(warm_up + PASSES):
            if number == warm_up:
                dist.barrier()
                on_wire, counted = sent_bytes(), exchange.sent_bytes
            trained.zero_grad()
            trained(torch.randn(4, 400)).square().mean().backward()
            exchange.count_gradients()
        dist.barrier()
        total = torch.tensor([exchange.sent_bytes - counted, sent_bytes() - on_wire])
        dist.all_reduce(total)
        full = 2 * (size - 1) * sum(weight.nbytes for weight in trained.parameters())
        counted, on_wire = total.tolist()
        measured[name] = counted / PASSES, on_wire / PASSES, full
        gradient = torch.cat([weight.grad.flatten() for weight in trained.parameters() if weight.grad is not None])
        gradients = [torch.empty_like(gradient) for _ in range(size)]
        dist.all_gather(gradients, gradient)
        assert all(torch.equal(gradient, other) for other in gradients), name
    if rank == 0:
        (Path(folder) / "measured.json").write_text(json.dumps(measured))
    leave_group()


if __name__ == "__main__":
    with exiting_at_once():  # threads of the group would outlive the interpreter
        run(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
