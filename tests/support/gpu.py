"""A CUDA device for tests, or the recorder instead; and how exactly results of two devices agree."""

import contextlib
import importlib

import pytest


@pytest.fixture(params=["recorded", pytest.param("real", marks=pytest.mark.gpu)])
def cuda(request):
    """A CUDA device. Each test runs twice: on a real one, and on a CPU under `CudaRecorder`."""
    import torch

    from tests.support.cuda_recorder import CudaRecorder

    if request.param == "real":
        yield torch.device("cuda", 0)
        return
    with CudaRecorder():
        yield torch.device("cuda", 0)


@pytest.fixture(scope="module")
def packages_of_pretrained():
    """Import, before a recorder starts, what asks for a device when it is imported, as far as it is installed."""
    from anabranch.learner.model.base_precision import stay_offline

    stay_offline()
    for name in ("peft", "bitsandbytes"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def rtol(dtype, steps=1):
    """Return the relative tolerance for results of two devices after some steps of training in float32 or float64.

    Each step sums in another order and with other fused multiplications, which changes a few units of least precision;
    later steps start from that. 64 units a step allow for it, and are far below what an event that is left out, or
    counted twice, would change. Compare with `atol` of the same size for values of about 1. For half precision this
    would allow anything: compare what was learned.
    """
    import torch

    return 64 * steps * torch.finfo(dtype).eps
