"""Kafka in, validated blocks out.

In: messages of the pipeline's topics, read in a process of its own from assigned partitions, never by subscription.
Out: blocks, many events as columns, in offset order within each partition, each event with its identity and, where
ingest decided it, its outcome. What cannot be used goes to the dead-letter topic with its reason and is counted.
Promised: nothing that was read is missing from the blocks, and no more than `stream.buffer_bytes` waits in memory.
"""
