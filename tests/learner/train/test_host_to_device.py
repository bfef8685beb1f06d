"""The copy of a batch to the device."""

from collections import Counter

import numpy as np
import torch

from anabranch.learner.model.examples import Transfer
from tests.support.cuda_recorder import CudaRecorder

COLUMNS = [np.arange(12, dtype=np.float32).reshape(4, 3), np.arange(4), np.ones(4, np.float32)]


def test_all_columns_of_a_batch_are_one_copy_that_the_host_does_not_wait_for():
    with CudaRecorder() as cuda:
        columns = [column.copy() for column in COLUMNS]
        there = Transfer((), torch.device("cuda")).copy(columns)
        for column in columns:
            column[...] = 9  # they may change at once
        assert cuda.sites("copy") == ["cpu to cuda, non_blocking"]
        assert cuda.sites("record_stream") == ["record_stream"]
        assert cuda.waits == Counter()
        assert all(
            np.array_equal((tensor * 1).cpu().numpy(), column) for tensor, column in zip(there, COLUMNS, strict=True)
        )
        del there
    cuda.check()


def test_columns_on_the_cpu_are_not_copied():
    there = Transfer((), torch.device("cpu")).copy(COLUMNS)
    assert [tensor.data_ptr() for tensor in there] == [column.ctypes.data for column in COLUMNS]
