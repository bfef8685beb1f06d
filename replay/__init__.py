"""What has been seen, kept for rehearsal.

In: events that the learner has finished with. Out: samples, arrays of old events to mix among the new.
Promised: what is held is a pure function of what was offered and the seed, bounded in events and in bytes; a sample is
uniform over what is held.
"""
