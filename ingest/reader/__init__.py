"""The learner's side of ingest: starts and restarts ingest processes, on one host or several, and receives blocks."""
