"""Strategies that open another part of the model when the stream changes, and freeze the one before.

In: events, their classes, and drift. Out: the gradient of the open part. All ranks open a part in the same step.
"""
