"""The Xid events that concern the hardware: NVIDIA's error numbers, and what each means for the learner.

Sources: NVIDIA, "Analyzing Xid Errors with the Xid Catalog" (docs.nvidia.com/deploy/xid-errors) for the meaning and the
immediate action, and NVIDIA, "Health Validation: Xid Checks" (docs.nvidia.com/health-validation) for those that are
critical. Numbers that are not listed are of applications or of graphics, such as 13, 31, 43 and 45: the process that is
at fault gets an error of CUDA, and others continue. So it is with 94 and 109, which are early: NVML does not say whose
they are, and where it is the learner, CUDA's error ends it anyway.
"""

from typing import Literal, NamedTuple


class Xid(NamedTuple):
    """What an Xid event means."""

    meaning: str
    level: Literal["early", "fatal"]
    """`fatal`: what is on the device cannot be trusted, or the device needs a reset."""
    of_links: bool = False
    """Whether it concerns NVLink alone: fatal only where ranks exchange gradients by it."""


XIDS: dict[int, Xid] = {
    46: Xid("the device stopped processing", "fatal"),
    48: Xid("a memory error could not be corrected", "fatal"),
    62: Xid("the internal micro-controller halted", "fatal"),
    63: Xid("a row of memory is to be replaced by a spare one at the next reset", "early"),
    64: Xid("a row of memory could not be replaced by a spare one", "fatal"),
    74: Xid("an NVLink connection failed", "fatal", of_links=True),
    79: Xid("the device has fallen off the bus", "fatal"),
    92: Xid("the rate of corrected memory errors is high", "early"),
    94: Xid("a memory error that could not be corrected was contained in one process", "early"),
    95: Xid("a memory error could be neither corrected nor contained", "fatal"),
    109: Xid("a switch of contexts timed out", "early"),
    119: Xid("the GPU system processor did not answer the driver", "fatal"),
    120: Xid("the GPU system processor failed", "fatal"),
    140: Xid("a memory error was not recovered from", "fatal"),
    143: Xid("the device could not be initialised", "fatal"),
    154: Xid("the driver asks for a recovery action", "early"),
    156: Xid("a resource of the device is to be retired at the next reset", "early"),
    157: Xid("a resource of the device could not be retired", "fatal"),
    158: Xid("the device timed out and needs a reset", "fatal"),
    171: Xid("an error of the device's memory could not be corrected", "fatal"),
    172: Xid("an error of the device's caches could not be corrected", "fatal"),
}
"""By number."""
