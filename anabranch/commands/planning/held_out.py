"""What held-out events take in a checkpoint."""

from anabranch.commands.planning.constants import Constants

_BYTES = 36
"""Bytes of a held-out event in a checkpoint, without its row."""


def held_out_bytes(constants: Constants) -> int:
    """Return the bytes of a held-out event in a checkpoint."""
    return (constants.row_bytes or 0) + _BYTES
