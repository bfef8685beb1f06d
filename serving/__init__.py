"""Predictions over HTTP from the newest version.

In: version directories that the learner publishes, requests of the Open Inference Protocol v2.
Out: replies that name the version they were computed by and the offsets it has learned.
Guarantees: one version answers a request, and a swap fails no request.
"""
