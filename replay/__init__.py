"""Holds events of the stream for replay.

In: events that the learner has trained on. Out: samples, arrays of old events to mix among the new.
Promised: the held events are a pure function of the added events and the seed, bounded in number and in bytes; a sample
is uniform over the held events.
"""
