"""Predictions over HTTP, gRPC and Kafka from the newest version.

In: version directories that the learner publishes, requests of the Open Inference Protocol v2, messages of
topics.
Out: replies and answers that name the version they were computed by and the offsets it has learned.
Guarantees: one version answers a request, a swap fails no request, and a message has one committed answer.
"""
