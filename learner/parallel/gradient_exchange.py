"""How ranks average gradients: as they are, or compressed by a communication hook of `DistributedDataParallel`.

Legend: N numbers of a bucket, R ranks, K chosen numbers, C chunks of 8-bit numbers, B numbers of a chunk.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.train.parallelism import Exchange

_POWERSGD_RANK = 2
_POWERSGD_START = 10
"""Steps that average full gradients before PowerSGD begins to compress them."""
_CHUNK = 1024
"""Numbers that share a scale in 8 bits."""
_SCALE_BYTES = 4


class GradientExchange(Exchange):
    """Registers the hook of `learner.comm_hook`, and counts the bytes that this rank sends. Used by one thread.

    Hooks of one rank run one after the other, in the order of the buckets: so all ranks run collectives in one order.
    """

    def __init__(self, settings: LearnerSettings, *, search: bool) -> None:
        """Take `search`: whether some parameters get no gradient in some steps."""
        self.sent_bytes: int = 0
        """Bytes that this rank has sent to average tensors: 2 (R - 1) / R of their bytes, where ranks form a ring."""
        self._name = settings.comm_hook
        self._size = dist.get_world_size()
        self._counted_bytes = 0
        """Of the gradients of a pass, where the hook does not count them."""
        self._powersgd: Any = None
        self._feedback: _ErrorFeedback | None = None
        if self._name == "topk":
            self._feedback = _ErrorFeedback(_TopK(self._size, settings.topk_fraction), search=search)
        elif self._name == "int8":
            self._feedback = _ErrorFeedback(_Int8(self._size), search=search)

    def register(self, trained: DistributedDataParallel) -> None:
        """Register the hook with a module, before its first backward pass."""
        weights = [weight for weight in trained.parameters() if weight.requires_grad]
        if self._name == "none":
            self._counted_bytes = sum(weight.nbytes for weight in weights)
            return
        if self._feedback is not None:
            trained.register_comm_hook(None, self._run_feedback)
            return
        # Imported here since it takes seconds.
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        if self._name == "powersgd":
            self._powersgd = powerSGD_hook.PowerSGDState(None, _POWERSGD_RANK, _POWERSGD_START)
            trained.register_comm_hook(None, self._run_powersgd)
        else:
            hook = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}[self._name]
            self._counted_bytes = sum(2 * weight.numel() for weight in weights)
            trained.register_comm_hook(None, hook)

    @override
    def count_gradients(self) -> None:
        self.count_reduced(self._counted_bytes)

    def count_reduced(self, size: int, ranks: int | None = None) -> None:
        """Count the sum of tensors of `size` bytes over this number of ranks; None: over all."""
        ranks = ranks or self._size
        self.sent_bytes += 2 * (ranks - 1) * size // ranks

    @override
    def reset(self) -> None:
        if self._feedback is not None:
            self._feedback.reset()
        if self._powersgd is not None:
            for memory in (self._powersgd.error_dict, self._powersgd.p_memory_dict, self._powersgd.q_memory_dict):
                memory.clear()

    def _run_powersgd(self, _state: object, bucket: GradBucket) -> Future[Tensor]:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        gradient_N, compressed = bucket.buffer(), self._powersgd.total_numel_after_compression
        average: Future[Tensor] = powerSGD_hook.powerSGD_hook(self._powersgd, bucket)
        if gradient_N.is_cpu:
            # Its callbacks run further collectives in threads of gloo: those of two buckets would come in any order.
            average.wait()
        compressed = self._powersgd.total_numel_after_compression - compressed
        self.count_reduced((compressed or gradient_N.numel()) * gradient_N.element_size())
        return average

    def _run_feedback(self, _state: object, bucket: GradBucket) -> Future[Tensor]:
        assert self._feedback is not None
        self.sent_bytes += self._feedback.sent_bytes(bucket.buffer())
        return self._feedback.run(bucket)


class _Compressor:
    """Averages a compressed tensor over the ranks. All methods are called by every rank."""

    def average(self, index: int, value_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return what this rank has sent of a tensor, and the average over the ranks; `index`: of the bucket."""
        raise NotImplementedError

    def sent_bytes(self, value_N: Tensor) -> int:
        """Return how many bytes this rank sends to average a tensor."""
        raise NotImplementedError

    def drop(self, index: int) -> None:
        """Clear the state of a bucket."""


class _ErrorFeedback:
    """Adds to each gradient what earlier passes have not sent of theirs (Stich et al. 2018, "Sparsified SGD with
    memory").

    It keeps one number for each number of the gradient. A parameter without a gradient on this rank sends nothing, and
    keeps its remainder: `DistributedDataParallel` discards averages of parameters without a gradient on all ranks.
    """

    def __init__(self, compressor: _Compressor, *, search: bool) -> None:
        self._compressor = compressor
        self._search = search
        self._remainders: dict[int, tuple[Sequence[Tensor], Tensor]] = {}
        """The parameters of each bucket, which are regrouped after the first pass, and their remainder."""
        self._stream: torch.cuda.Stream | None = None

    def run(self, bucket: GradBucket) -> Future[Tensor]:
        """Average a bucket in place; on a CUDA device, the backward pass goes on meanwhile."""
        gradient_N = bucket.buffer()
        if not gradient_N.is_cuda:
            done = Future[Tensor]()
            self._average(bucket, gradient_N)
            done.set_result(gradient_N)
            return done
        self._stream = self._stream or torch.cuda.Stream(gradient_N.device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(gradient_N.device))
        done = Future[Tensor](devices=[gradient_N.device])
        with torch.cuda.stream(self._stream):
            self._average(bucket, gradient_N)
            done.set_result(gradient_N)
        return done

    def sent_bytes(self, gradient_N: Tensor) -> int:
        """Return how many bytes this rank sends to average a gradient."""
        return self._compressor.sent_bytes(gradient_N)

    def reset(self) -> None:
        """Clear all remainders."""
        self._remainders.clear()  # the compressor drops each when its bucket begins again

    def _average(self, bucket: GradBucket, gradient_N: Tensor) -> None:
        index, parameters = bucket.index(), bucket.parameters()
        before, remainder_N = self._remainders.get(index, ((), gradient_N))
        if len(before) != len(parameters) or any(a is not b for a, b in zip(before, parameters, strict=True)):
            remainder_N = torch.zeros_like(gradient_N)
            self._remainders[index] = parameters, remainder_N
            self._compressor.drop(index)
        kept_N = remainder_N.where(~_used(bucket), 0) if self._search else None
        if kept_N is not None:
            remainder_N -= kept_N
        remainder_N += gradient_N
        sent_N, average_N = self._compressor.average(index, remainder_N)
        remainder_N -= sent_N
        if kept_N is not None:
            remainder_N += kept_N
        gradient_N.copy_(average_N)


