"""A partition of a topic, and its incarnations."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class TopicPartition:
    """A partition of a topic; `incarnation` counts how often the topic was created again.

    The rows of a file of the history are a partition for each pass over it; `history` counts the passes from 1.
    """

    topic: str
    partition: int
    incarnation: int = 0
    history: int = 0
    """0 for the partition of a topic."""

    def __str__(self) -> str:
        return f"{self.topic}:{self.partition}"

    @property
    def identity_topic(self) -> str:
        """The topic in the identities of its events, which are the same in all passes over a file."""
        return self.topic.removesuffix(f".{self.history}") if self.history > 1 else self.topic

    @property
    def next_incarnation(self) -> "TopicPartition":
        """The same partition after its topic was created again."""
        return TopicPartition(self.topic, self.partition, self.incarnation + 1)


def latest_incarnations(partitions: Iterable[TopicPartition]) -> dict[tuple[str, int], int]:
    """Return the index of the latest incarnation of each (topic, number): the one that exists now."""
    return {(each.topic, each.partition): index for index, each in enumerate(partitions)}
