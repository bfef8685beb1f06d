"""Predictions through Kafka: the messages of topics in, an answer to each out."""
