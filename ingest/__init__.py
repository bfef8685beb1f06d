"""Kafka in, validated blocks out.

In: messages of the pipeline's topics, read in a separate process from assigned partitions, never by subscription.
Out: blocks, many events as columns, in offset order within each partition, each event with its identity and, where
ingest decided it, its outcome. Bad messages go to the dead-letter topic with their reason, and are counted.
Promised: the blocks hold every event that was read, and at most `stream.buffer_bytes` are buffered in memory.
"""
