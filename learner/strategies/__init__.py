"""Strategies by name: what else than the new events a step learns from.

To add one, write a class in a file of its own and add a line here.
"""

from learner.strategy import ExperienceReplay, NoReplay, Strategy

STRATEGIES: dict[str, type[Strategy]] = {"none": NoReplay, "er": ExperienceReplay}
