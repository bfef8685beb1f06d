"""The teacher of `[model.teacher]`: new events in, its outputs for them out, before the step and in the background.

A step waits for them no longer than `model.teacher.timeout`, and learns from labels alone where they have not come.
"""
