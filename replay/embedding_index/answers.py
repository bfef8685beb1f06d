"""The answers of the index that its client returns.

Legend: C clusters, D numbers of an embedding, Q queries, k neighbours.
"""

from dataclasses import dataclass

from replay.embedding_index.protocol import Ids, Vectors


@dataclass(frozen=True)
class NeighbourAnswer:
    """The neighbours of the queries of `step`: ids `[Q, k]`, nearest first, NO_ID if there are fewer than k."""

    step: int
    ids: Ids


@dataclass(frozen=True)
class Centroids:
    """Clusters of embeddings, float32 `[C, D]`; `number` grows with each training."""

    number: int
    centroids: Vectors
