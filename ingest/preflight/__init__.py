"""What would keep ingest from reading: checks of the broker, its topics, the schema and the history, for `doctor`."""
