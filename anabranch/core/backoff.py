"""Waiting times that several who wait for the same do not share."""

import random

_dice = random.Random()  # noqa: S311 no secret; not the interpreter's own, whose numbers a model may use


def jittered(seconds: float) -> float:
    """Return between half of `seconds` and all of it."""
    return seconds * _dice.uniform(0.5, 1.0)