def _used(bucket: GradBucket) -> Tensor:
    """Return which numbers are of parameters with a gradient that is not 0, bool `[N]`."""
    gradients = bucket.gradients()
    norms = torch.stack(torch._foreach_norm(gradients, math.inf))
    sizes = torch.tensor([gradient.numel() for gradient in gradients], device=norms.device)
    return (norms != 0).repeat_interleave(sizes, output_size=bucket.buffer().numel())


class _TopK(_Compressor):
    """Sends the fraction of the numbers with the largest magnitude, and their indices (Lin et al. 2018, "Deep gradient
    compression", without its momentum correction and warm-up).

    Numbers that are not finite count as the largest, so that every rank gets them.
    """

    def __init__(self, size: int, fraction: float) -> None:
        self._size = size
        self._fraction = fraction

    @override
    def average(self, index: int, value_N: Tensor) -> tuple[Tensor, Tensor]:
        index_K = value_N.abs().topk(self._count(value_N), sorted=False).indices
        sent_N = torch.zeros_like(value_N)
        sent_N[index_K] = value_N[index_K]
        message = torch.cat([value_N[index_K].view(torch.uint8), index_K.int().view(torch.uint8)])
        messages = message.new_empty(self._size, len(message))
        dist.all_gather(list(messages), message)
        average_N = torch.zeros_like(value_N)
        bytes_of_values = len(index_K) * value_N.element_size()
        for message in messages:  # one after the other: the sum is the same on all ranks, bit for bit
            values, indices = message[:bytes_of_values].clone(), message[bytes_of_values:].clone()  # clones are aligned
            average_N.index_add_(0, indices.view(torch.int32), values.view(value_N.dtype))
        return sent_N, average_N.div_(self._size)

    @override
    def sent_bytes(self, value_N: Tensor) -> int:
        return (self._size - 1) * self._count(value_N) * (value_N.element_size() + 4)

    def _count(self, value_N: Tensor) -> int:
        return math.ceil(self._fraction * value_N.numel())


class _Int8(_Compressor):
    """Sends 8 bits per number, and a scale per chunk: each rank averages its part, and sends the average in 8 bits.

    The error of the average is fed back too, by the rank that made it (Tang et al. 2021, "1-bit Adam", with 8 bits).
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._remainders: dict[int, Tensor] = {}
        """Of the averages of this rank's part, by bucket."""

    @override
    def average(self, index: int, value_N: Tensor) -> tuple[Tensor, Tensor]:
        n, chunks = value_N.numel(), self._chunks(value_N)
        padded = nn.functional.pad(value_N, (0, self._size * chunks * _CHUNK - n)).view(self._size, chunks, _CHUNK)
        messages = _encoded(padded)
        sent_N = _decoded(messages, value_N.dtype).flatten()[:n]
        received = torch.empty_like(messages)
        dist.all_to_all_single(received, messages)
        part_CB = _decoded(received, value_N.dtype).sum(0).div_(self._size)
        remainder_CB = self._remainders.get(index)
        if remainder_CB is not None:
            part_CB += remainder_CB
        message = _encoded(part_CB)
        self._remainders[index] = part_CB - _decoded(message, value_N.dtype)
        dist.all_gather(list(messages), message)
        return sent_N, _decoded(messages, value_N.dtype).flatten()[:n]

    @override
    def sent_bytes(self, value_N: Tensor) -> int:
        return 2 * (self._size - 1) * self._chunks(value_N) * (_CHUNK + _SCALE_BYTES)

    @override
    def drop(self, index: int) -> None:
        self._remainders.pop(index, None)

    def _chunks(self, value_N: Tensor) -> int:
        """Return how many chunks each rank averages."""
        return math.ceil(value_N.numel() / (self._size * _CHUNK))


def _encoded(value_CB: Tensor) -> Tensor:
    """Return numbers `[..., B]` as bytes `[..., 4 + B]`: the scale in float32, and multiples of it from -127 to 127.

    A chunk with a number that is not finite gets a scale that is not.
    """
    scale_C1 = (value_CB.abs().amax(-1, keepdim=True) / 127).float().clamp_min(torch.finfo(torch.float32).tiny)
    number_CB = (value_CB / scale_C1).round().clamp(-127, 127).to(torch.int8)
    return torch.cat([scale_C1.view(torch.uint8), number_CB.view(torch.uint8)], -1)


def _decoded(message_CM: Tensor, dtype: torch.dtype) -> Tensor:
    scale_C1 = message_CM[..., :_SCALE_BYTES].contiguous().view(torch.float32)
    return message_CM[..., _SCALE_BYTES:].view(torch.int8).to(dtype) * scale_C1.to(dtype)
