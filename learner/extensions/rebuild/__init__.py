"""Learns again to the point at which a version was published, in a separate state directory, and compares the two.

In come a version's manifest, the checkpoints and the stream; out go the weights, and how far they are from those of the
version. The state directory of the pipeline is only read, and nothing is written to Kafka, Redis or an object store.
"""
