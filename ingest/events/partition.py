"""A partition of a topic, and its incarnations."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class TopicPartition:
    """One partition as the source numbers them; incarnation counts how often the topic was made anew."""

    topic: str
    partition: int
    incarnation: int = 0

    def __str__(self) -> str:
        return f"{self.topic}:{self.partition}"

    @property
    def next_incarnation(self) -> "TopicPartition":
        """The partition of the topic that was made after this one."""
        return TopicPartition(self.topic, self.partition, self.incarnation + 1)


def latest_incarnations(partitions: Iterable[TopicPartition]) -> dict[tuple[str, int], int]:
    """Return the place of each topic and number's last incarnation, which is the one that there is."""
    return {(each.topic, each.partition): place for place, each in enumerate(partitions)}
