"""How many events one step may offer to the store, which has to have slots for them."""

from ingest.config import StreamSettings
from ingest.transport.shared_ring import MOST_ROWS as MOST_IN_A_BLOCK
from learner.config import LearnerSettings
from learner.stream.batches import most_stored
from learner.stream.round_robin import MOST_ROWS as MOST_WAITING


def most_offered(learner: LearnerSettings, stream: StreamSettings, ranks: int) -> int:
    """Return how many events a step of so many ranks trains on and stores without it, at most."""
    trained = learner.batch_size * ranks
    if stream.unlabelled != "store" and stream.lag_policy.action != "store-only":
        return trained
    if learner.deterministic:
        return MOST_WAITING + trained
    return trained + most_stored(trained) + MOST_IN_A_BLOCK
