"""The ingest process: polls partitions, builds blocks, sends dead letters."""
