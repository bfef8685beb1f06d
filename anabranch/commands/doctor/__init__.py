"""`anabranch doctor`: what keeps a pipeline from running, and how to fix it.

In: a config, whatever its state. Out: findings, each with its level, a message and how to fix it.
Promised: it changes nothing, prints no secret, and ends in bounded time; one check that fails hides no other.
"""
