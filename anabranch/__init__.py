"""The command line, and what composes ingest, replay, learner and serving into one pipeline."""
