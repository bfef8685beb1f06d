"""Strategies for the small models of tests."""

from anabranch.learner.strategies.registry import STRATEGIES


def small_strategy(name, **arguments):
    """Return a strategy; the head of an expert is most of a small model."""
    return STRATEGIES[name](**({"size": 10.0} if name == "experts" else {}), **arguments)
