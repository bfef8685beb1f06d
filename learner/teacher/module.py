"""A teacher in this process: a frozen module on the device of the steps.

Legend: N new events of a batch.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta

import numpy as np
from numpy.typing import NDArray
from torch import nn
from typing_extensions import override

from anabranch.core.failures import out_of_memory
from ingest.events.block import Array
from learner.errors import TeacherError
from learner.evaluation.chunks import Chunks
from learner.evaluation.scoring import output_of_each
from learner.teacher.checks import without_unusable
from learner.teacher.feed import Teacher


class ModuleTeacher(Teacher):
    """Runs a module in evaluation mode, in chunks, before each of which it yields to requests.

    A step waits until its events are through: that is compute like the step's own, and ends. On CUDA it runs on a
    stream of the lowest priority.
    """

    timeout: timedelta | None = None

    def __init__(
        self, name: str, module: nn.Module, features: Sequence[str], shape: Sequence[int], chunks: Chunks
    ) -> None:
        """Take a module on the device.

        Args:
            name: what messages call it.
            module: not used elsewhere.
            features: names of those that it takes.
            shape: of its output for one event.
            chunks: used by this teacher alone.
        """
        self.name = name
        # Two threads must not launch work on Metal at once.
        self.threads = 0 if chunks.device.type == "mps" else 1
        self._module = module.eval().requires_grad_(False)
        self._features = features
        self._shape = shape
        self._chunks = chunks

    @override
    def answer(self, columns: Mapping[str, Array]) -> NDArray[np.float32]:
        try:
            with self._chunks.on_stream():
                output_N = output_of_each(self._module, self._features, columns, self._shape, self._chunks)
        except RuntimeError as exc:
            if not out_of_memory(exc):
                raise
            output_N = None
        if output_N is None:  # after the handler, since the error references tensors
            raise TeacherError(f"{self.name} has too little memory on {self._chunks.device}")
        output_N = without_unusable(output_N)
        if np.isnan(output_N.reshape(len(output_N), -1)).any(axis=1).all():
            raise TeacherError(
                f"{self.name} raises, or returns numbers that are not finite, for {len(output_N)} events"
            )
        return output_N

    @override
    def close(self) -> None:
        """Do nothing: chunks are short."""
