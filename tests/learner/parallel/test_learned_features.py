"""All ranks learn the same features, and what one rank would."""

from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests import forkserver

PROGRAM = Path(__file__).parent / "features_program.py"


@pytest.fixture(scope="module")
def tensors(tmp_path_factory):
    """Return the tensors of each of so many ranks after training."""

    def train(size):
        folder = tmp_path_factory.mktemp(f"ranks{size}")
        processes = [forkserver.start([str(PROGRAM), str(rank), str(size), str(folder)]) for rank in range(size)]
        try:
            assert [process.wait(170) for process in processes] == [0] * size
        finally:
            for process in processes:
                process.kill()
        return [safetensors.torch.load_file(folder / f"{rank}.safetensors") for rank in range(size)]

    return train


@pytest.mark.process
def test_ranks_have_the_same_features_as_one_that_trains_alone(tensors):
    (alone,), (first, second) = tensors(1), tensors(2)
    learned = [name for name in alone if name.startswith("learned_features.")]
    assert len(learned) > 15
    for name in learned:
        assert torch.equal(first[name], alone[name]), name
    for name, value in first.items():
        assert torch.equal(second[name], value), name
        assert torch.allclose(value, alone[name], atol=1e-5), name
