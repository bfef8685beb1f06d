"""`learner.deterministic`: what torch has to do for the same weights bit for bit."""

import os

import torch

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


def compute_deterministically() -> None:
    """Have torch use algorithms alone that give the same bits each time, on one thread; before the first of its work.

    Sums of floats depend on how many threads share them, and the number of threads on the machine's load and limits.
    """
    os.environ.setdefault(_CUBLAS, ":4096:8")  # what cuBLAS wants for it
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.set_num_threads(1)
