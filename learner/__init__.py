"""The training loop and what it publishes.

In: blocks from ingest and samples from replay. Out: versions, whole directories that serving picks up.
Promised: every event gets exactly one outcome, in order, and a version says up to which offsets it has learned.
"""
