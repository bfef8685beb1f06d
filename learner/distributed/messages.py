"""Values as bytes of the host, uint8 `[b]`, for messages between ranks."""

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.state_dir.safetensors_file import pieces_of, tensors_of

SILENCE = timedelta(minutes=10)
"""Timeout of all process groups: many times what the leader ever takes between two headers."""
PARTS = ("model", "optimizer", "strategy")
"""The parts of a checkpoint that all ranks restore."""
MATRIX_PRODUCT, ALL_REDUCE = 0, 1
"""Parts of the sniff test."""


def tensors_to_bytes(tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> Tensor:
    """Return tensors and JSON values as bytes."""
    return to_bytes(b"".join(pieces_of({**tensors, "/": json_to_bytes(values)})))


def tensors_from_bytes(message: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and values of `tensors_to_bytes`."""
    tensors = tensors_of(message.numpy().tobytes(), "a message of a rank")
    return tensors, json_from_bytes(tensors.pop("/"))


def arrays_to_bytes(arrays: Mapping[str, NDArray[Any]]) -> Tensor:
    """Return arrays by name as bytes."""
    return tensors_to_bytes({name: torch.from_numpy(value.copy()) for name, value in arrays.items()}, {})


def arrays_from_bytes(message: Tensor) -> dict[str, NDArray[Any]]:
    """Return the arrays of `arrays_to_bytes`."""
    tensors, _ = tensors_from_bytes(message)
    return {name: value.numpy() for name, value in tensors.items()}


def json_to_bytes(values: object) -> Tensor:
    """Return JSON values as bytes."""
    return to_bytes(json.dumps(values).encode())


def json_from_bytes(message: Tensor) -> Any:
    """Return the values of `json_to_bytes`."""
    return json.loads(message.numpy().tobytes())


def to_bytes(text: bytes) -> Tensor:
    """Return bytes as a tensor."""
    return torch.from_numpy(np.frombuffer(text, np.uint8).copy())


def float_to_bits(number: float) -> int:
    """Return the bits of a float as an integer, for a header."""
    return int(np.float64(number).view(np.int64))


def float_from_bits(bits: int) -> float:
    """Return the float of `float_to_bits`."""
    return float(np.int64(bits).view(np.float64))


def smaller(one: int | None, other: int | None) -> int | None:
    """Return the smaller of two sizes of a micro-batch; None is without a limit."""
    return min(filter(None, (one, other)), default=None)
