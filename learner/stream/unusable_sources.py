"""Finds topics and files of which not one event can be learned from: nothing fails, and nothing is learned."""

from collections import Counter
from collections.abc import Mapping

from learner.state_dir.report import PartitionReport

_FEW = 100
"""Events of a topic that may all be unusable before it is a problem; a history is one once it is read."""
_UNUSABLE = ("unlabelled", "untaught")
"""Reasons for which an event without a label is skipped."""
_AS_ORDERED = ("left_to_topics", "left_to_files", "repeated", "undone", "erased", "tombstone")
"""Reasons that say nothing of what an event is like."""


def unusable_sources(partitions: Mapping[str, PartitionReport]) -> list[str]:
    """Return one sentence for each topic or history of which all events so far were rejected or have no label."""
    sources: dict[str, list[PartitionReport]] = {}
    for name, report in partitions.items():
        topic = name if report.files else name.rpartition(":")[0]
        if report.history <= 1 and "#" not in topic:  # later passes repeat the first; a log that is gone is past
            sources.setdefault(topic, []).append(report)
    found = []
    for name, reports in sources.items():
        outcomes, skipped = Counter[str](), Counter[str]()
        for report in reports:
            outcomes.update(report.outcomes)
            skipped.update(report.skipped)
        rejected, without = outcomes["dead_lettered"], sum(skipped[reason] for reason in _UNUSABLE)
        events = outcomes.total() - sum(skipped[reason] for reason in _AS_ORDERED)
        read = reports[0].history and not sum(report.pending for report in reports)
        if events and rejected + without == events and (read or events >= _FEW):
            found.append(
                f"none of the {events:,} events of {name} can be used: {rejected:,} were rejected, and {without:,} "
                "have no label; compare [schema] with the dead letters, and [schema.label] with what is sent"
            )
    return found
