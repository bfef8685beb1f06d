"""What a rank makes of an error of torch."""

import pytest

from anabranch.learner.errors import is_of_a_lost_rank
from tests import forkserver
from tests.support.waiting import PATIENCE_SECONDS

PROGRAM = """
import os, sys, torch, torch.distributed as dist
from anabranch.learner.errors import is_of_a_lost_rank
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
dist.all_reduce(torch.ones(4))
if rank == 1:
    os._exit(9)
try:
    dist.all_reduce(torch.ones(4))
except RuntimeError as exc:
    os.write(1, str(is_of_a_lost_rank(exc)).encode())
os._exit(0)
"""


@pytest.mark.process
def test_a_lost_rank_is_distinguished_from_other_errors(tmp_path):
    other = forkserver.start(["-c", PROGRAM, "1", str(tmp_path / "rendezvous")])
    try:
        done = forkserver.run(["-c", PROGRAM, "0", str(tmp_path / "rendezvous")])
        assert (done.stdout, other.wait(PATIENCE_SECONDS)) == ("True", 9)
    finally:
        other.kill()
    assert not is_of_a_lost_rank(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


@pytest.mark.parametrize(
    "said",
    [
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:4711",
        "[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 600000ms for recv operation",
        "NCCL communicator was aborted on rank 1.",
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)",
        "NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited or there was a network error",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    ],
)
def test_what_gloo_and_nccl_say_of_a_lost_rank_is_known(said):
    assert is_of_a_lost_rank(RuntimeError(said))
