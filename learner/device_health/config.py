"""The section `[device]` of `pipeline.toml`. Imports no torch."""

from datetime import timedelta
from typing import Annotated, Literal

from pydantic import Field

from anabranch.core.durations import PositiveDuration
from anabranch.core.settings import Section


class DeviceSettings(Section):
    """How the learner watches the health of its NVIDIA devices; docs/operate/device-health.md explains it."""

    enabled: Literal["auto", "on", "off"] = "auto"
    """`auto` watches where there is an NVIDIA device and the extra `gpu`; `on` refuses to start without them."""
    every: PositiveDuration = timedelta(seconds=1)
    """Time between two readings of a device."""
    timeout: PositiveDuration = timedelta(seconds=10)
    """How long a device may answer no query before that is a problem."""
    window: PositiveDuration = timedelta(minutes=10)
    """The time over which errors of a device are counted."""
    corrected_errors: Annotated[int, Field(ge=1)] = 10
    """Corrected memory errors in `window` that are an early warning."""
    pcie_replays: Annotated[int, Field(ge=1)] = 80
    """Replays of PCIe packets in `window` that are an early warning; NVIDIA's own limit is 8 a minute."""
    nvlink_errors: Annotated[int, Field(ge=1)] = 10
    """Replays and recoveries of NVLink in `window` that are an early warning."""
    temperature_margin: Annotated[float, Field(ge=0, le=50)] = 8.0
    """Degrees Celsius below the temperature at which the device slows down, from which a rise is an early warning."""
    sniff_every: PositiveDuration = timedelta(minutes=10)
    """Time between two sniff tests, which time the same matrix product on each device."""
    sniff_deviation: Annotated[float, Field(gt=0, le=10)] = 0.1
    """How much slower than usual, as a fraction, a device may be in the sniff test before it is named."""
