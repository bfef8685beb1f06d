"""Copies to a device: one block, from pinned memory alone, and in pieces where memory runs out."""

import ast
from pathlib import Path

import numpy as np
import pytest
import torch

from anabranch.replay.tiers.store_stream import StoreStream, in_pieces, to_device, upload
from tests.support.cuda_recorder import CudaRecorder

ROOT = Path(__file__).parent.parent.parent.parent
CUDA = torch.device("cuda")


def test_arrays_of_any_dtype_arrive_by_one_copy_of_one_pinned_block():
    arrays = [
        np.arange(7, dtype=np.int64),
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.array([True, False, True]),
        np.empty((0, 4), np.float64),
        np.arange(24, dtype=np.uint8).reshape(2, 3, 4)[:, ::2],
    ]
    with CudaRecorder() as cuda:
        there = upload(arrays, CUDA)
        assert cuda.sites("copy") == ["cpu to cuda, non_blocking"]
        assert {tensor.device.type for tensor in there} == {"cuda"}
        assert all(np.array_equal(tensor.cpu().numpy(), array) for tensor, array in zip(there, arrays, strict=True))
        assert [tensor.shape for tensor in there] == [array.shape for array in arrays]
    cuda.check()


def test_a_copy_that_the_host_does_not_wait_for_is_of_pinned_memory():
    with CudaRecorder(), pytest.raises(AssertionError):
        to_device(torch.zeros(3), CUDA)


def test_only_one_function_copies_to_a_device_without_a_wait():
    """It asserts that the memory is pinned."""
    found = []
    for package in ("replay", "learner", "serving"):
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            for node in ast.walk(ast.parse(text)) if "non_blocking" in text else ():
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Attribute)
                    and node.func.attr in ("to", "cuda")
                    and any(keyword.arg == "non_blocking" for keyword in node.keywords)
                ):
                    found.append(str(path.relative_to(ROOT)))
    assert found == ["replay/tiers/store_stream.py"], "call anabranch.replay.tiers.store_stream.to_device"


@pytest.mark.parametrize("fits", [1, 2, 5, 100])
def test_work_that_runs_out_of_memory_is_repeated_in_smaller_pieces_and_each_row_is_done(fits):
    done, attempts = list[int](), list[int]()

    def work(part):
        attempts.append(part.stop - part.start)
        if attempts[-1] > fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")
        done.extend(range(part.start, part.stop))

    in_pieces(work, 23, limit=10)
    assert done == list(range(23))
    assert max(attempts) <= 10
    assert len([size for size in attempts if size > fits]) <= 4, "the smaller size is kept"


def test_a_single_row_that_does_not_fit_and_other_errors_are_raised():
    for error in (torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("index out of range")):

        def fail(_part, error=error):
            raise error

        with pytest.raises(type(error), match=str(error)):
            in_pieces(fail, 8, limit=8)
    in_pieces(fail, 0, limit=8)


def test_tensors_cross_between_streams_with_an_edge_each_way():
    with CudaRecorder() as cuda:
        stream = StoreStream(CUDA)
        with stream.work():
            (there,) = stream.upload(np.arange(8))
        moved = stream.hand_over(there, stream.record())
        assert (moved + 1).sum().item() == 36
        del there, moved
        mine = torch.zeros(8, device="cuda")
        stream.take(mine)
        with stream.work():
            doubled = mine * 2
            out = torch.empty(8)
            stream.download(doubled, out)
        assert not out.any()
    cuda.check()
