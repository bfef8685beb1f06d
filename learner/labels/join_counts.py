"""Totals of a join, for metrics and reports."""

from dataclasses import dataclass


@dataclass
class JoinCounts:
    """Totals of a join since the pipeline began.

    Attributes:
        matched: events that got a label in time.
        timed_out: events that timed out; `early_timeouts` are those of them for which there was no space.
        taken_back: events that got a label after they had been returned as timed out.
        early_removals: timed-out events that were removed for lack of space, while a label could take them back.
        duplicate_labels: labels that came for an event that has one: an earlier label of their key was used.
        unmatched_labels: labels that no event has matched, counted once none can any more.
        late_labels: those of them whose key is that of an event that had timed out, of the last half to one million of
            these since the process began; one in 40 unmatched labels may be counted here instead.
        dropped_labels: labels that were dropped for lack of space while an event that comes could match them.
        crowded_labels: labels that were dropped because there were many others of their key.
        damaged: events whose payload was damaged.
    """

    matched: int = 0
    timed_out: int = 0
    early_timeouts: int = 0
    taken_back: int = 0
    early_removals: int = 0
    duplicate_labels: int = 0
    unmatched_labels: int = 0
    late_labels: int = 0
    dropped_labels: int = 0
    crowded_labels: int = 0
    damaged: int = 0
