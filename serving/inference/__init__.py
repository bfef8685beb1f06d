"""From a request to a reply: batching, prediction, shadow traffic."""
